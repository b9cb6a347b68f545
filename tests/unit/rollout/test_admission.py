"""The rules of admission and age: by hand, and in simulated runs with stragglers."""

from __future__ import annotations

import heapq
import json
import random
from dataclasses import dataclass, field, fields
from typing import Any

import pytest

from skyrl_train.config import TrainerConfig
from skyrl_train.config.algorithm import AlgorithmConfig, FilterConfig
from skyrl_train.rollout.admission import Admission, Closed, ConsumedPrompts

STRAGGLER_STEPS = 50.0
"""Steps of the learner that a straggler takes."""


def make(
    *,
    batch_size: int = 1,
    max_staleness: int = 1,
    total_batches: int = 100,
    version: int = 0,
    settled: ConsumedPrompts | None = None,
    **changes: Any,
) -> Admission:
    """`changes` are those of `trainer`, and of its dynamic sampling."""
    names = [name for name in changes if name in {each.name for each in fields(FilterConfig)}]
    filters = FilterConfig(**{name: changes.pop(name) for name in names})
    trainer = TrainerConfig(
        train_batch_size=batch_size,
        max_staleness=max_staleness,
        algorithm=AlgorithmConfig(filters=filters),
        **changes,
    )
    return Admission(
        trainer=trainer, total_batches=total_batches, version=version, settled=settled or ConsumedPrompts()
    )


def start_all(admission: Admission) -> list[int]:
    started = []
    while (ordinal := admission.start()) is not None:
        started.append(ordinal)
    return started


def test_groups_begin_while_the_next_batches_have_room() -> None:
    admission = make(batch_size=2, max_staleness=1)
    assert start_all(admission) == [0, 1, 2, 3]
    for ordinal in (1, 0):
        admission.finish(ordinal)
    assert admission.close() == Closed(ordinals=(0, 1), dropped={})
    assert start_all(admission) == []
    admission.publish(1)
    assert start_all(admission) == [4, 5]


def test_no_group_begins_that_no_batch_of_the_run_has_room_for() -> None:
    assert start_all(make(batch_size=2, max_staleness=8, total_batches=3)) == [0, 1, 2, 3, 4, 5]


def test_a_batch_waits_for_a_group_that_would_be_too_old_in_the_next() -> None:
    admission = make(max_staleness=1)
    assert start_all(admission) == [0, 1]
    admission.finish(1)
    assert admission.close() == Closed(ordinals=(1,), dropped={})
    admission.publish(1)
    assert start_all(admission) == [2]
    admission.finish(2)
    assert admission.close() is None
    admission.finish(0)
    assert admission.close() == Closed(ordinals=(0,), dropped={})


def test_two_groups_that_are_due_in_one_batch_do_not_wait_for_it() -> None:
    """Both are due in batch 2, which has room for one: batch 1 must take the other."""
    admission = make(max_staleness=2)
    assert start_all(admission) == [0, 1, 2]
    admission.finish(2)
    assert admission.close() == Closed(ordinals=(2,), dropped={})
    admission.publish(1)
    assert start_all(admission) == [3]
    admission.finish(3)
    assert admission.close() is None
    admission.finish(1)
    assert admission.close() == Closed(ordinals=(1,), dropped={})


def test_a_group_that_is_due_is_dropped_where_batches_do_not_wait() -> None:
    admission = make(max_staleness=1, stale_groups="drop")
    start_all(admission)
    admission.finish(1)
    admission.close()
    admission.publish(1)
    start_all(admission)
    admission.finish(2)
    assert admission.close() == Closed(ordinals=(2,), dropped={0: "stale"})
    assert admission.settled == ConsumedPrompts(watermark=3)
    assert start_all(admission) == [3]


def test_a_discarded_group_makes_room_for_another() -> None:
    admission = make(batch_size=2, max_staleness=1)
    start_all(admission)
    for ordinal in range(4):
        admission.discard(ordinal, "filtered")
    assert admission.close() is None
    assert start_all(admission) == [4, 5, 6, 7]
    assert admission.discarded == {"filtered": 4}


def test_more_groups_begin_by_the_factor_of_oversampling_however_long_the_run_is() -> None:
    admission = make(batch_size=2, max_staleness=1, oversample=1.5, stale_groups="drop")
    assert start_all(admission) == [0, 1, 2, 3, 4, 5]
    most = 0
    for version in range(40):
        for ordinal in [*admission._pending][:3]:
            admission.finish(ordinal)
        assert admission.close() is not None
        most = max(most, len(admission._pending) + len(start_all(admission)))
        admission.publish(version + 1)
        start_all(admission)
        most = max(most, len(admission._pending))
    assert most == 6
    assert admission.discarded.keys() <= {"surplus", "stale"}


