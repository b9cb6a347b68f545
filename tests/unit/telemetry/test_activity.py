"""What rollouts are at, second by second, by a clock that is moved by hand."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from skyrl_train.telemetry.activity import Activity


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_waits_for_environments_are_added_up_and_shared_by_what_the_engine_did(clock: Clock) -> None:
    activity = Activity(clock)
    with activity.environment():
        clock.now_s += 1.0  # one waits, the engine is idle
        with activity.environment(), activity.request():
            clock.now_s += 2.0  # two wait, the engine computes
    clock.now_s += 4.0
    assert activity.take().metrics == {
        "timing/engine/busy": 2.0,
        "timing/wait/environments": 5.0,
        "timing/wait/environments_alone": 0.2,
    }
    assert activity.take().metrics == {"timing/engine/busy": 0.0, "timing/wait/environments": 0.0}


def test_what_goes_on_beyond_a_report_is_shared_between_two(clock: Clock) -> None:
    activity = Activity(clock)
    with activity.request(), activity.environment():
        clock.now_s += 1.0
        first = activity.take()
        clock.now_s += 3.0
    second = activity.take()
    assert [one.metrics["timing/engine/busy"] for one in (first, second)] == [1.0, 3.0]
    assert [one.metrics["timing/wait/environments"] for one in (first, second)] == [1.0, 3.0]
    assert (first.engine, second.engine) == (((100.0, 101.0),), ((101.0, 104.0),))


def test_an_engine_that_knows_says_when_it_computes(clock: Clock) -> None:
    activity = Activity(clock)
    activity.engine_computes(False)
    with activity.request():
        clock.now_s += 5.0  # the request waits for the others of its wave
        activity.engine_computes(True)
        clock.now_s += 2.0
        activity.engine_computes(False)
    found = activity.take()
    assert found.metrics["timing/engine/busy"] == 2.0
    assert found.engine == ((105.0, 107.0),)


def test_overlapping_requests_are_one_span_of_work(clock: Clock) -> None:
    activity = Activity(clock)
    with ExitStack() as first:
        first.enter_context(activity.request())
        clock.now_s += 1.0
        with activity.request():
            clock.now_s += 1.0
            first.close()
            clock.now_s += 1.0
    assert activity.take().engine == ((100.0, 103.0),)


def test_a_group_is_in_flight_from_its_first_trajectory_to_its_last(clock: Clock) -> None:
    activity = Activity(clock)
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(activity.trajectory("a", is_timed=True))
        second.enter_context(activity.trajectory("a", is_timed=True))
        clock.now_s += 1.0
        with activity.trajectory("evaluation", is_timed=False):
            clock.now_s += 0.5
        first.close()
        clock.now_s += 2.0
        second.close()
    with activity.trajectory("b", is_timed=True):
        clock.now_s += 0.5
    found = activity.take()
    assert found.metrics["timing/group/max"] == 3.5
    assert found.groups == ((100.0, 0), (100.0, 1), (101.0, 2), (101.5, 1), (103.5, 0), (103.5, 1), (104.0, 0))


def test_what_breaks_is_over(clock: Clock) -> None:
    activity = Activity(clock)
    with pytest.raises(KeyError), activity.trajectory("a", is_timed=True), activity.environment(), activity.request():
        raise KeyError
    clock.now_s += 1.0
    found = activity.take()
    assert found.metrics["timing/wait/environments"] == found.metrics["timing/engine/busy"] == 0.0
    assert found.groups[-1] == (100.0, 0)
