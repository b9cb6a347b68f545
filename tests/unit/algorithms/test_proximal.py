"""Three policies: behaviour (`rollout_logprobs`), proximal (`old_logprobs`, or behaviour itself) and current."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from skyrl_train.algorithms.losses.policy import policy_loss, with_proximal
from skyrl_train.config.algorithm import AlgorithmConfig, OffPolicyConfig
from skyrl_train.errors import BatchError
from tests.support.loss_oracles import (
    LossOracle,
    PolicyLossInputs,
    Turn,
    dual_clip_oracle,
    importance_sampling_oracle,
    random_loss_inputs,
    regular_oracle,
    turns_in,
)

LOSSES: dict[str, LossOracle] = {
    "regular": regular_oracle,
    "dual_clip": dual_clip_oracle,
    "importance_sampling": importance_sampling_oracle,
}
DECOUPLED = AlgorithmConfig(off_policy=OffPolicyConfig(weight="token", weight_high=1.3))
BEHAVIOUR = AlgorithmConfig(proximal="behaviour")


def decoupled_oracle(base: LossOracle, turn: Turn, index: int, config: AlgorithmConfig) -> tuple[float, float]:
    """The loss around the proximal policy, times proximal / behaviour, which carries no gradient."""
    token = turn[index]
    weight = min(math.exp(token.old - token.rollout), config.off_policy.weight_high)
    loss, slope = base(turn, index, config)
    return weight * loss, weight * slope


def behaviour_oracle(base: LossOracle, turn: Turn, index: int, config: AlgorithmConfig) -> tuple[float, float]:
    """The loss around the behaviour policy; the proximal one does not occur."""
    return base([replace(token, old=token.rollout) for token in turn], index, config)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("config", "oracle"), [(DECOUPLED, decoupled_oracle), (BEHAVIOUR, behaviour_oracle)])
def test_loss_and_gradient_equal_the_formula_with_all_three_apart(
    name: str, config: AlgorithmConfig, oracle: object
) -> None:
    config = replace(config, policy_loss=name)
    assert callable(oracle)
    for seed in range(10):
        inputs = random_loss_inputs(seed)
        losses = policy_loss(inputs, config).token_losses
        (gradient,) = torch.autograd.grad(losses.sum(), inputs.logprobs)
        for row, positions, turn in turns_in(inputs):
            for index, position in enumerate(positions):
                loss, slope = oracle(LOSSES[name], turn, index, config)
                assert float(losses[row, position].detach()) == pytest.approx(loss, abs=1e-13)
                assert float(gradient[row, position]) == pytest.approx(slope, abs=1e-13)


@pytest.mark.parametrize("config", [AlgorithmConfig(), DECOUPLED, BEHAVIOUR])
@pytest.mark.parametrize("noise", [0.0, 1e-12])
def test_on_policy_the_gradient_is_the_policy_gradient(config: AlgorithmConfig, noise: float) -> None:
    """Behaviour, proximal and current are one policy, but for rounding: each token's slope is minus its advantage."""
    drawn = random_loss_inputs(3)
    generator = torch.Generator().manual_seed(0)

    def near() -> Tensor:
        rounding = noise * torch.randn(drawn.logprobs.shape, generator=generator, dtype=torch.float64)
        return (drawn.logprobs.detach() + rounding).clamp(max=0)

    inputs = replace(drawn, logprobs=near().requires_grad_(), old_logprobs=near(), rollout_logprobs=near())
    (slopes,) = torch.autograd.grad(policy_loss(inputs, config).token_losses.sum(), inputs.logprobs)
    expected = torch.where(drawn.loss_mask, -drawn.advantages, 0.0)
    torch.testing.assert_close(slopes, expected, rtol=0, atol=1e-10)


def expected_gradient(config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """The gradient by the logits, in expectation over what the behaviour policy samples, and the on-policy one.

    One token of five possible ones; current and proximal policy are one, and another one sampled.
    """
    generator = torch.Generator().manual_seed(1)
    logits, of_behaviour, advantages = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    current, behaviour = torch.log_softmax(logits, dim=0), torch.log_softmax(of_behaviour, dim=0)
    inputs = PolicyLossInputs(
        logprobs=current.unsqueeze(1),
        old_logprobs=current.detach().unsqueeze(1),
        rollout_logprobs=behaviour.unsqueeze(1),
        advantages=advantages.unsqueeze(1),
        loss_mask=torch.ones(5, 1, dtype=torch.bool),
    )
    losses = policy_loss(inputs, config).token_losses.squeeze(1)
    (found,) = torch.autograd.grad((behaviour.exp() * losses).sum(), logits, retain_graph=True)
    (exact,) = torch.autograd.grad(-(current.exp() * advantages).sum(), logits)
    return found, exact


UNBOUNDED = {"eps_clip_low": 1.0, "eps_clip_high": 1e6}


@pytest.mark.parametrize(
    "config",
    [
        AlgorithmConfig(off_policy=OffPolicyConfig(weight="token", weight_high=1e6)),
        AlgorithmConfig(proximal="behaviour", **UNBOUNDED),  # type: ignore[arg-type]
    ],
)
def test_what_another_policy_sampled_has_the_on_policy_gradient_in_expectation(config: AlgorithmConfig) -> None:
    found, exact = expected_gradient(config)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-13)


def test_without_a_weight_it_has_another_one() -> None:
    found, exact = expected_gradient(AlgorithmConfig())
    assert float((found - exact).abs().max()) > 0.1


def test_clipping_keeps_near_the_proximal_policy_however_old_the_sample_is() -> None:
    """The current policy is where the update starts; the one that sampled is far from it (a ratio of e)."""
    drawn = random_loss_inputs(5)
    current = drawn.old_logprobs.detach()
    inputs = replace(drawn, logprobs=current, old_logprobs=current, rollout_logprobs=current - 1.0)
    clipped = {
        name: policy_loss(inputs, config).metrics["policy/clip_fraction"].value
        for name, config in (("recompute", DECOUPLED), ("behaviour", BEHAVIOUR))
    }
    positive = float((drawn.advantages > 0)[drawn.loss_mask].double().mean())
    assert clipped == {"recompute": 0.0, "behaviour": pytest.approx(positive)}


def test_the_proximal_policy_is_a_column() -> None:
    inputs = random_loss_inputs(0)
    assert with_proximal(inputs, AlgorithmConfig()) is inputs
    assert with_proximal(inputs, BEHAVIOUR).old_logprobs is inputs.rollout_logprobs
    with pytest.raises(BatchError, match="needs rollout_logprobs"):
        policy_loss(replace(inputs, rollout_logprobs=None), BEHAVIOUR)