@pytest.mark.parametrize(("oversample", "count"), [(1.1, 22), (1.15, 23), (2.0, 40)])
def test_oversampling_is_rounded_to_whole_groups(oversample: float, count: int) -> None:
    assert len(start_all(make(batch_size=10, oversample=oversample, stale_groups="drop"))) == count


def test_the_first_to_finish_make_the_batch_and_what_is_too_old_is_surplus() -> None:
    admission = make(batch_size=2, max_staleness=1, oversample=1.5, stale_groups="drop")
    start_all(admission)
    for ordinal in (5, 3):
        admission.finish(ordinal)
    assert admission.close() == Closed(ordinals=(3, 5), dropped={})
    admission.publish(1)
    assert start_all(admission) == [6, 7]
    for ordinal in (7, 4, 2):
        admission.finish(ordinal)
    assert admission.close() == Closed(ordinals=(2, 4), dropped={0: "stale", 1: "stale"})
    assert admission.num_ready == 1


def test_in_order_the_groups_that_began_first_are_waited_for_whatever_finished() -> None:
    admission = make(batch_size=2, max_staleness=1, oversample=1.5, take_groups="in_order")
    start_all(admission)
    for ordinal in (5, 3, 1):
        admission.finish(ordinal)
    assert admission.close() is None
    admission.finish(0)
    assert admission.close() == Closed(ordinals=(0, 1), dropped={})
    admission.publish(1)
    start_all(admission)
    admission.finish(2)
    assert admission.close() == Closed(ordinals=(2, 3), dropped={4: "stale", 5: "surplus"})


def test_in_order_a_filtered_group_is_passed_over() -> None:
    admission = make(batch_size=2, take_groups="in_order")
    start_all(admission)
    admission.discard(0, "filtered")
    for ordinal in (1, 2):
        admission.finish(ordinal)
    assert admission.close() == Closed(ordinals=(1, 2), dropped={0: "filtered"})


def test_what_was_discarded_between_two_batches_is_told_with_the_second() -> None:
    admission = make(max_staleness=2)
    start_all(admission)
    admission.finish(1)
    assert admission.close() == Closed(ordinals=(1,), dropped={})
    admission.discard(0, "filtered")
    admission.publish(1)
    start_all(admission)
    admission.finish(3)
    assert admission.close() == Closed(ordinals=(3,), dropped={0: "filtered"})


def test_no_group_begins_where_too_many_were_discarded_for_one_batch() -> None:
    admission = make(batch_size=2, max_staleness=1, dynamic_sampling="filter", dynamic_sampling_max_batches=3)
    start_all(admission)
    for ordinal in range(4):
        admission.discard(ordinal, "filtered")
    assert start_all(admission) == [4, 5, 6, 7]
    assert not admission.is_exhausted
    admission.discard(4, "filtered")
    assert not admission.is_exhausted
    admission.discard(5, "filtered")
    assert admission.is_exhausted
    assert start_all(admission) == []
    for ordinal in (6, 7):
        admission.finish(ordinal)
    assert admission.close() is not None
    admission.publish(1)
    assert start_all(admission) == [8, 9, 10, 11]


def finish_all(admission: Admission, idle: dict[int, str]) -> None:
    for ordinal in start_all(admission):
        admission.finish(ordinal, idle_reason=idle.get(ordinal, ""))


def test_copies_of_groups_that_teach_stand_in_turn_in_the_places_of_those_that_do_not() -> None:
    admission = make(batch_size=5, max_staleness=1, dynamic_sampling="replace", replace_min_share=0.4)
    finish_all(admission, {0: "filtered", 2: "failed", 4: "filtered"})
    closed = admission.close()
    assert closed == Closed(ordinals=(1, 1, 3, 3, 1), dropped={0: "filtered", 2: "failed", 4: "filtered"})
    assert closed.trained == (1, 3)
    assert admission.settled == ConsumedPrompts(watermark=5)
    admission.publish(1)
    assert start_all(admission) == [10, 11, 12, 13, 14]


