"""The command, and unmodified SDKs that speak to it from environments of their own (`scripts/client_env.sh`)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.serve_cases import HAS_SCHEMA, NEEDS_SCHEMA
from tests.support.served_command import CLIENTS, ROOT, Command, client_environment

VERSIONS = ("0.24.1", "0.25.0", "0.38.0")
pytestmark = pytest.mark.skipif(not HAS_SCHEMA, reason=NEEDS_SCHEMA)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    command = Command(tmp_path_factory.mktemp("command") / "served", "--name", "tiny/qwen2")
    yield command
    command.stop()


def client(version: str, command: Command, *words: str) -> str:
    python = CLIENTS / version / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"`scripts/client_env.sh {version}` makes the environment of this SDK")
    done = subprocess.run(
        [str(python), *words], env=client_environment(command), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_an_unmodified_sdk_trains_samples_saves_and_loads(server: Command, version: str) -> None:
    told: dict[str, Any] = json.loads(client(version, server, str(ROOT / "tests/support/sdk_play.py"), "tiny/qwen2"))
    assert told["info"] == ["tiny/qwen2", 4]
    assert told["losses"][0] > told["losses"][1] > told["losses"][2]
    assert told["tokens"][0] != told["tokens"][1]
    assert told["prompt"][0] is None
    assert told["prompt"][1:] == pytest.approx(told["computed"][1:3], abs=1e-4)
    assert told["computed"][1:] == pytest.approx(told["logprobs"][:3], abs=1e-4)
    assert told["top"] == [None, 2, 2]
    assert told["loaded"] == pytest.approx(told["logprobs"], abs=1e-5)
    assert "no public formula. Take importance_sampling" in told["refused"]
    assert told["listed"]
    assert told["runs"] >= 2


@pytest.mark.slow
def test_the_printed_example_works_when_pasted(server: Command) -> None:
    client("0.38.0", server, "-c", server.example())


@pytest.mark.slow
def test_the_documented_way_to_full_fine_tuning_works_with_an_unmodified_sdk(tmp_path: Path) -> None:
    written = next(
        each
        for each in (ROOT / "docs/serve.md").read_text().split("```python\n")
        if each.startswith("# trains all weights")
    ).partition("```")[0]
    code = f"""{written}
rows = [tinker.Datum(tinker.ModelInput.from_ints([1, 2, 3]), {{"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]}})]
losses = []
for _ in range(3):
    passed, stepped = client.forward_backward(rows, "cross_entropy"), client.optim_step(types.AdamParams(learning_rate=1e-3))
    losses.append(passed.result().metrics["loss:sum"])
    stepped.result()
prompt, params = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=4, seed=1)
sampled = client.save_weights_and_get_sampling_client().sample(prompt, 1, params).result()
told = dict(rank=client.get_info().lora_rank, losses=losses, tokens=list(sampled.sequences[0].tokens))
print("TOLD", __import__("json").dumps(told))
"""
    server = Command(tmp_path / "served", "--name", "tiny/qwen2", "--full-for", "owner")
    try:
        told = json.loads(client("0.38.0", server, "-W", "ignore", "-c", code).partition("TOLD ")[2])
    finally:
        server.stop()
    assert told["rank"] is None
    assert told["losses"][0] > told["losses"][1] > told["losses"][2]
    assert len(told["tokens"]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("trains", [{"lora_config": {"rank": 2, "seed": 1}}, {}], ids=["adapter", "full"])
def test_a_killed_server_goes_on_and_its_keys_stay(tmp_path: Path, trains: dict[str, Any]) -> None:
    """Killed while it computes; the client is alive, sends its requests again, and is told what it would have been."""
    import httpx

    from tests.support.serve_cases import Caller, datum

    rows = [datum([1, 2, 3, 4]), datum([9, 8, 7])]
    folder = tmp_path / "served"

    def caller(command: Command) -> Caller:
        url, key = command.variables["TINKER_BASE_URL"], command.variables["TINKER_API_KEY"]
        return Caller(httpx.Client(base_url=url, timeout=60), key)

    first = Command(folder, "--full-for", "owner")
    name = {"base_model": first.example().partition("base_model='")[2].partition("'")[0]}
    one = caller(first)
    session = one.session()
    content = {"session_id": session, "model_seq_id": 0, **name, **trains}
    model = one.done("create_model", content)["model_id"]
    for seq in range(1, 30, 2):
        one.train(model, seq, rows)
        promise = one.step(model, seq + 1)
    time.sleep(0.2)
    assert first.stop(signal.SIGKILL) == -signal.SIGKILL
    second = Command(folder, "--full-for", "owner")
    assert second.variables["TINKER_API_KEY"] == first.variables["TINKER_API_KEY"]
    two = caller(second)
    assert "metrics" in two.outcome(promise)
    expected = two.logprobs(model, 31)
    two.done("unload_model", {"model_id": model, "seq_id": 32})
    fresh = two.done("create_model", {**content, "model_seq_id": 1})["model_id"]
    for seq in range(1, 30, 2):
        two.outcome(two.train(fresh, seq, rows))
        two.outcome(two.step(fresh, seq + 1))
    assert two.logprobs(fresh, 31) == expected
    assert second.stop() == 128 + signal.SIGTERM, "it closes everything, and ends by the signal"
    assert (folder / "keys").stat().st_mode & 0o077 == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model.pth=x"], "model.pth"),
        (["generator=vllm"], "generator"),
        (["--keys", "nowhere"], "nowhere"),
        (["--port", "high"], "--port"),
        (["--full-for", "nobody"], "Take one of owner"),
        (["--also", "tests/other"], "Write --also ORG/NAME model.path="),
        (["--also", "tests/other", "model.path=builtin:tiny_qwen2", "seed=1"], "settings of a model"),
        (["--also", "tests/other", "model.path=nowhere/at_all"], "nowhere/at_all"),
    ],
)
def test_a_command_line_that_cannot_be_is_refused(tmp_path: Path, words: list[str], says: str) -> None:
    command = [sys.executable, "-m", "skyrl_train.main_serve", "--folder", str(tmp_path / "f"), *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, says in done.stderr, "Traceback" in done.stderr) == (2, True, False), done.stderr


@pytest.mark.slow
def test_another_base_has_a_name_and_settings_of_its_own(tmp_path: Path) -> None:
    import httpx

    from tests.support.serve_cases import Caller

    server = Command(tmp_path / "served", "--also", "tests/other", "model.path=builtin:tiny_qwen2")
    try:
        url, key = server.variables["TINKER_BASE_URL"], server.variables["TINKER_API_KEY"]
        told = Caller(httpx.Client(base_url=url, timeout=60), key).get("get_server_capabilities")
    finally:
        server.stop()
    assert [each["model_name"] for each in told["supported_models"]] == ["builtin/tiny_qwen2", "tests/other"]


def test_keys_are_lines_of_a_key_and_its_tenant(tmp_path: Path) -> None:
    from skyrl_train.errors import ConfigError
    from skyrl_train.main_serve import read_keys

    path = tmp_path / "keys"
    path.write_text("# of the team\ntml-aaaaaaaa ann\n\ntml-bbbbbbbb bob\n")
    assert read_keys(path) == {"tml-aaaaaaaa": "ann", "tml-bbbbbbbb": "bob"}
    for text, says in (
        ("tml-aaaaaaaa\n", "line 1"),
        ("tml-aaaaaaaa a\ntml-aaaaaaaa b\n", "line 2"),
        ("", "must have a key"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=says) as refused:
            read_keys(path)
        assert "aaaaaaaa" not in str(refused.value), "a key is a secret"
