"""What a step takes with a stream: by hand, and against the rules of admission with a clock that a simulation moves."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from scripts.studies.simulated_engines import (
    SimulatedTurn,
)
from scripts.studies.simulation import LearnerRates, Schedule, SimulatedGroup, simulate
from skyrl_train.plan.forms.scale import EngineRates
from skyrl_train.plan.time import PhaseTimes, measured_phases, pipeline_lines

GROUPS = 8
TIMES = PhaseTimes(rollouts_s=(8.0,), engine_s=0.5, learner_s=0.8, sync_s=0.2)


def simulated_step_s(
    times: PhaseTimes, max_staleness: int, *, group_s: Callable[[], float], num_steps: int = 180, engine_s: float = 0.0
) -> float:
    """Return the mean step of a learner that takes batches as the real rules close them, the first few aside.

    Groups take `group_s()`, any number at a time, but that each needs the engine for `engine_s` first, one after the other.
    """

    def group(_: int) -> SimulatedGroup:
        turn = SimulatedTurn(prompt_tokens=0, context_tokens=0, response_tokens=1, environment_s=group_s())
        return [[turn]]

    schedule = Schedule(batch_size=GROUPS, max_staleness=max_staleness)
    engine = EngineRates(step_s=engine_s, slots=1 if engine_s else 10**6, batching="waves")
    # The time of a sync is the learner's here: nothing else stops for it.
    learner = LearnerRates(token_s=0.0, step_s=times.learner_s + times.sync_s)
    found = simulate(schedule, engine=engine, learner=learner, make_group=group, num_steps=num_steps).step_s
    # A whole number of rounds, without the first few: groups that begin together end together.
    counted = (num_steps // (1 + max_staleness) - 5) * (1 + max_staleness)
    return sum(found[-counted:]) / counted


def test_a_serial_step_is_the_sum_of_its_phases() -> None:
    assert TIMES.step_s(0) == 9.0


@pytest.mark.parametrize(("max_staleness", "expected"), [(1, 4.5), (2, 3.0), (4, 1.8), (8, 1.0), (16, 1.0)])
def test_rollouts_of_equal_length_are_spread_over_the_steps_they_may_be_old(
    max_staleness: int, expected: float
) -> None:
    assert TIMES.step_s(max_staleness) == pytest.approx(expected)
    assert simulated_step_s(TIMES, max_staleness, group_s=lambda: 8.0) == pytest.approx(expected)


def test_an_engine_that_computes_all_the_time_is_what_a_step_waits_for() -> None:
    busy = replace(TIMES, rollouts_s=(4.0,), engine_s=4.0, sync_s=0.0)
    assert [busy.step_s(each) for each in (0, 1, 8)] == pytest.approx([4.8, 4.0, 4.0])
    assert simulated_step_s(busy, 8, group_s=lambda: 0.0, engine_s=4.0 / GROUPS) == pytest.approx(4.0, rel=1e-3)
    assert (busy.limit(8), busy.best_staleness()) == ("the engine", 1)


def test_what_takes_turns_on_the_same_devices_adds_up() -> None:
    busy = replace(TIMES, rollouts_s=(4.0,), engine_s=3.0, learner_s=2.0, sync_s=0.5)
    assert [busy.step_s(each, takes_turns=True) for each in (0, 1, 8)] == pytest.approx([6.5, 5.5, 5.5])
    assert busy.limit(1, takes_turns=True) == "the devices they share"


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
def test_stragglers_as_of_environments_hold_up_batches_as_the_model_says(max_staleness: int) -> None:
    """Groups end log-normally, as environments that sleep do."""
    draw = random.Random(0)

    def group_s() -> float:
        return max(draw.lognormvariate(math.log(0.5), 1.0) for _ in range(4))

    longest = [max(group_s() for _ in range(GROUPS)) for _ in range(2000)]
    times = replace(TIMES, rollouts_s=tuple(longest), learner_s=0.3, sync_s=0.0)
    found = simulated_step_s(times, max_staleness, group_s=group_s, num_steps=1500)
    assert found == pytest.approx(times.step_s(max_staleness), rel=0.05)
    mean_s = sum(longest) / len(longest)
    assert found > 1.1 * (mean_s + times.learner_s) / (1 + max_staleness), "stragglers do not average out"


def test_the_smallest_staleness_pays_beyond_which_a_step_is_hardly_shorter() -> None:
    assert TIMES.best_staleness() == 8
    assert TIMES.limit(4) == "rollouts"
    short = replace(TIMES, rollouts_s=(1.5,))
    assert [short.step_s(each) for each in (0, 1, 2)] == pytest.approx([2.5, 1.25, 1.0])
    assert (short.best_staleness(), short.limit(2)) == (2, "the learner")
    alone = replace(TIMES, rollouts_s=(0.02,), engine_s=0.02)
    assert alone.best_staleness() == 0
    assert "none above 0 pays" in "\n".join(pipeline_lines(alone, takes_turns=False))
    told = "\n".join(pipeline_lines(short, takes_turns=False))
    assert "0: 2.5 s, 1: 1.25 s, 2: 1 s" in told
    assert "trainer.max_staleness=2 pays (2.50 x serial): a step then waits for the learner" in told


def test_phases_are_measured_in_serial_runs_and_in_streams() -> None:
    serial = {
        "timing/generate": 8.0,
        "timing/update": 0.7,
        "timing/other": 0.1,
        "timing/sync": 0.2,
        "timing/step": 9.0,
        "timing/engine/busy": 0.5,
        "timing/tokens_per_s": 99.0,
    }
    evaluated = {**serial, "timing/evaluate": 4.0, "timing/step": 13.0, "timing/engine/busy": 4.5}
    stream = {
        **serial,
        "timing/generate": 3.5,
        "timing/wait/rollouts": 3.4,
        "timing/group/max": 8.0,
        "timing/step": 4.5,
    }
    for records in ([serial], [serial, evaluated], [stream]):
        found = measured_phases(records)
        assert (set(found.rollouts_s), found.engine_s, found.sync_s) == ({8.0}, 0.5, 0.2)
        assert found.learner_s == pytest.approx(0.8)
    assert measured_phases([evaluated]).learner_s == pytest.approx(0.8)
    with pytest.raises(ValueError, match="no records"):
        measured_phases([])
