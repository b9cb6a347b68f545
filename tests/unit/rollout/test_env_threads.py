"""Environments on threads: deadlines, and one boundary for everything that breaks."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from skyrl_train.rollout.boundary import (
    MAX_CHARACTERS,
    EnvironmentFailed,
    EnvironmentSession,
    StepResult,
    check_messages,
    check_step,
    numbers_only,
    read_answer,
)
from skyrl_train.rollout.hosts.threads import ThreadEnvironments
from skyrl_train.types import FailureKind
from tests.support.environment_cases import ASYNCHRONOUS
from tests.support.fake_environments import FAKE_ENVIRONMENT, FakeEnvironment, done_with, go_on_with

T = TypeVar("T")
MESSAGES = [{"role": "user", "content": "2+2?"}]


@pytest.fixture(autouse=True)
def fresh_environments() -> Iterator[None]:
    FakeEnvironment.reset()
    yield
    FakeEnvironment.release.set()


def make_session(runner: ThreadEnvironments, **extras: Any) -> EnvironmentSession:
    return EnvironmentSession(runner, FAKE_ENVIRONMENT, extras, name="FakeEnvironment")


async def play(runner: ThreadEnvironments, **extras: Any) -> StepResult:
    """One episode of one step, closed however it goes."""
    session = make_session(runner, **extras)
    try:
        await session.start(MESSAGES)
        result = await session.step("4")
        await session.metrics()
        return result
    finally:
        await session.close()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


def broken_by(coroutine: Coroutine[Any, Any, Any]) -> EnvironmentFailed:
    with pytest.raises(EnvironmentFailed) as caught:
        asyncio.run(coroutine)
    return caught.value


def test_a_step_gives_observations_reward_and_done() -> None:
    result = run(play(ThreadEnvironments(num_workers=2, timeout_s=5), steps=[go_on_with("Try again", 0.5)]))
    assert result == StepResult(observations=[{"role": "user", "content": "Try again"}], reward=0.5, done=False)


@pytest.mark.parametrize("method", ["construction", "init", "step", "get_metrics"])
def test_an_exception_is_a_failure_that_says_what_was_raised(method: str) -> None:
    broken = broken_by(play(ThreadEnvironments(num_workers=2, timeout_s=5), raise_in=method))
    assert (broken.kind, broken.message.partition(" at ")[0]) == (
        FailureKind.ENVIRONMENT_ERROR,
        "ValueError: unknown city 'Oz'",
    )


def test_an_environment_that_exits_the_interpreter_fails_its_trajectory_only() -> None:
    broken = broken_by(play(ThreadEnvironments(num_workers=2, timeout_s=5), raise_in="step", error=SystemExit(3)))
    assert (broken.kind, broken.message.partition(" at ")[0]) == (FailureKind.ENVIRONMENT_ERROR, "SystemExit: 3")


def test_a_timeout_error_of_the_environments_own_is_an_error_not_a_timeout() -> None:
    broken = broken_by(
        play(ThreadEnvironments(num_workers=2, timeout_s=5), raise_in="step", error=TimeoutError("database"))
    )
    assert (broken.kind, broken.message.partition(" at ")[0]) == (
        FailureKind.ENVIRONMENT_ERROR,
        "TimeoutError: database",
    )


@pytest.mark.parametrize("method", ["construction", "init", "step", "get_metrics"])
def test_a_stop_iteration_is_an_error_not_a_timeout(method: str) -> None:
    broken = broken_by(
        play(ThreadEnvironments(num_workers=2, timeout_s=5), raise_in=method, error=StopIteration("end"))
    )
    assert (broken.kind, broken.message.partition(" at ")[0]) == (FailureKind.ENVIRONMENT_ERROR, "StopIteration: end")


def test_an_error_without_a_text_is_told_by_its_type() -> None:
    broken = broken_by(play(ThreadEnvironments(num_workers=2, timeout_s=5), raise_in="step", error=Unspeakable()))
    assert broken.message.partition(" at ")[0] == "Unspeakable"


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("method", ["construction", "init", "step", "get_metrics"])
def test_a_call_that_hangs_is_given_up_at_its_deadline(method: str) -> None:
    runner = ThreadEnvironments(num_workers=2, timeout_s=0.25)
    broken = broken_by(play(runner, hang_in=method))
    assert broken.kind is FailureKind.ENVIRONMENT_TIMEOUT
    assert broken.message == f"FakeEnvironment.{method} did not answer within 0.25 s"
    assert runner.num_given_up == 1


def test_a_hung_call_does_not_cost_a_worker() -> None:
    runner = ThreadEnvironments(num_workers=1, timeout_s=0.25)

    async def hang_then_play() -> StepResult:
        with pytest.raises(EnvironmentFailed):
            await play(runner, hang_in="step")
        return await play(runner)

    assert run(hang_then_play()).reward == 1.0


@pytest.mark.parametrize("method", ["construction", "step"])
def test_an_environment_that_hung_is_closed_on_its_own_thread_once_it_returns(method: str) -> None:
    runner = ThreadEnvironments(num_workers=1, timeout_s=0.25)
    broken_by(play(runner, hang_in=method))
    assert FakeEnvironment.closed == []
    FakeEnvironment.release.set()
    deadline = time.monotonic() + 5
    while not FakeEnvironment.closed and time.monotonic() < deadline:
        time.sleep(0.01)
    (environment,) = FakeEnvironment.closed
    assert len(environment.threads) == 1


def test_a_hung_environment_does_not_keep_the_interpreter_alive() -> None:
    code = """