def test_a_batch_of_which_too_few_teach_is_discarded_and_others_make_it() -> None:
    admission = make(batch_size=4, max_staleness=1, dynamic_sampling="replace", replace_min_share=0.5)
    finish_all(admission, {0: "filtered", 1: "filtered", 2: "filtered", 5: "failed"})
    rejected = {0: "filtered", 1: "filtered", 2: "filtered", 3: "rejected"}
    assert admission.close() == Closed(ordinals=(4, 4, 6, 7), dropped={**rejected, 5: "failed"})
    assert admission.discarded == {"filtered": 3, "rejected": 1, "failed": 1}


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_one_group_at_least_must_teach_however_small_the_share(share: float) -> None:
    admission = make(batch_size=4, max_staleness=1, dynamic_sampling="replace", replace_min_share=share)
    finish_all(admission, dict.fromkeys((0, 1, 2, 3, 4, 5, 6), "filtered"))
    closed = admission.close()
    assert closed is not None
    assert closed.ordinals == (7, 7, 7, 7)


def test_no_batch_is_made_where_too_many_were_rejected() -> None:
    admission = make(
        batch_size=2, max_staleness=3, dynamic_sampling="replace", replace_min_share=0.5, dynamic_sampling_max_batches=2
    )
    finish_all(admission, dict.fromkeys(range(4), "filtered"))
    assert admission.close() is None
    assert admission.is_exhausted
    assert admission.num_ready == 4, "no third batch is tried"
    assert start_all(admission) == []


def test_what_a_run_before_had_rejected_is_surplus_where_it_is_of_use_now() -> None:
    """Groups 0 and 2 were rejected, so that 4 and 5 began; then the run was killed. Now 0 and 1 make the batch, and three of
    the four that are left are due in the next one, which has room for two."""
    admission = make(batch_size=2, max_staleness=1, dynamic_sampling="replace", replace_min_share=1.0)
    for ordinal in range(6):
        admission.restore(ordinal, 0)
    idle = {2: "filtered"}
    for ordinal in range(5):
        admission.finish(ordinal, idle_reason=idle.get(ordinal, ""))
    assert admission.close() is None, "the last one may yet be of use"
    admission.finish(5)
    assert admission.close() == Closed(ordinals=(0, 1), dropped={5: "surplus", 4: "surplus"})


def test_a_resumed_run_begins_with_the_prompts_that_are_not_settled() -> None:
    admission = make(batch_size=2, version=3, settled=ConsumedPrompts(watermark=4, beyond=(6, 7)))
    assert start_all(admission) == [4, 5, 8, 9]


def test_a_group_of_a_run_before_is_due_when_it_was() -> None:
    admission = make(version=1, settled=ConsumedPrompts(watermark=1))
    admission.restore(1, 0)
    assert start_all(admission) == [2]
    admission.finish(2)
    assert admission.close() is None
    admission.finish(1)
    assert admission.close() == Closed(ordinals=(1,), dropped={})


def test_a_batch_of_a_run_before_is_closed_again() -> None:
    admission = make()
    admission.retake(Closed(ordinals=(1,), dropped={0: "stale"}))
    assert admission.settled == ConsumedPrompts(watermark=2)
    with pytest.raises(ValueError, match="batch 0 is closed"):
        admission.close()
    admission.publish(1)
    assert start_all(admission) == [2, 3]


def test_a_prompt_is_settled_once() -> None:
    settled = ConsumedPrompts().plus(1, 2)
    assert settled == ConsumedPrompts(watermark=0, beyond=(1, 2))
    assert settled.plus(0) == ConsumedPrompts(watermark=3)
    with pytest.raises(ValueError, match="prompt 2 of the order is settled already"):
        settled.plus(2)
    with pytest.raises(ValueError, match="prompt 1 of the order is settled already"):
        settled.plus(0).plus(1)


@pytest.mark.parametrize(
    ("content", "entry"),
    [
        ({"frontier": 2, "beyond": [1]}, "beyond"),
        ({"frontier": 2, "beyond": [2]}, "beyond"),
        ({"frontier": 0, "beyond": [4, 3]}, "beyond"),
        ({"frontier": 0, "beyond": [True]}, "beyond"),
        ({"frontier": -1, "beyond": []}, "frontier"),
        ({"frontier": 0, "beyond": 3}, "beyond"),
        ({"frontier": 0, "beyond": [], "more": 1}, "more"),
    ],
)
def test_what_is_no_record_of_settled_prompts_is_refused(content: dict[str, Any], entry: str) -> None:
    with pytest.raises(ValueError, match=f"^{entry}"):
        ConsumedPrompts.from_json(content)


