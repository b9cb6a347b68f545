import pytest

from skyrl_train.trainers.step_timer import StepTimer


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_phases_and_the_rest_add_up_to_the_step():
    clock = Clock()
    timer = StepTimer(clock)
    with timer.phase("generate"):
        clock.now_s += 3.0
    clock.now_s += 0.5
    for _ in range(2):
        with timer.phase("update"):
            clock.now_s += 1.0
    assert timer.finish_step() == {
        "timing/generate": 3.0,
        "timing/update": 2.0,
        "timing/other": 0.5,
        "timing/step": 5.5,
    }


def test_the_next_step_starts_where_the_last_one_ended():
    clock = Clock()
    timer = StepTimer(clock)
    timer.finish_step()
    clock.now_s += 2.0
    with timer.phase("generate"):
        clock.now_s += 1.0
    assert timer.finish_step()["timing/step"] == 3.0


def test_a_phase_that_raises_is_still_timed():
    clock = Clock()
    timer = StepTimer(clock)

    def break_inside() -> None:
        with timer.phase("update"):
            clock.now_s += 1.0
            raise KeyError

    with pytest.raises(KeyError):
        break_inside()
    assert timer.finish_step()["timing/update"] == 1.0


def test_a_phase_inside_another_is_refused():
    timer = StepTimer()
    with timer.phase("update"), pytest.raises(ValueError, match="'sync' inside phase 'update'"), timer.phase("sync"):
        pass
