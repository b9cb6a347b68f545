"""`generator=http` against a real vLLM server, started by the command of docs/vllm.md."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from skyrl_train.model import resolve_model_path
from skyrl_train.telemetry.records import read_rollouts
from tests.support.command_runs import records, run_command, start_command, unaccounted_share, wait_for

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a-token-of-this-test"
START_TIMEOUT_S = 600.0
"""A server is three processes that each import vLLM: on a busy machine that takes minutes."""
SIZES = (
    "+experiment=gsm8k_multiturn",
    "platform=cpu",
    "generator=http",
    "data.validation=[]",
    "generator.n_samples_per_prompt=4",
    "trainer.train_batch_size=8",
    "trainer.policy_mini_batch_size=4",
    "trainer.critic_mini_batch_size=4",
    "trainer.policy.optimizer.lr=1e-3",
)


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that answers."""

    process: subprocess.Popen[bytes]
    url: str

    def kill(self) -> None:
        """All of its processes, at once."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def documented_command(model: str, port: int) -> tuple[dict[str, str], list[str]]:
    """Variables and words of the first command under "A server instead"."""
    text = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8").partition("## A server instead")[2]
    block = re.search(r"```sh\n(.*?)```", text, flags=re.DOTALL)
    assert block is not None
    words = shlex.split(block[1].replace("\\\n", " ").splitlines()[0])
    assert {"FOLDER", "SECRET"} <= set(words)
    variables = dict(word.split("=", 1) for word in words[: words.index("python")])
    named = {"python": sys.executable, "FOLDER": model, "SECRET": TOKEN}
    return variables, [*(named.get(word, word) for word in words[words.index("python") :]), "--port", str(port)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The last test kills it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    variables, command = documented_command(str(resolve_model_path("builtin:tiny_qwen2")), port)
    log = tmp_path_factory.mktemp("server") / "server.log"
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
            start_new_session=True,
        )
    opened = Server(process=process, url=f"http://127.0.0.1:{port}")
    try:
        _wait_until_it_answers(opened, log)
        yield opened
    finally:
        if process.poll() is None:
            opened.kill()


def _wait_until_it_answers(server: Server, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert server.process.poll() is None, log.read_text(encoding="utf-8")[-6000:]
        try:
            if httpx.get(f"{server.url}/health", timeout=5.0).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise AssertionError(f"no answer within {START_TIMEOUT_S:g} s\n{log.read_text(encoding='utf-8')[-6000:]}")


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYRL_TRAIN_API_KEY", TOKEN)


def test_another_token_is_refused_with_the_name_of_its_variable(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYRL_TRAIN_API_KEY", "wrong")
    running = start_command(tmp_path / "run", *SIZES, f"generator.http.url={server.url}", "trainer.total_steps=2")
    status, said = wait_for(running)
    assert status == 2, said
    assert "SKYRL_TRAIN_API_KEY" in said


def test_a_run_learns_by_a_server_that_gets_its_weights_as_files(server: Server, tmp_path: Path) -> None:
    run_command(tmp_path / "run", *SIZES, f"generator.http.url={server.url}", "trainer.total_steps=3")
    steps = records(tmp_path / "run")
    difference = max(record["mismatch/logprob_diff_max"] for record in steps)
    print(f"\nlargest difference of a log-probability over three steps by HTTP: {difference:.1e}")
    assert difference < 1e-3, "the third step was generated with the weights of the second"
    assert unaccounted_share(steps) < 0.05
    assert not (tmp_path / "run" / "weights").exists(), "what a sync wrote is removed"


@pytest.mark.nightly
def test_a_server_answers_while_the_learner_updates_but_for_the_moment_in_which_it_takes_weights(
    server: Server, tmp_path: Path
) -> None:
    stream = ("trainer.max_staleness=1", "trainer.total_steps=3")
    run_command(tmp_path / "run", *SIZES, f"generator.http.url={server.url}", *stream)
    found = records(tmp_path / "run")
    assert found[0]["off_policy/age/max"] == 0.0
    assert max(record["off_policy/age/max"] for record in found) == 1.0
    assert found[0]["off_policy/numerics_abs_max"] < 1e-3
    assert all(record["timing/wait/sync"] > 0 for record in found)
    for number in (1, 2, 3):
        (batch,) = read_rollouts(tmp_path / "run" / "rollouts" / f"train_step_{number:06d}.parquet").values()
        runs = [run for trajectory in batch.trajectories for turn in trajectory.turns for run in turn.weight_versions]
        assert {run.start for run in runs} == {0}, "each answer is of one version"
        assert {run.version for run in runs} <= {number - 2, number - 1}


def test_a_server_that_is_killed_ends_the_run_with_its_address(server: Server, tmp_path: Path) -> None:
    running = start_command(tmp_path / "run", *SIZES, f"generator.http.url={server.url}", "trainer.total_steps=1000")
    begins_by = time.monotonic() + START_TIMEOUT_S
    while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < begins_by:
        time.sleep(0.2)
    server.kill()
    killed = time.monotonic()
    status, said = wait_for(running)
    print(f"\na killed server ends the run after {time.monotonic() - killed:.1f} s:\n{said[-600:]}")
    assert status == 2, said
    assert server.url in said
