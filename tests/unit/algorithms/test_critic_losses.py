from __future__ import annotations

import math

import pytest
import torch

from skyrl_train.algorithms.losses.critic import ValueLossInputs, explained_variance, value_loss
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.errors import BatchError


def inputs(seed: int) -> ValueLossInputs:
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randn(3, 4, 7, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 7, generator=generator) > 0.4
    values, old_values, returns = (torch.where(mask, column, math.nan) for column in columns)
    return ValueLossInputs(values=values.requires_grad_(), old_values=old_values, returns=returns, loss_mask=mask)


def token_oracle(value: float, old: float, target: float, clip: float) -> tuple[float, float]:
    """Loss and derivative by `value`."""
    plain = (value - target) ** 2
    if clip == 0:
        return plain / 2, value - target
    near = min(max(value, old - clip), old + clip)
    clipped = (near - target) ** 2
    if plain >= clipped:
        return plain / 2, value - target
    return clipped / 2, near - target if near == value else 0.0


@pytest.mark.parametrize("clip", [0.0, 0.2, 5.0])
def test_loss_and_gradient_equal_the_formula(clip: float) -> None:
    for seed in range(20):
        batch = inputs(seed)
        losses = value_loss(batch, AlgorithmConfig(), value_clip=clip).token_losses
        (gradient,) = torch.autograd.grad(losses.sum(), batch.values)
        for row, position in batch.loss_mask.nonzero().tolist():
            numbers = [float(c[row, position].detach()) for c in (batch.values, batch.old_values, batch.returns)]
            loss, slope = token_oracle(*numbers, clip)
            assert float(losses[row, position].detach()) == pytest.approx(loss, abs=1e-14)
            assert float(gradient[row, position]) == pytest.approx(slope, abs=1e-14)
        assert not losses[~batch.loss_mask].any()
        assert not gradient[~batch.loss_mask].any()


def test_metrics_are_means_over_trained_tokens() -> None:
    ones = torch.ones(1, 2)
    batch = ValueLossInputs(values=3 * ones, old_values=ones, returns=2 * ones, loss_mask=torch.tensor([[True, False]]))
    metrics = value_loss(batch, AlgorithmConfig(), value_clip=0.5).metrics
    assert {name: metric.value for name, metric in metrics.items()} == {
        "critic/value_loss": 0.5,
        "critic/clip_fraction": 0.0,
        "critic/value": 3.0,
        "critic/abs_error": 1.0,
    }


@pytest.mark.parametrize(("dtype", "noise", "tolerance"), [(torch.float64, 1e-15, 1e-13), (torch.float32, 1e-6, 1e-5)])
def test_values_that_are_the_old_ones_but_for_rounding_are_not_clipped_and_have_one_gradient(
    dtype: torch.dtype, noise: float, tolerance: float
) -> None:
    """As in the first optimizer step of each update; also where the returns are those values."""
    drawn, found = inputs(5), []
    generator = torch.Generator().manual_seed(0)
    old = drawn.old_values.to(dtype)
    returns = torch.where(torch.arange(7) % 2 == 0, old, drawn.returns.to(dtype))
    for size in (0.0, noise, noise):
        moved = old + (size * torch.randn(4, 7, generator=generator, dtype=torch.float64)).to(dtype)
        batch = ValueLossInputs(
            values=moved.requires_grad_(), old_values=old, returns=returns, loss_mask=drawn.loss_mask
        )
        output = value_loss(batch, AlgorithmConfig(), value_clip=0.2)
        assert output.metrics["critic/clip_fraction"].value == 0
        found.append(torch.autograd.grad(output.token_losses.sum(), batch.values)[0])
    for gradient in found[1:]:
        assert float((gradient - found[0]).norm() / found[0].norm()) < tolerance


class TestExplainedVariance:
    RETURNS = torch.tensor([1.0, 2.0, 3.0, math.nan])
    MASK = torch.tensor([True, True, True, False])

    def test_is_1_for_perfect_values(self) -> None:
        assert explained_variance(self.RETURNS, self.RETURNS, self.MASK) == 1.0

    def test_is_0_for_a_constant(self) -> None:
        assert explained_variance(torch.full((4,), 7.0), self.RETURNS, self.MASK) == 0.0

    def test_is_negative_for_values_worse_than_a_constant(self) -> None:
        assert explained_variance(-self.RETURNS, self.RETURNS, self.MASK) == -3.0

    @pytest.mark.parametrize("mask", [[True, False, False, False], [False] * 4])
    def test_is_not_defined_for_fewer_than_two_tokens(self, mask: list[bool]) -> None:
        assert explained_variance(self.RETURNS, self.RETURNS, torch.tensor(mask)) is None

    def test_is_not_defined_where_returns_do_not_vary(self) -> None:
        assert explained_variance(self.RETURNS, torch.ones(4), self.MASK) is None


def test_shapes_that_differ_are_named() -> None:
    ones = torch.ones(1, 2)
    with pytest.raises(BatchError, match=r"returns has shape \[1, 3\]"):
        value_loss(
            ValueLossInputs(values=ones, old_values=ones, returns=torch.ones(1, 3), loss_mask=ones.bool()),
            AlgorithmConfig(),
        )