import asyncio, time
from skyrl_train.rollout.hosts.threads import ThreadEnvironments
from skyrl_train.rollout.boundary import EnvironmentFailed
async def main():
    try:
        await ThreadEnvironments(num_workers=1, timeout_s=0.1).call(lambda: time.sleep(1000), what="step")
    except EnvironmentFailed as broken:
        print(broken.message)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "step did not answer within 0.1 s"


def test_waiting_for_a_free_thread_does_not_count_against_the_deadline() -> None:
    runner = ThreadEnvironments(num_workers=1, timeout_s=0.5)

    async def calls() -> list[None]:
        return await asyncio.gather(*(runner.call(partial(time.sleep, 0.15), what="step") for _ in range(5)))

    assert run(calls()) == [None] * 5


@pytest.mark.parametrize("extras", [{}, {"raise_in": "step"}, {"raise_in": "init"}, {"steps": [done_with("one")]}])
def test_an_environment_is_closed_however_its_episode_ends(extras: dict[str, Any]) -> None:
    async def episode() -> None:
        try:
            await play(ThreadEnvironments(num_workers=2, timeout_s=5), **extras)
        except EnvironmentFailed:
            return

    run(episode())
    assert len(FakeEnvironment.closed) == 1


@pytest.mark.parametrize("extras", [{"raise_in": "close"}, {"hang_in": "close"}])
def test_a_close_that_breaks_is_counted_and_loses_nothing(extras: dict[str, Any]) -> None:
    runner = ThreadEnvironments(num_workers=2, timeout_s=0.25)
    assert run(play(runner, **extras)).reward == 1.0
    assert runner.num_close_failures == 1


def test_metrics_are_the_finite_numbers() -> None:
    async def metrics() -> dict[str, float]:
        session = make_session(ThreadEnvironments(num_workers=2, timeout_s=5))
        await session.start(MESSAGES)
        return await session.metrics()

    assert run(metrics()) == {"steps": 0.0}


@pytest.mark.parametrize(
    ("reward", "expected"),
    [(True, 1.0), (2, 2.0), (np.float32(0.5), 0.5), (np.int64(-3), -3.0), (np.bool_(False), 0.0), (0.1, 0.1)],
)
def test_every_kind_of_number_is_a_reward(reward: object, expected: float) -> None:
    result = check_step(done_with(reward), source="Env.step")
    assert (result.reward, type(result.reward)) == (expected, float)