def test_a_record_of_settled_prompts_is_read_back() -> None:
    content = {"frontier": 2, "beyond": [4, 9]}  # as checkpoints of before have it
    read = ConsumedPrompts.from_json(content)
    assert read == ConsumedPrompts(watermark=2, beyond=(4, 9))
    assert ConsumedPrompts.from_json(json.loads(json.dumps(read.to_json()))) == read


def test_batches_close_in_order_and_once() -> None:
    admission = make()
    start_all(admission)
    admission.finish(0)
    admission.close()
    with pytest.raises(ValueError, match="batch 0 is closed"):
        admission.close()
    with pytest.raises(ValueError, match="version 2 was published after version 0"):
        admission.publish(2)


@dataclass
class Simulation:
    """A learner whose updates take one unit of time, and groups that take anything from none to 50 of them."""

    seed: int
    num_events: int = 0
    trained_at: dict[int, int] = field(default_factory=dict)
    began_at: dict[int, int] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)
    durations: dict[int, float] = field(default_factory=dict)
    num_copies: int = 0

    def __post_init__(self) -> None:
        draw = self.random = random.Random(self.seed)
        self.batch_size, self.max_staleness = draw.randint(1, 6), draw.choice([1, 1, 2, 3, 4, 8])
        self.filtered_share = draw.choice([0.0, 0.0, 0.3, 0.9])
        self.rules: dict[str, Any] = draw.choice(
            [
                {"stale_groups": "wait"},
                {"stale_groups": "drop"},
                {"take_groups": "in_order"},
                {"stale_groups": "drop", "oversample": draw.choice([1.25, 2.0, 3.0])},
                {"take_groups": "in_order", "oversample": draw.choice([1.25, 2.0, 3.0])},
            ]
        )
        self.copies: dict[str, Any] = {}
        if draw.random() < 0.3:
            self.copies = {"dynamic_sampling": "replace", "dynamic_sampling_max_batches": 10**6}
            self.copies["replace_min_share"] = draw.choice([0.1, 0.5])
        """With them what is filtered makes batches, too."""
        self.window = round((1 + self.max_staleness) * self.batch_size * self.rules.get("oversample", 1.0))
        """Most groups that may be pending."""
        self.starved_until = 0
        """All groups below this ordinal are filtered: at times those of whole batches."""

    def admission(self, total_batches: int, version: int = 0, settled: ConsumedPrompts | None = None) -> Admission:
        return make(
            batch_size=self.batch_size,
            max_staleness=self.max_staleness,
            total_batches=total_batches,
            version=version,
            settled=settled,
            **self.rules,
            **self.copies,
        )

    def duration(self) -> float:
        kind = self.random.random()
        return STRAGGLER_STEPS if kind < 0.02 else self.random.lognormvariate(-1.0, 1.0) if kind < 0.9 else 0.0

    def run(self, *, max_events: int, total_batches: int = 10**9) -> Admission:
        """Runs until so many events, or the last batch. Is killed now and then, and goes on from what is settled."""
        admission, now = self.admission(total_batches), 0.0
        ends: list[tuple[float, int]] = []
        update_ends: float | None = None
        while self.num_events < max_events and admission.version < total_batches:
            while (ordinal := admission.start()) is not None:
                assert ordinal not in self.trained_at, "a prompt was doubled"
                assert ordinal not in self.dropped, "a dropped prompt came again"
                self.began_at[ordinal] = admission.version
                self.durations[ordinal] = self.duration()
                heapq.heappush(ends, (now + self.durations[ordinal], ordinal))
                self.num_events += 1
            assert len(admission._pending) <= self.window, "more is pending than the rule of admission allows"
            if update_ends is None and (closed := admission.close()) is not None:
                self.check(closed, admission)
                gone = set(closed.dropped)
                ends = [(end, ordinal) for end, ordinal in ends if ordinal not in gone]
                heapq.heapify(ends)
                update_ends = now + 1.0
                self.num_events += 1
                continue
            self.num_events += 1
            if update_ends is not None and (not ends or update_ends <= ends[0][0]):
                now, update_ends = update_ends, None
                admission.publish(admission.version + 1)
                if self.random.random() < 0.05:
                    # Killed: what is pending begins again.
                    admission, ends = self.admission(total_batches, admission.version, admission.settled), []
                if self.filtered_share and self.random.random() < 0.05:
                    self.starved_until = max(self.began_at) + 3 * self.window
                continue
            if self.copies and admission.dropped and not ends and admission.num_ready < self.batch_size:
                continue  # a batch was rejected
            assert ends, "deadlock: nothing is in flight and no batch can be closed"
            now, ordinal = heapq.heappop(ends)
            is_filtered = ordinal < self.starved_until or self.random.random() < self.filtered_share
            if self.copies:
                admission.finish(ordinal, idle_reason="filtered" if is_filtered else "")
            elif is_filtered:
                admission.discard(ordinal, "filtered")
                self.dropped[ordinal] = "filtered"
            else:
                admission.finish(ordinal)
        return admission

    def check(self, closed: Closed, admission: Admission) -> None:
        assert len(closed.ordinals) == self.batch_size
        assert closed.trained == closed.ordinals or self.copies
        self.num_copies += len(closed.ordinals) - len(closed.trained)
        for ordinal in closed.trained:
            assert admission.version - self.began_at[ordinal] <= self.max_staleness, "too old"
            assert ordinal not in self.trained_at, "trained twice"
            self.trained_at[ordinal] = admission.version
        if self.rules.get("take_groups") == "in_order":
            assert max(closed.ordinals) < min(admission._pending, default=10**9), "an older group was passed over"
        for ordinal, reason in closed.dropped.items():
            assert self.dropped.setdefault(ordinal, reason) == reason
            assert reason in ("filtered", "rejected") or self.rules not in (
                {"stale_groups": "wait"},
                {"take_groups": "in_order"},
            )

    def check_end(self, admission: Admission) -> None:
        """No prompt is lost: what is settled is what was trained on or dropped, and few wait behind the newest."""
        settled = {*range(admission.settled.watermark), *admission.settled.beyond}
        assert settled == self.trained_at.keys() | self.dropped.keys() | admission.dropped.keys()
        assert not self.trained_at.keys() & self.dropped.keys()
        # Fair: within one run of the process groups begin in order, and all are in a batch by its deadline.
        assert self.began_at.keys() >= set(range(admission.settled.watermark))


