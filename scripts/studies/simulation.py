"""What a schedule of rollouts and updates takes: engines, environments and a learner, event by event. No torch.

    learner     takes a batch --> update --> sync --> takes the next
    groups      begin as `rollout/admission.py` admits them (serially: a batch's worth at each step), end with their
                last sample
    a sample    asks an engine, waits for its environment, asks again

A new group goes to the engine with the fewest requests, of some in turn, and stays there, as its samples share a prompt.
Not simulated: failures, filters, evaluations, preemption, requests of groups that were given up (which end their turn),
and what processes that share a core take from each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from scripts.studies.simulated_engines import (
    Clock,
    ContinuousEngine,
    Engine,
    Request,
    SimulatedTurn,
    WaveEngine,
)
from skyrl_train.config import TrainerConfig
from skyrl_train.plan.forms import EngineRates
from skyrl_train.rollout import Admission, ConsumedPrompts

_ASKED = 16
"""Engines that a new group may go to: asking all of hundreds would take longer than all else."""
SimulatedGroup = Sequence[Sequence[SimulatedTurn]]
"""The turns of each sample of a prompt."""


@dataclass(frozen=True, kw_only=True)
class LearnerRates:
    """How long the learner takes."""

    token_s: float
    """Of a token of the batch's rows, scored and trained."""
    step_s: float = 0.0
    """Of each step whatever its batch: records."""
    row_s: float = 0.0
    """Of each sample, in the process of the loop."""
    sync_s: float = 0.0
    """From the moment when no engine computes to that when all have the weights."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What is run."""

    batch_size: int
    """Prompts of a step."""
    max_staleness: int
    """0: a batch is generated, then trained on."""
    num_engines: int = 1
    stale_groups: Literal["wait", "drop"] = "wait"
    take_groups: Literal["first_finished", "in_order"] = "first_finished"
    oversample: float = 1.0
    in_flight_updates: bool = False
    """Whether engines take weights between two tokens rather than when what runs has ended."""


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """What came of it. Seconds and ages of each step, in order."""

    step_s: tuple[float, ...]
    wait_s: tuple[float, ...]
    """In which the learner had no batch."""
    engine_busy: float
    """Share of the time in which an engine computed, in the mean over engines."""
    age: tuple[float, ...]
    """Versions between a group's begin and its batch, in the mean over the batch."""
    dropped: int
    """Groups that were given up."""
    tokens: int
    """Of the rows that were trained on: each sample's last context and its answer."""

    def mean_step_s(self, warm_up: int = 0) -> float:
        """Return the mean of the steps after the first `warm_up`."""
        counted = self.step_s[warm_up:]
        return sum(counted) / len(counted)


@dataclass
class _Group:
    began_at: int
    """Version."""
    num_samples: int
    num_left: int
    tokens: int = 0
    is_dropped: bool = False


@dataclass
class _Run:
    """A run while it is simulated."""

    schedule: Schedule
    engine_rates: EngineRates
    learner: LearnerRates
    make_group: Callable[[int], SimulatedGroup]
    clock: Clock = field(default_factory=Clock)
    groups: dict[int, _Group] = field(default_factory=dict)
    """Those that began and are in no batch yet."""
    has_changed: bool = True
    """Whether a group has finished since batches were last asked for."""
    num_ready: int = 0
    """Groups that have finished and are in no batch yet."""
    version: int = 0

    def __post_init__(self) -> None:
        kind = WaveEngine if self.engine_rates.batching == "waves" else ContinuousEngine
        self.engines: list[Engine] = [
            kind(self.clock, self.engine_rates) for _ in range(max(1, self.schedule.num_engines))
        ]
        self.on_finished: Callable[[int], None] = lambda _: None

    def begin(self, ordinal: int, *, leases: bool) -> None:
        """All samples of a group ask for their first answer."""
        samples = self.make_group(ordinal)
        group = self.groups[ordinal] = _Group(began_at=self.version, num_samples=len(samples), num_left=len(samples))
        first = ordinal * _ASKED % len(self.engines)
        asked = self.engines[first : first + _ASKED] or self.engines[:1]
        engine = min(asked, key=lambda engine: engine.load)
        for turns in samples:
            if leases and isinstance(engine, WaveEngine):
                engine.leases += 1
            group.tokens += turns[-1].context_tokens + turns[-1].response_tokens
            self._ask(ordinal, engine, deque(turns), leases=leases)

    def _ask(self, ordinal: int, engine: Engine, turns: deque[SimulatedTurn], *, leases: bool) -> None:
        turn = turns.popleft()

        def answered() -> None:
            group = self.groups.get(ordinal)
            is_last = not turns or group is None or group.is_dropped
            self.clock.after(turn.environment_s, ended if is_last else go_on)

        def go_on() -> None:
            self._ask(ordinal, engine, turns, leases=leases)

        def ended() -> None:
            if leases and isinstance(engine, WaveEngine):
                engine.leases -= 1
                engine.go_on()
            group = self.groups.get(ordinal)
            if group is not None and not group.is_dropped:
                group.num_left -= 1
                if not group.num_left:
                    self.num_ready += 1
                    self.has_changed = True
                    self.on_finished(ordinal)

        engine.submit(Request(turn=turn, done=answered))

    def learn(self, ordinals: Sequence[int]) -> tuple[int, float]:
        """The learner trains on a batch and gives engines the weights; returns its tokens and mean age."""
        groups = [self.groups.pop(ordinal) for ordinal in ordinals]
        tokens = sum(group.tokens for group in groups)
        rows_s = self.learner.row_s * sum(group.num_samples for group in groups)
        self.clock.advance(self.learner.step_s + rows_s + self.learner.token_s * tokens)
        self._sync()
        return tokens, sum(self.version - group.began_at for group in groups) / len(groups)

    def _sync(self) -> None:
        continuous = [engine for engine in self.engines if isinstance(engine, ContinuousEngine)]
        if self.schedule.in_flight_updates:
            for engine in continuous:
                engine.pause(True)
            self.clock.advance(self.learner.sync_s)
            for engine in continuous:
                engine.pause(False, recomputes=True)
            return
        for each in self.engines:
            each.hold(True)
        self.clock.run_until(lambda: not any(each.num_running for each in self.engines))
        self.clock.advance(self.learner.sync_s)
        for each in self.engines:
            each.hold(False)


