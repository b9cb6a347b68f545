"""The five users of the process host, each an owner of one process that attacks: `python -m tests.reliability.process_hosts
USER CODE`. The owner ends in order: at a deadline of a few seconds, or sooner where the code ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

DEADLINE_S = 4.0
_THIS = "tests.reliability.process_hosts"
_MESSAGES = [{"role": "user", "content": "2+2?"}]


class Attacking:
    """An environment whose step runs the code of its row."""

    def __init__(self, env_config: Any, extras: Mapping[str, Any]) -> None:
        self._code = extras["code"]

    def init(self, prompt: list[dict[str, Any]]) -> Any:
        return prompt, {}

    def step(self, action: str) -> Any:
        exec(self._code, {})
        return {"observations": [], "reward": 0.0, "done": True}


def attack(context: Any, code: str) -> str:
    """A case of the self-test that runs the code."""
    exec(code, {})
    return "ended"


def environment(code: str) -> None:
    from skyrl_train.rollout.boundary import EnvironmentFailed, EnvironmentSession
    from skyrl_train.rollout.hosts import LocalWorkers, ProcessEnvironments

    async def play() -> None:
        spec = f"{_THIS}:Attacking"
        workers = LocalWorkers((spec,), worker_memory_gb=1.0)
        among = ProcessEnvironments(workers, num_workers=1, timeout_s=DEADLINE_S)
        session = EnvironmentSession(among, spec, {"code": code}, "Attacking")
        await session.start(_MESSAGES)
        with contextlib.suppress(EnvironmentFailed):
            await session.step("4")
        await session.close()
        await among.aclose()

    asyncio.run(play())


def agent(code: str) -> None:
    from skyrl_train.rollout.agents import Launcher, sandbox

    async def play() -> None:
        sandbox.GRACE_S = 0.5
        one = sandbox.Sandbox(Launcher(), f"skyrl-attack-{os.getpid()}")
        await one.start()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(one.run([sys.executable, "-S", "-c", code], {}), DEADLINE_S)
        await one.close()
        assert not one.folder.parent.exists()

    asyncio.run(play())


def code_reward(code: str) -> None:
    from skyrl_train.rollout.rewards import run_tests

    run_tests(code, ["assert True"], timeout_s=DEADLINE_S, memory_mb=512, sandbox="required")


def self_test(code: str) -> None:
    from skyrl_train.selftest import run_body

    found = run_body("a case", f"{_THIS}:attack", {"code": code}, deadline_s=DEADLINE_S, devices=["cpu"])
    assert found.detail in ("ended", f"still running after {DEADLINE_S:g} s, and killed"), found


def engine(code: str) -> None:
    from skyrl_train.inference.vllm import EngineProcesses

    processes = EngineProcesses()
    with processes.starting({}):
        core = subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)
    with contextlib.suppress(subprocess.TimeoutExpired):
        core.wait(DEADLINE_S)
    processes.close()
    core.wait(10)


USERS: dict[str, Callable[[str], None]] = {
    "environment": environment,
    "agent": agent,
    "code reward": code_reward,
    "self-test": self_test,
    "engine": engine,
}

if __name__ == "__main__":
    USERS[sys.argv[1]](sys.argv[2])