@pytest.mark.parametrize(
    "reward", [float("nan"), float("inf"), "1", None, [1.0], {}, 1j, 10**400, 3.5e38, -3.5e38, 1.1e12]
)
def test_what_is_not_a_finite_number_is_no_reward(reward: object) -> None:
    with pytest.raises(EnvironmentFailed, match=r"Env.step returned the reward .*; must be a finite number") as caught:
        check_step(done_with(reward), source="Env.step")
    assert caught.value.kind is FailureKind.INVALID_REWARD


@pytest.mark.parametrize(
    "observations",
    [None, "Try again", [{"content": "no role"}], ["text"], [{"role": "user"}], [{"role": "user", "content": 3}]],
)
def test_what_is_not_a_list_of_chat_messages_is_no_observation(observations: object) -> None:
    with pytest.raises(EnvironmentFailed) as caught:
        check_step({"observations": observations, "reward": 0.0, "done": False}, source="Env.step")
    assert caught.value.kind is FailureKind.INVALID_OBSERVATION


@pytest.mark.parametrize("done", ["False", "True", 1, 0, None, [], np.array([True])])
def test_done_is_true_or_false_and_nothing_that_only_counts_as_either(done: object) -> None:
    with pytest.raises(EnvironmentFailed, match=r"Env.step returned 'done' as .*; must be True or False") as caught:
        check_step({"observations": [], "reward": 0.0, "done": done}, source="Env.step")
    assert caught.value.kind is FailureKind.ENVIRONMENT_ERROR


@pytest.mark.parametrize("done", [True, np.bool_(True), np.array(True)])
def test_numpys_truth_is_a_truth(done: object) -> None:
    assert check_step({"reward": 0.0, "done": done}, source="Env.step").done is True


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ("\ud800", "message 0.content is a text that UTF-8 cannot hold"),
        ([{"type": "text", "text": b"x"}], r"message 0.content\[0\].text is b'x' \(bytes\); must be a text"),
        ([float("nan")], r"message 0.content\[0\] is nan"),
        ([{1: 2}], r"message 0.content\[0\] has a key that is no text"),
        ([1 << 5000], r"message 0.content\[0\] is .*int"),
        ("x" * (MAX_CHARACTERS + 1), "the messages have more than 4,194,304 characters"),
    ],
)
def test_a_message_holds_what_json_and_utf_8_hold(content: object, rule: str) -> None:
    with pytest.raises(EnvironmentFailed, match=rule) as caught:
        check_messages([{"role": "user", "content": content}], source="Env.step")
    assert caught.value.kind is FailureKind.INVALID_OBSERVATION


def test_a_message_that_holds_itself_is_refused() -> None:
    content: list[Any] = []
    content.append(content)
    with pytest.raises(EnvironmentFailed, match="nested more than 32 deep"):
        check_messages([{"role": "user", "content": content}], source="Env.step")


@pytest.mark.parametrize(
    "answer",
    [None, [], "x", {}, {"value": 1, "more": 2}, {"failure": "engine_error", "message": "x"}, {"failure": "x"}],
)
def test_what_is_no_answer_of_a_host_fails_the_trajectory(answer: object) -> None:
    with pytest.raises(EnvironmentFailed, match=r"Env.step: its worker sent .*, which is no answer"):
        read_answer(answer, source="Env.step")


def test_metrics_are_numbers_with_short_names() -> None:
    metrics = {"a": np.float32(0.5), "b" * 300: 1.0, "\ud800": 1.0, "c": "1", "d": 4e38, "e": True, 5: 2}
    assert numbers_only(metrics) == {"a": 0.5, "e": 1.0, "5": 2.0}
    assert len(numbers_only({str(n): n for n in range(5000)})) == 1000


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ({"reward": 1, "done": False, "truncated": True}, (True, True)),
        ({"reward": 1, "terminated": np.bool_(True), "truncated": True}, (True, False)),
        ({"observations": [], "reward": 1, "terminated": False, "truncated": False}, (False, False)),
        (("now you see it", 1, False, True, {}), (True, True)),
        (([], 1, True, False, {}), (True, False)),
    ],
)
def test_an_episode_ends_or_is_cut_short(output: object, expected: tuple[bool, bool]) -> None:
    result = check_step(output, source="Env.step")
    assert (result.done, result.truncated) == expected


