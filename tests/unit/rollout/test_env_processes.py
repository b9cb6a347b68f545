"""Environments in worker processes: what shares a worker, what is lost with it, and the same rollouts as on threads."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config.generation import GeneratorConfig
from skyrl_train.config.schema import EnvironmentConfig
from skyrl_train.errors import ConfigError, SkyrlTrainError
from skyrl_train.rollout.env_boundary import Broken, EnvironmentSession
from skyrl_train.rollout.env_local import LocalWorkers, WorkerSettings, violations_in_process
from skyrl_train.rollout.env_processes import ProcessEnvironments
from skyrl_train.rollout.env_worker import MAX_FRAME_BYTES, Frames, frame
from skyrl_train.rollout.environments import uses_processes
from skyrl_train.rollout.generator import RolloutGenerator
from skyrl_train.types import Prompt, RolloutBatch, SamplingParams
from tests.environment_cases import COUNTING, SCRIPTED
from tests.fakes import FakeEngine, done_with, go_on_with, make_prompts, make_tokenizer
from tests.process_trees import descendants, is_running

TOKENIZER = make_tokenizer()
ANSWER = [*TOKENIZER.encode("#### 4"), 3]
MESSAGES = [{"role": "user", "content": "2+2?"}]


def environments(num_workers: int = 1, *, timeout_s: float = 10.0, spec: Any = COUNTING) -> ProcessEnvironments:
    host = LocalWorkers(WorkerSettings(specs=(spec,), registry=False, memory_gb=1.0))
    return ProcessEnvironments(host, num_workers=num_workers, timeout_s=timeout_s)


async def started(among: ProcessEnvironments, **extras: Any) -> EnvironmentSession:
    session = EnvironmentSession(among, COUNTING, extras, "Counting")
    await session.start(MESSAGES)
    return session


def test_an_environment_whose_worker_was_ended_by_another_goes_on_where_it_was() -> None:
    async def two() -> tuple[list[str], str, dict[str, float]]:
        among = environments()
        fatal, steady = await started(among, fatal="b"), await started(among)
        said = [(await steady.step("x")).observations[0]["content"]]
        before = (await steady.metrics())["process"]
        with pytest.raises(Broken) as caught:
            await fatal.step("b")
        said += [(await steady.step("y")).observations[0]["content"]]
        metrics = await steady.metrics()
        assert metrics["process"] != before
        await steady.close()
        await fatal.close()
        await among.aclose()
        return said, caught.value.message, metrics

    said, reason, metrics = asyncio.run(two())
    assert (said, metrics["steps"]) == (["1", "2"], 2.0)
    assert reason == "Counting.step: its worker process exited with status 9"


def test_one_that_answers_otherwise_when_it_is_made_again_fails() -> None:
    async def two() -> str:
        among = environments()
        fatal, steady = await started(among, fatal="b"), await started(among, random=True)
        await steady.step("x")
        with pytest.raises(Broken):
            await fatal.step("b")
        with pytest.raises(Broken) as caught:
            await steady.step("y")
        await among.aclose()
        return caught.value.message

    assert asyncio.run(two()) == (
        "another environment ended the worker that Counting shared with it; made again, it answered otherwise at step"
    )


def test_there_are_at_most_as_many_workers_as_asked_for_and_waiting_is_no_part_of_the_deadline() -> None:
    async def many() -> set[float]:
        among = environments(2, timeout_s=2.0)
        sessions = await asyncio.gather(*(started(among, slow_s=0.6) for _ in range(10)))
        await asyncio.gather(*(session.step("x") for session in sessions))
        processes = {(await session.metrics())["process"] for session in sessions}
        await among.aclose()
        return processes

    assert len(asyncio.run(many())) == 2


def test_nothing_is_left_of_the_processes_after_the_end() -> None:
    before = set(descendants(os.getpid()))

    async def one() -> set[int]:
        among = environments()
        await started(among)
        during = set(descendants(os.getpid())) - before
        await among.aclose()
        return during

    during = asyncio.run(one())
    assert len(during) == 2  # the supervisor and one worker
    assert not any(map(is_running, during))


def test_an_argument_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(ConfigError, match=r"environment.env_class.start: must be plain data.*isolation=thread"):
        environments(spec={"_target_": COUNTING, "start": object()})


def test_arguments_reach_the_worker() -> None:
    async def one() -> str:
        spec = {"_target_": COUNTING, "start": 41}
        among = environments(spec=spec)
        session = EnvironmentSession(among, spec, {}, "Counting")
        await session.start(MESSAGES)
        result = await session.step("x")
        await among.aclose()
        return str(result.observations[0]["content"])

    assert asyncio.run(one()) == "42"


@pytest.mark.parametrize(
    ("module", "told"),
    [
        ("import os; os._exit(4)", "ended its process, which exited with status 4"),
        ("import ctypes; ctypes.string_at(0)", "ended its process, which was ended by SIGSEGV"),
        ("raise ValueError('no')", "ValueError: no"),
        ("class Env: pass", "is no argument of harmful:Env"),
    ],
)
def test_a_module_that_harms_who_imports_it_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, told: str
) -> None:
    (tmp_path / "harmful.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    (first, *_) = violations_in_process(["harmful:Env"])
    assert "environment.env_class" in first.field
    assert told in str(first)
    assert "harmful" not in sys.modules


def test_workers_of_a_module_that_leaves_a_thread_behind_import_it_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    (tmp_path / "threaded.py").write_text(source + f"from {COUNTING.partition(':')[0]} import Counting\n")
    monkeypatch.syspath_prepend(tmp_path)

    async def one() -> float:
        among = environments(spec="threaded:Counting")
        session = EnvironmentSession(among, "threaded:Counting", {}, "Counting")
        await session.start(MESSAGES)
        result = await session.step("x")
        await among.aclose()
        return result.reward

    assert asyncio.run(one()) == 0.0


def test_the_bundled_environment_runs_on_threads_and_others_in_processes() -> None:
    assert not uses_processes(EnvironmentConfig())
    assert uses_processes(EnvironmentConfig(env_class="gsm8k"))
    assert uses_processes(EnvironmentConfig(env_class=COUNTING))
    assert uses_processes(EnvironmentConfig(env_class=None))
    assert not uses_processes(EnvironmentConfig(env_class=COUNTING, isolation="thread"))
    assert uses_processes(EnvironmentConfig(isolation="process"))


def rollouts(prompts: list[Prompt], **environment: Any) -> RolloutBatch:
    config = EnvironmentConfig(**{"env_class": SCRIPTED, "max_failed_fraction": 1.0, **environment})
    generator = RolloutGenerator(FakeEngine(lambda _: ANSWER), TOKENIZER, GeneratorConfig(max_turns=3), config, 0)
    try:
        return generator.generate(
            prompts, n_samples_per_prompt=2, sampling=SamplingParams(), global_step=1, purpose="train"
        )
    finally:
        generator.close()


@pytest.mark.parametrize(
    "others", [{"env_class": SCRIPTED}, {"env_class": "word_problems"}, {"env_class": "gsm8k_multi_turn"}]
)
def test_rollouts_are_the_same_on_threads_and_in_processes(others: dict[str, Any]) -> None:
    steps = [go_on_with("Try again", 0.25), done_with(1)]
    prompts = make_prompts(3, steps=steps, reward_spec={"ground_truth": "4", "method": "rule"})
    prompts += [replace(make_prompts(1, steps=[done_with("x")], reward_spec={"ground_truth": "5"})[0], uid="bad")]
    on_threads = rollouts(prompts, isolation="thread", **others)
    assert rollouts(prompts, isolation="process", num_workers=2, **others) == on_threads
    assert any(trajectory.reward for trajectory in on_threads.trajectories if not trajectory.failed)


def test_too_many_failures_end_the_run_with_their_reasons() -> None:
    prompts = make_prompts(2, steps=[done_with("x")])
    with pytest.raises(SkyrlTrainError, match=r"4 of 4|[123] of 4 trajectories failed"):
        rollouts(prompts, max_failed_fraction=0.0)


def test_a_process_that_is_asked_to_end_does_so_while_an_environment_holds_the_interpreter() -> None:
    """A catastrophic regular expression in a worker; SIGTERM raises in the main thread, which waits for the rollout."""
    code = """
