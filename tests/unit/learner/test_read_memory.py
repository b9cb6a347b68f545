"""A micro-batch whose last layer is computed in part takes no more memory than one of the same size that is read as a
whole: budgets are found with the latter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.fields import LayoutChoice
from skyrl_train.learner.memory.meter import CountingMeter
from tests.support.layout_cases import close
from tests.support.learner_cases import fixed_rows, make_batch, make_learner, save_tiny_model

LENGTH, ROWS = 48, 32
ROUNDING = 1.01


def peaks(folder: Path, layout: LayoutChoice, prompt_length: int) -> list[int]:
    """Bytes of training and of scoring rows of which all after the prompt is read."""
    learner = make_learner(
        folder, algorithm=AlgorithmConfig(kl_loss_coef=0.1, entropy_coef=0.02), rows_per_micro_batch=ROWS
    )
    engine, batch = learner.engine, make_batch([LENGTH] * ROWS, prompt_length=prompt_length, dtype=torch.float32)
    engine.oom_retry.use(micro_batching=fixed_rows(ROWS, layout))
    meter, found = CountingMeter(1 << 40), list[int]()
    for training in (True, False):
        engine.oom_retry.begin_probing(meter, resident=engine.held_tensors)
        if training:
            learner.forward_backward(close(batch))
            engine.zero_grad()
        else:
            learner.forward(batch)
        found.append(engine.oom_retry.take_peak())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["padded", "packed", "prefix_shared"])
def test_reading_less_takes_no_more(tmp_path: Path, layout: LayoutChoice) -> None:
    save_tiny_model(tmp_path)
    training, scoring = peaks(tmp_path, layout, 1)
    for prompt_length in (2, 6, 12, 16, 20, 24, 32, 40):
        in_part = peaks(tmp_path, layout, prompt_length)
        assert in_part[0] <= training * ROUNDING, prompt_length
        assert in_part[1] <= scoring * ROUNDING, prompt_length
    assert in_part[0] < 0.8 * training