def test_the_text_of_gymnasiums_step_is_the_users_message() -> None:
    result = check_step(("a door", 0.5, False, False, {"left": "out"}), source="Env.step")
    assert result.observations == [{"role": "user", "content": "a door"}]


def test_a_reward_by_name_is_the_sum_of_its_components() -> None:
    result = check_step(done_with({"correct": 1, "brief": np.float32(0.5)}), source="Env.step")
    assert (result.reward, result.components) == (1.5, {"correct": 1.0, "brief": 0.5})


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"correct": float("nan")}, r"Env.step\['correct'\] returned the reward nan; must be a finite number"),
        ({"correct": None}, r"Env.step\['correct'\] returned the reward None"),
        ({3: 1.0}, r"Env.step returned a reward named 3; must be a text of at most 200 characters"),
        ({"a": 9e11, "b": 9e11}, r"Env.step returned the reward 18"),
    ],
)
def test_a_component_that_is_no_number_is_no_reward(reward: object, message: str) -> None:
    with pytest.raises(EnvironmentFailed, match=message) as caught:
        check_step(done_with(reward), source="Env.step")
    assert caught.value.kind is FailureKind.INVALID_REWARD


class Bare:
    """No `close`, no `get_metrics`, and rewards by name."""

    def __init__(self, env_config: Any, extras: Any) -> None: ...

    def init(self, prompt: Any) -> Any:
        return prompt, {}

    def step(self, action: str) -> Any:
        return {"observations": [], "reward": {"correct": 1.0, "brief": 0.25}, "done": False, "truncated": False}


@pytest.mark.parametrize("spec", ["test_env_threads:Bare", ASYNCHRONOUS])
def test_what_users_leave_out_is_not_asked_for_and_components_are_summed(spec: str) -> None:
    async def episode() -> dict[str, float]:
        session = EnvironmentSession(ThreadEnvironments(num_workers=None, timeout_s=5), spec, {}, "Bare")
        await session.start(MESSAGES)
        assert [(await session.step("x")).reward for _ in range(2)] == [1.25, 1.25]
        metrics = await session.metrics()
        await session.close()
        return metrics

    assert asyncio.run(episode()) == {"correct": 2.0, "brief": 0.5}


def test_an_asynchronous_call_that_hangs_is_cancelled_and_the_environment_closed(tmp_path: Path) -> None:
    async def episode() -> None:
        threads = ThreadEnvironments(num_workers=None, timeout_s=0.2)
        session = EnvironmentSession(threads, ASYNCHRONOUS, {"closed": str(tmp_path / "closed")}, "Slow")
        await session.start(MESSAGES)
        with pytest.raises(EnvironmentFailed, match=r"Slow.step did not answer within 0.2 s") as caught:
            await session.step("hang")
        assert caught.value.kind is FailureKind.ENVIRONMENT_TIMEOUT

    asyncio.run(episode())
    assert (tmp_path / "closed").read_text() == "closed\n"


def test_a_finished_episode_needs_no_observations() -> None:
    assert check_step({"reward": 1, "done": True}, source="Env.step").observations == []


@pytest.mark.parametrize("output", [None, (1, 2), {"observations": [], "reward": 1.0}])
def test_a_step_without_its_fields_is_an_environment_error(output: object) -> None:
    with pytest.raises(EnvironmentFailed) as caught:
        check_step(output, source="Env.step")
    assert caught.value.kind is FailureKind.ENVIRONMENT_ERROR


@pytest.mark.parametrize("first_messages", [[], "hello", None])
def test_init_must_give_messages(first_messages: object) -> None:
    broken = broken_by(play(ThreadEnvironments(num_workers=2, timeout_s=5), first_messages=first_messages))
    assert broken.kind is FailureKind.INVALID_OBSERVATION
