"""The critic's loss beside verl's; all other functions are compared in `test_comparisons.py`. Skipped without verl."""

from __future__ import annotations

import pytest

from skyrl_train.algorithms.losses.critic import ValueLossInputs, value_loss
from skyrl_train.batch import masked_mean
from skyrl_train.config.algorithm import AlgorithmConfig
from tests.other_trainers.comparisons import ragged


@pytest.mark.parametrize("seed", range(20))
def test_value_loss_is_verls(seed: int) -> None:
    verl = pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)
    inputs = ragged(seed)
    values, old, returns, mask = inputs.logprobs, inputs.old_logprobs, inputs.advantages, inputs.loss_mask
    losses = value_loss(
        ValueLossInputs(values=values, old_values=old, returns=returns, loss_mask=mask), AlgorithmConfig()
    ).token_losses
    expected, _ = verl.compute_value_loss(values, returns, old, mask.double(), 0.2)
    assert float(masked_mean(losses, mask).detach()) == pytest.approx(float(expected.detach()), abs=1e-7)
