"""How a trajectory that a killed run had begun gets its environment back, by what the environment offers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.rollout.boundary import (
    EnvironmentFailed,
    EnvironmentLost,
    Environments,
    EnvironmentSession,
    StepResult,
)
from skyrl_train.rollout.boundary.session import Restarted
from skyrl_train.rollout.envs.word_problems import WordProblemsEnv
from skyrl_train.rollout.hosts.local import LocalWorkers
from skyrl_train.rollout.hosts.processes import ProcessEnvironments
from skyrl_train.rollout.hosts.threads import ThreadEnvironments
from skyrl_train.rollout.journal import Journal
from skyrl_train.rollout.loop_thread import LoopThread
from skyrl_train.telemetry.records import FAILED
from skyrl_train.types import Failure, FailureKind, Outcome, Trajectory
from tests.support.fakes import make_prompts
from tests.support.fakes_resumable import TURNS, Secret

NAME = "stream-4-000000-0001"
MESSAGES = [{"role": "user", "content": "2+2?"}]


class Runs:
    """Runs of one trajectory, each with the journal that the ones before left; none closes its environment, as a kill."""

    def __init__(self, folder: Path, environments: Environments, env: str, loop: LoopThread, **extras: Any) -> None:
        self._path, self._among, self._spec, self._extras = folder / "journal.jsonl", environments, env, extras
        self._loop = loop
        self.journal = Journal(self._path, prompts="p")
        self.session = self._session()

    def again(self) -> None:
        """The run is killed and another one begins."""
        self.journal.close()
        self.journal = Journal(self._path, prompts="p")
        self.session = self._session()

    def restart(self) -> None:
        """The trajectory begins once more in the same run."""
        self.session = self._session()

    def begin(self) -> None:
        assert self._loop.run(self.session.start(MESSAGES)) == MESSAGES

    def step(self, action: str) -> str:
        result: StepResult = self._loop.run(self.session.step(action))
        return str(result.observations[0]["content"])

    def metrics(self) -> dict[str, float]:
        return dict(self._loop.run(self.session.metrics()))

    def close(self) -> None:
        self._loop.run(self.session.close())
        self.journal.close()

    def _session(self) -> EnvironmentSession:
        return EnvironmentSession(
            self._among,
            f"tests.support.fakes_resumable:{self._spec}",
            self._extras,
            self._spec,
            journal=self.journal,
            trajectory=NAME,
        )


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread("test")
    yield thread
    thread.close()


@pytest.fixture(autouse=True)
def _first_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Secret, "made", itertools.count())
    monkeypatch.setattr(Secret, "closed", [])


def threads() -> ThreadEnvironments:
    return ThreadEnvironments(num_workers=1, timeout_s=5.0)


def begun(folder: Path, env: str, loop: LoopThread, **extras: Any) -> tuple[Runs, list[str]]:
    """A run that was killed after one step, and what was observed."""
    runs = Runs(folder, threads(), env, loop, **extras)
    runs.begin()
    said = [runs.step("x")]
    runs.again()
    return runs, said


@pytest.mark.parametrize(
    ("env", "way"), [("WithState", "state"), ("Asynchronous", "state"), ("Deterministic", "replay")]
)
def test_an_environment_goes_on_where_it_was(tmp_path: Path, loop: LoopThread, env: str, way: str) -> None:
    runs, said = begun(tmp_path, env, loop)
    runs.begin()
    assert runs.step("x") == said[0]
    assert next(Secret.made) == 1, "as long as the journal answers there is no second environment"
    secret = said[0].split()[0]
    assert [runs.step("y"), runs.step("z")] == [f"{secret} + 2", f"{secret} + 3"]
    assert runs.metrics() == {"secret": float(secret), "turns": 3.0}
    assert runs.journal.take_counts() == {f"stream/resumed_{way}": 1.0}
    assert runs.journal.take_counts() == {}
    runs.close()
    assert Secret.closed == [int(secret)]


def test_a_trajectory_that_had_ended_needs_no_environment(tmp_path: Path, loop: LoopThread) -> None:
    runs = Runs(tmp_path, threads(), "Secret", loop)
    runs.begin()
    said = [runs.step(str(turn)) for turn in range(TURNS)]
    metrics = runs.metrics()
    runs.again()
    runs.begin()
    assert [runs.step(str(turn)) for turn in range(TURNS)] == said
    assert runs.metrics() == metrics
    runs.close()
    assert next(Secret.made) == 1
    assert Secret.closed == []
    assert runs.journal.take_counts() == {}


def test_an_environment_that_offers_nothing_begins_with_its_first_turn(tmp_path: Path, loop: LoopThread) -> None:
    runs, said = begun(tmp_path, "Secret", loop)
    runs.begin()
    assert (said, runs.step("x"), runs.step("y")) == (["0 + 1"], "1 + 1", "1 + 2")
    assert runs.journal.take_counts() == {"stream/restarted_no_state": 1.0}
    runs.again()
    runs.begin()
    assert runs.step("x") == "2 + 1", "what the first one said is of no use to the third, either"
    runs.close()


def test_one_that_had_no_response_yet_begins_again_without_being_counted(tmp_path: Path, loop: LoopThread) -> None:
    runs = Runs(tmp_path, threads(), "Secret", loop)
    runs.begin()
    runs.again()
    runs.begin()
    assert runs.step("x") == "1 + 1"
    assert runs.journal.take_counts() == {}
    runs.close()


@pytest.mark.parametrize(
    ("env", "extras", "action", "reason"),
    [
        ("WithState", {"refuses": True}, "x", "state_refused"),
        ("NotSo", {}, "x", "replay_differs"),
        ("WithState", {}, "another", "asked_otherwise"),
    ],
)
def test_what_cannot_be_brought_back_is_run_once_more(
    tmp_path: Path, loop: LoopThread, env: str, extras: dict[str, Any], action: str, reason: str
) -> None:
    runs, said = begun(tmp_path, env, loop, **extras)
    runs.begin()
    with pytest.raises(Restarted, match=reason):
        _ = [runs.step(action), runs.step("y")]
    runs.restart()
    runs.begin()
    first = runs.step("x")
    assert first != said[0]
    assert runs.step("y") == first.replace("+ 1", "+ 2")
    assert runs.journal.take_counts() == {f"stream/restarted_{reason}": 1.0}
    runs.close()
    assert len(Secret.closed) == next(Secret.made) - 1, "all but the one of the run that was killed"


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"at": {1, 2}}, r"the state.at is \{1, 2\} \(set\)"),
        ("x" * 2_000_000, "2,000,002 characters as JSON; must have"),
    ],
)
def test_a_state_that_cannot_be_kept_fails_the_trajectory(
    tmp_path: Path, loop: LoopThread, state: Any, told: str
) -> None:
    runs = Runs(tmp_path, threads(), "WithState", loop, state=state)
    with pytest.raises(EnvironmentFailed, match=told):
        runs.begin()
    runs.close()


def test_what_failed_is_run_again_in_an_environment_of_which_nothing_is_known(tmp_path: Path, loop: LoopThread) -> None:
    runs, said = begun(tmp_path, "WithState", loop)
    failed = Trajectory(
        prompt_uid="p0",
        sample_index=1,
        turns=(),
        outcome=Outcome(FAILED),
        failure=Failure(kind=FailureKind.ENVIRONMENT_ERROR, message="gone", turn_index=1),
    )
    loop.run(runs.journal.keep_group(4, make_prompts(1)[0], (failed,)))
    runs.again()
    runs.begin()
    assert runs.step("x") != said[0]
    runs.close()


@pytest.mark.slow
@pytest.mark.parametrize("env", ["WithState", "Asynchronous"])
def test_states_are_carried_from_and_to_worker_processes(tmp_path: Path, loop: LoopThread, env: str) -> None:
    def workers() -> ProcessEnvironments:
        spec = f"tests.support.fakes_resumable:{env}"
        host = LocalWorkers((spec,), worker_memory_gb=1.0)
        return ProcessEnvironments(host, num_workers=1, timeout_s=10.0)

    first, second = workers(), workers()
    runs = Runs(tmp_path, first, env, loop)
    runs.begin()
    runs.step("x")
    loop.run(first.aclose())
    runs._among = second
    runs.again()
    runs.begin()
    assert [runs.step("x"), runs.step("y")] == ["0 + 1", "0 + 2"]
    assert runs.journal.take_counts() == {"stream/resumed_state": 1.0}
    runs.close()
    loop.run(second.aclose())


def test_the_bundled_environment_goes_on_from_its_state() -> None:
    row = {"reward_spec": {"ground_truth": "4"}}
    before, after = WordProblemsEnv(extras=row), WordProblemsEnv(extras=row)
    before.step("#### 5")
    after.set_state(before.get_state())
    assert after.step("#### 4") == before.step("#### 4")
    assert after.get_metrics() == before.get_metrics() == {"solved": 1.0, "solved_first_turn": 0.0, "turns": 2.0}


class Losing:
    """Environments of which one is lost before calls of these numbers; each counts its steps."""

    may_lose_environments = True
    given_up, num_given_up, num_close_failures = "", 0, 0

    def __init__(self, *lost_before: int, drifts: bool = False) -> None:
        self.lost_before, self.drifts = lost_before, drifts
        self.asked: list[str] = []
        self.steps = 0
        self.made = 0

    def host(self, name: str) -> Losing:
        del name
        return self

    async def ask(self, request: Any) -> object:
        self.asked.append(request["call"])
        if len(self.asked) in self.lost_before:
            raise EnvironmentLost
        if request["call"] == "construction":
            self.steps, self.made = 0, self.made + 1
            return {"value": []}
        if request["call"] == "init":
            return {"value": request["messages"]}
        if request["call"] == "set_state":
            self.steps = request["state"]["steps"]
            return {"value": None}
        self.steps += request["call"] == "step"
        said = f"{self.steps} of {self.made if self.drifts else 1}"
        value = {"observations": [{"role": "user", "content": said}], "reward": 0.0, "done": False}
        return (
            {"value": value, "resume": {"state": {"steps": self.steps}}} if request.get("keeps") else {"value": value}
        )

    def release(self) -> None:
        self.asked.append("release")

    async def aclose(self) -> None:
        """Nothing runs."""


@pytest.mark.parametrize(
    ("lost_before", "asked"),
    [
        ((4,), "construction init step step construction init step step"),
        ((4, 6), "construction init step step construction init construction init step step"),
    ],
)
def test_what_was_lost_with_its_worker_is_asked_again_however_often(
    loop: LoopThread, lost_before: tuple[int, ...], asked: str
) -> None:
    among = Losing(*lost_before)
    session = EnvironmentSession(among, "any", {}, "Lost")
    loop.run(session.start(MESSAGES))
    said = [loop.run(session.step(action)).observations[0]["content"] for action in "xy"]
    assert said == ["1 of 1", "2 of 1"]
    assert " ".join(among.asked) == asked


def test_one_that_is_lost_and_answers_otherwise_is_closed_and_fails(loop: LoopThread) -> None:
    among = Losing(4, drifts=True)
    session = EnvironmentSession(among, "any", {}, "Lost")
    loop.run(session.start(MESSAGES))
    loop.run(session.step("x"))
    with pytest.raises(EnvironmentFailed, match="made again, it answered otherwise at step"):
        loop.run(session.step("y"))
    assert among.asked[-1] == "close"


def test_one_that_was_resumed_and_is_lost_comes_back_by_the_state_and_what_followed(
    tmp_path: Path, loop: LoopThread
) -> None:
    def session(among: Losing, journal: Journal) -> EnvironmentSession:
        return EnvironmentSession(among, "any", {}, "Lost", journal=journal, trajectory=NAME)

    journal = Journal(tmp_path / "journal.jsonl", prompts="p")
    before = session(Losing(), journal)
    loop.run(before.start(MESSAGES))
    loop.run(before.step("x"))
    journal.close()
    journal, among = Journal(tmp_path / "journal.jsonl", prompts="p"), Losing(4)
    after = session(among, journal)
    loop.run(after.start(MESSAGES))
    said = [loop.run(after.step(action)).observations[0]["content"] for action in "xyz"]
    assert said == ["1 of 1", "2 of 1", "3 of 1"]
    assert among.asked == ["construction", "set_state", "step", "step", "construction", "set_state", "step", "step"]
    journal.close()