import signal, sys, time
from tests.unit.rollout.test_env_processes import rollouts, make_prompts
from tests.reliability.hostile_environments import HOSTILE
def end(*_): raise SystemExit(7)
signal.signal(signal.SIGTERM, end)
print("begins", flush=True)
rollouts(make_prompts(2, deed="a catastrophic regular expression"), env_class=HOSTILE, step_timeout_s=60.0)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        deadline = time.monotonic() + 60
        while len(descendants(process.pid)) < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1.0)
        family = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 7
        while any(map(is_running, family)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(map(is_running, family))
    finally:
        process.kill()
        process.stdout.close()  # type: ignore[union-attr]
        process.wait(timeout=20)


def test_a_trainer_that_is_killed_leaves_no_process_behind() -> None:
    code = """
from tests.unit.rollout.test_env_processes import rollouts, make_prompts
from tests.reliability.hostile_environments import HOSTILE
rollouts(make_prompts(2, deed="a child that is waited for"), env_class=HOSTILE, step_timeout_s=60.0)
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 90
    while len(descendants(process.pid)) < 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    family = descendants(process.pid)
    process.kill()
    process.wait(timeout=20)
    assert len(family) >= 4  # itself, the supervisor, a worker and what it started
    while any(map(is_running, family)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, family))


@pytest.mark.parametrize(
    "data", [b"\xff" * 8, b"\0\0\0\x01x", b"\0\0\0\x03NaN", b"\0\0\x10\0" + b"[" * 4096, b"\0\0\0\x02\xff\xff"]
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        list(Frames().feed(data))


def test_messages_arrive_whole_however_they_are_cut() -> None:
    messages: list[Any] = [{"a": [1, 2.5, None, True, "\ud800 ü"]}, "x" * 1000, 3]
    data = b"".join(map(frame, messages))
    frames = Frames()
    assert [m for at in range(len(data)) for m in frames.feed(data[at : at + 1])] == messages
    with pytest.raises(ValueError, match="at most"):
        frame("x" * MAX_FRAME_BYTES)
