from __future__ import annotations

import pytest

from skyrl_train.batch.steps.schedule import learning_rate, schedule_position
from skyrl_train.config.models import OptimizerConfig


def rates(steps, **kwargs):
    optimizer = OptimizerConfig(lr=1.0, **kwargs)
    return [learning_rate(step, optimizer, 10) for step in steps]


def test_constant():
    assert rates([0, 5, 9, 20]) == [1, 1, 1, 1]


def test_warm_up_ends_at_the_peak_and_starts_above_zero():
    assert rates(range(6), warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1]


def test_linear():
    assert rates([0, 2, 6, 10, 11], warmup_steps=2, schedule="linear", min_lr_ratio=0.5) == pytest.approx(
        [0.5, 1, 0.75, 0.5, 0.5]
    )


def test_cosine():
    assert rates([0, 2.5, 5, 10], schedule="cosine") == pytest.approx([1, 0.8535533905932737, 0.5, 0])


def test_the_last_step_of_a_decay_to_zero_still_moves():
    assert rates([9], schedule="linear") == pytest.approx([0.1])


def test_a_warm_up_longer_than_the_run_only_rises():
    assert rates([0, 9], warmup_steps=20, schedule="cosine") == pytest.approx([0.05, 0.5])


def test_the_position_is_the_number_of_steps_or_the_share_of_documents_consumed():
    run = {"total_optimizer_steps": 10, "optimizer_steps": 4, "documents": 90}
    assert schedule_position(total_documents=0, **run) == 4
    assert schedule_position(total_documents=300, **run) == 3
