"""Environments of other packages: gymnasium here, openenv under another interpreter."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from skyrl_train.rollout.boundary import EnvironmentFailed, StepResult, check_step
from skyrl_train.rollout.envs.environments import (
    environment_violations,
    is_asynchronous,
    make_environment,
    resolve_environment,
    split_environment,
)
from skyrl_train.rollout.hosts.local import violations_in_process
from tests.support.adapter_cases import PROMPT, PYTHON, needs_others, played

LAKE = {"_target_": "gymnasium", "id": "FrozenLake-v1", "actions": ["left", "down", "right", "up"], "render": "ansi"}
STILL = {**LAKE, "kwargs": {"is_slippery": False}}
CLIFF = {
    "_target_": "gymnasium", "id": "CliffWalking-v1", "actions": ["up", "right", "down", "left"], "render": "ansi"
}  # fmt: skip

needs_gymnasium = pytest.mark.skipif(importlib.util.find_spec("gymnasium") is None, reason="gymnasium is not installed")
SERVER = """
import socket

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    message: str


class Hint(Observation):
    hint: str


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **further):
        self.secret, self.left = 3 if seed is None else seed, 2
        return Hint(hint=f"a number from 0 to {self.secret * 2}")

    def step(self, action, timeout_s=None, **further):
        if action.message == "fail":
            raise RuntimeError("the server's own")
        self.left -= 1
        right = action.message == str(self.secret)
        return Hint(hint="right" if right else "wrong", reward=float(right), done=right or self.left == 0)

    @property
    def state(self):
        return State()


listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=8)
uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
"""


def test_an_address_after_a_colon_is_an_argument_of_its_adapter() -> None:
    target, arguments = split_environment("gymnasium:package:Env-v0")
    assert target.endswith(":GymnasiumEnvironment")
    assert arguments == {"id": "package:Env-v0"}
    target, arguments = split_environment("openenv:http://localhost:8000")
    assert target.endswith(":OpenEnvironment")
    assert arguments == {"url": "http://localhost:8000"}
    assert split_environment("my.module:Env") == ("my.module:Env", {})


GUIDE = (Path(__file__).resolve().parents[3] / "docs" / "environments.md").read_text()


def test_the_class_of_the_guide_is_what_it_says() -> None:
    names: dict[str, Any] = {"__name__": "guide"}
    (code,) = re.findall(r"^```python\n(.*?)^```", GUIDE, flags=re.DOTALL | re.MULTILINE)
    exec(code, names)
    assert is_asynchronous(names["Guess"])

    async def steps(*answers: str) -> list[StepResult]:
        environment = names["Guess"](None, {"secret": 7})
        await environment.init(PROMPT)
        return [check_step(await environment.step(answer), source="Guess.step") for answer in answers]

    (at_once,) = asyncio.run(steps("7"))
    assert (at_once.reward, at_once.components, at_once.done) == (1.2, {"correct": 1.0, "brief": 0.2}, True)
    *_, last = asyncio.run(steps("1", "2", "3"))
    assert (last.reward, last.done, last.truncated) == (0.0, True, True)
    before, after = (names["Guess"](None, {"secret": 7}) for _ in range(2))
    asyncio.run(before.step("1"))
    after.set_state(before.get_state())
    assert asyncio.run(after.step("7"))["reward"] == {"correct": 1.0, "brief": 0.0}


def test_settings_commands_and_tables_of_the_guide_are_the_adapters() -> None:
    specs = [
        settings["environment"]["env_class"]
        for block in re.findall(r"^```yaml\n(.*?)^```", GUIDE, flags=re.DOTALL | re.MULTILINE)
        if "environment" in (settings := yaml.safe_load(block))
    ]
    assert [spec["_target_"] for spec in specs] == ["gymnasium", "verifiers", "openenv"]
    for spec in specs:
        wrong = environment_violations(spec)
        assert all("needs the package" in violation.rule for violation in wrong), wrong
        create: Any = resolve_environment(split_environment(spec)[0])
        section = GUIDE.partition(f"\n## {spec['_target_']}\n")[2].partition("\n## ")[0]
        rows = re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)
        assert set(rows) | set(spec) - {"_target_"} <= set(inspect.signature(create).parameters)
    named = re.findall(r"environment\.env_class=([\w-]+):", GUIDE)
    assert set(named) == {"gymnasium", "openenv", "verifiers"}
    assert all(split_environment(f"{name}:X")[0].startswith("skyrl_train.rollout.adapters.") for name in named)


@needs_gymnasium
def test_a_lake_is_crossed_in_words() -> None:
    environment: Any = make_environment(STILL, {})
    (first,), _ = environment.init(PROMPT)
    assert first == {"role": "user", "content": "Reach the goal.\n[S]FFF\nFHFH\nFFFH\nHFFG"}
    lost = environment.step("I stay where I am, leftover and all")
    assert lost["reward"] == -1.0  # less than any step
    assert lost["observations"] == [{"role": "user", "content": "Name one of: left, down, right, up."}]
    said = environment.step("not left but Right")
    assert said["observations"][0]["content"].endswith("S[F]FF\nFHFH\nFFFH\nHFFG")
    environment.init(PROMPT)
    steps = [environment.step(move) for move in ("down", "down", "right", "right", "down", "right")]
    assert [each["reward"] for each in steps] == [0, 0, 0, 0, 0, 1]
    assert [each["done"] for each in steps] == [False] * 5 + [True]
    assert environment.get_metrics() == {"invalid_actions": 1.0}
    environment.close()


@needs_gymnasium
def test_a_number_that_no_action_has_is_none_however_long_it_is() -> None:
    environment: Any = make_environment("gymnasium:Blackjack-v1", {})
    environment.init(PROMPT)
    said = [environment.step(answer)["reward"] for answer in ("7", "-1", "9" * 30, "9" * 5000)]
    assert said == [-1.0] * 4
    assert environment.step("not 7 but 0")["done"]
    environment.close()


@needs_gymnasium
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gymnasium:FrozenLak-v1", r"env_class.id: must be an environment that gymnasium can make; got 'FrozenLak-v1'"),
        ("gymnasium:FrozenLake-v1", "must be told in text, and its observations are Discrete"),
        ({**LAKE, "actions": ["left", "right"]}, r"env_class.actions: must name the actions of Discrete\(4\)"),
        ({**LAKE, "colour": 1}, "env_class.colour: is no argument"),
        ("gymnasium", "env_class.id: must be given"),
        (
            CLIFF,
            r"invalid_reward: must be at most what a step earns, .* one of -100; got -1.0. Set invalid_reward: -100",
        ),
    ],
)
def test_what_cannot_be_played_in_text_is_refused_in_a_line(spec: Any, message: str) -> None:
    (violation,) = environment_violations(spec)
    assert "\n" not in str(violation)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(str(violation))


@pytest.mark.parametrize(
    ("package", "spec", "message"),
    [
        (
            "verifiers",
            "verifiers:echo",
            "environment.env_class.name: needs the package verifiers; got 'echo'. It wants another release of "
            "openai than vLLM: python -m venv V; V/bin/pip install verifiers numpy; then environment.python=V/bin/python",
        ),
        (
            "openenv",
            "openenv:http://127.0.0.1:9",
            "environment.env_class.url: needs the package openenv-core; got 'http://127.0.0.1:9'. "
            "Pip install 'openenv-core",
        ),
    ],
)
def test_a_package_that_is_missing_is_named_with_how_to_have_it(package: str, spec: str, message: str) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    (violation,) = environment_violations(spec)
    assert str(violation).startswith(message)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The URL of a server of openenv-core's."""
    program = tmp_path / "server.py"
    program.write_text(SERVER)
    with subprocess.Popen([PYTHON, str(program)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


@pytest.mark.slow
@needs_others
def test_a_session_of_openenv_goes_from_reset_to_its_end(server: str) -> None:
    spec = {"_target_": "openenv", "url": server, "observation": "hint"}
    (first, (wrong, right)), (other, steps) = played(spec, [{"seed": 5}, {"seed": 4}], ["4", "5"])
    assert (first, other) == tuple(f"Reach the goal.\na number from 0 to {most}" for most in (10, 8))
    assert (wrong.reward, wrong.done, wrong.observations[0]["content"]) == (0.0, False, "wrong")
    assert (right.reward, right.done, right.observations[0]["content"]) == (1.0, True, "right")
    assert (steps[0].reward, steps[0].done) == (1.0, True)
    with pytest.raises(EnvironmentFailed, match="RuntimeError: Server error: the server's own"):
        played(spec, [{}], ["fail"])
    no_field, no_server = violations_in_process([{**spec, "observation": "text"}, "openenv:http://127.0.0.1:9"], PYTHON)
    assert str(no_field) == (
        "environment.env_class.observation: must be a field of what the server observes; got 'text'. "
        "The server observes hint, and not 'text'"
    )
    assert str(no_server).startswith(
        "environment.env_class.url: must be a server that begins within 10 s; got 'http://127.0.0.1:9'. "
        "Start its server, or correct the URL (ConnectionError: "
    )