@pytest.mark.parametrize("seed", range(40))
def test_no_prompt_is_lost_doubled_or_too_old(seed: int) -> None:
    simulation = Simulation(seed)
    simulation.check_end(simulation.run(max_events=400))
    assert simulation.num_events >= 400


@pytest.mark.parametrize("seed", range(12))
def test_a_run_to_its_end_leaves_no_prompt_behind(seed: int) -> None:
    simulation = Simulation(seed)
    admission = simulation.run(max_events=10**9, total_batches=20)
    simulation.check_end(admission)
    assert len(simulation.trained_at) == 20 * simulation.batch_size - simulation.num_copies
    assert (
        admission.num_in_flight == admission.num_ready == 0
        or "oversample" in simulation.rules
        or simulation.rules == {"stale_groups": "drop"}
    )


@pytest.mark.parametrize(
    ("rules", "low", "high"),
    [
        ({"stale_groups": "wait"}, 0.99, 1.01),
        ({"take_groups": "in_order", "oversample": 2.0}, 0.9, 1.1),
        ({"stale_groups": "drop", "oversample": 2.0}, 0.0, 0.8),
    ],
)
def test_groups_in_order_are_as_long_as_all_and_the_first_to_finish_are_shorter(
    rules: dict[str, Any], low: float, high: float
) -> None:
    simulation = Simulation(0)
    simulation.batch_size, simulation.max_staleness, simulation.filtered_share = 4, 2, 0.0
    simulation.rules, simulation.window = rules, round(12 * rules.get("oversample", 1.0))
    simulation.run(max_events=8000)
    # A straggler counts as 3 steps, which is more than most take: few of them would be the mean of all.
    lengths = {ordinal: min(duration, 3.0) for ordinal, duration in simulation.durations.items()}
    every = [lengths[ordinal] for ordinal in simulation.trained_at.keys() | simulation.dropped.keys()]
    trained = [lengths[ordinal] for ordinal in simulation.trained_at]
    assert low < (sum(trained) / len(trained)) / (sum(every) / len(every)) < high


@pytest.mark.slow
def test_a_million_events() -> None:
    num_events = 0
    for seed in range(200):
        simulation = Simulation(1000 + seed)
        simulation.check_end(simulation.run(max_events=5000))
        num_events += simulation.num_events
    assert num_events >= 1_000_000