def simulate(
    schedule: Schedule,
    *,
    engine: EngineRates,
    learner: LearnerRates,
    make_group: Callable[[int], SimulatedGroup],
    num_steps: int,
) -> Simulated:
    """Return what `num_steps` steps take, by the rules of `rollout/admission.py`.

    Args:
        make_group: Gives the samples of the prompt at a place in the order of the data, the same each time.
    """
    run = _Run(schedule=schedule, engine_rates=engine, learner=learner, make_group=make_group)
    rules = None if schedule.max_staleness == 0 else _rules(schedule, num_steps)
    step_s, wait_s, ages, dropped, tokens = [], [], [], 0, 0
    if rules is not None:
        run.on_finished = partial(_finish, run, rules)
        _admit(run, rules)
    for version in range(num_steps):
        began = run.clock.now
        if rules is None:
            ordinals = _generate(run, range(version * schedule.batch_size, (version + 1) * schedule.batch_size))
        else:
            ordinals, given_up = _take(run, rules)
            dropped += given_up
        wait_s.append(run.clock.now - began)
        trained, age = run.learn(ordinals)
        tokens += trained
        ages.append(age)
        run.version = version + 1
        if rules is not None:
            rules.publish(version + 1)
            _admit(run, rules)
        step_s.append(run.clock.now - began)
    busy = sum(each.busy_s for each in run.engines) / len(run.engines) / run.clock.now
    return Simulated(
        step_s=tuple(step_s), wait_s=tuple(wait_s), engine_busy=busy, age=tuple(ages), dropped=dropped, tokens=tokens
    )


def _rules(schedule: Schedule, num_steps: int) -> Admission:
    trainer = TrainerConfig(
        train_batch_size=schedule.batch_size,
        max_staleness=schedule.max_staleness,
        stale_groups=schedule.stale_groups,
        take_groups=schedule.take_groups,
        oversample=schedule.oversample,
    )
    return Admission(trainer=trainer, total_batches=num_steps, version=0, settled=ConsumedPrompts())


def _finish(run: _Run, rules: Admission, ordinal: int) -> None:
    rules.finish(ordinal)
    _admit(run, rules)


def _admit(run: _Run, rules: Admission) -> None:
    while (ordinal := rules.start()) is not None:
        run.begin(ordinal, leases=False)


def _generate(run: _Run, ordinals: Sequence[int]) -> Sequence[int]:
    """A batch's worth, from its begin to the end of the last sample."""
    for ordinal in ordinals:
        run.begin(ordinal, leases=True)
    run.clock.run_until(lambda: not any(run.groups[ordinal].num_left for ordinal in ordinals))
    return ordinals


def _take(run: _Run, rules: Admission) -> tuple[Sequence[int], int]:
    """The next batch by the rules of admission, and how many groups were given up for it."""
    run.has_changed, found = True, []

    def is_closed() -> bool:
        if run.has_changed and run.num_ready >= run.schedule.batch_size:
            run.has_changed = False
            if (closed := rules.close()) is not None:
                found.append(closed)
        return bool(found)

    run.clock.run_until(is_closed)
    (closed,) = found
    gone = [run.groups.pop(ordinal) for ordinal in closed.dropped]
    for group in gone:
        group.is_dropped = True
    run.num_ready -= len(closed.trained) + sum(not group.num_left for group in gone)
    _admit(run, rules)
    return closed.ordinals, len(closed.dropped)
