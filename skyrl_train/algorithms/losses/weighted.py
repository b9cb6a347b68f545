"""Policy losses that weigh each token's log-probability: importance sampling and its kin, and plain likelihood."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from skyrl_train.algorithms.inputs import PolicyLossInputs, PolicyLossOutput
from skyrl_train.algorithms.losses.checks import check_policy_loss_inputs, needed
from skyrl_train.algorithms.losses.kl import logprob_rounding
from skyrl_train.algorithms.losses.ratios import (
    clip_range,
    log_ratio_of,
    masked,
    ratio_extremes,
    ratio_metrics,
    token_means,
)
from skyrl_train.config.algorithm import AlgorithmConfig, Positive
from skyrl_train.config.fields import Range
from skyrl_train.registry import reads
from skyrl_train.telemetry import Metric


@reads("advantages", "old_logprobs", tokenwise=True)
def importance_sampling(inputs: PolicyLossInputs, _config: AlgorithmConfig) -> PolicyLossOutput:
    """`-ratio * A`, `ratio = exp(logprob - old_logprob)`: the policy gradient, unclipped.

    The surrogate that PPO clips, arXiv:1707.06347, equation 6. Raises BatchError for malformed inputs.
    """
    check_policy_loss_inputs(inputs)
    mask = inputs.loss_mask
    log_ratio = log_ratio_of(inputs.logprobs, inputs.old_logprobs, mask)
    losses = -log_ratio.exp() * masked(inputs.advantages, mask)
    return PolicyLossOutput(token_losses=masked(losses, mask), metrics=ratio_metrics(mask, log_ratio))


@reads("advantages", tokenwise=True)
def reinforce(inputs: PolicyLossInputs, _config: AlgorithmConfig) -> PolicyLossOutput:
    """`-A * logprob`: the policy gradient without a ratio, for one optimizer step per batch.

    Williams, "Simple statistical gradient-following algorithms", 1992; the loss of GPG, arXiv:2504.02546. Raises
    BatchError for malformed inputs.
    """
    check_policy_loss_inputs(inputs)
    losses = -masked(inputs.advantages, inputs.loss_mask) * masked(inputs.logprobs, inputs.loss_mask)
    return PolicyLossOutput(token_losses=losses, metrics=token_means(inputs.loss_mask, nll=-inputs.logprobs))


@reads(tokenwise=True)
def cross_entropy(inputs: PolicyLossInputs, _config: AlgorithmConfig) -> PolicyLossOutput:
    """`-logprob`: maximum likelihood of the trained tokens; advantages are not used.

    Raises BatchError for malformed inputs.
    """
    check_policy_loss_inputs(inputs)
    losses = -masked(inputs.logprobs, inputs.loss_mask)
    return PolicyLossOutput(token_losses=losses, metrics=token_means(inputs.loss_mask, nll=losses))


@reads("advantages", "old_logprobs", tokenwise=True)
def cispo(inputs: PolicyLossInputs, config: AlgorithmConfig) -> PolicyLossOutput:
    """`-stop_gradient(clip(ratio, 1 - eps_clip_low, 1 + eps_clip_high)) * A * logprob`.

    CISPO of MiniMax-M1, arXiv:2506.13585, equation 4: the weight is clipped, so clipped tokens keep a gradient. The
    paper sets no lower bound: `eps_clip_low=1`. SkyRL's default bounds weights below by 1. Raises BatchError for
    malformed inputs.
    """
    check_policy_loss_inputs(inputs)
    mask = inputs.loss_mask
    log_ratio = log_ratio_of(inputs.logprobs, inputs.old_logprobs, mask).detach()
    ratio = log_ratio.exp()
    low, high = 1 - config.eps_clip_low, 1 + config.eps_clip_high
    metrics = ratio_metrics(
        mask,
        log_ratio,
        clip_fraction=(ratio < low) | (ratio > high),
        ratio_clamped_low_fraction=ratio < low,
        ratio_clamped_high_fraction=ratio > high,
    )
    return _weighted(inputs, ratio.clamp(low, high), {**metrics, **ratio_extremes(mask, log_ratio)})


@reads("advantages", "rollout_logprobs", tokenwise=True)
def rollout_is(inputs: PolicyLossInputs, config: AlgorithmConfig) -> PolicyLossOutput:
    """`-stop_gradient(w) * A * logprob` with `w = exp(logprob - rollout_logprob)`, 0 outside the clip range.

    One ratio for engine numerics, staleness and drift together, so that no old log-probabilities are needed. Tokens
    outside `(1 - eps_clip_low, 1 + eps_clip_high)` on either side are left out, as in the double-sided token clipping
    of Single-Rollout Asynchronous Optimization, arXiv:2607.07508, and IcePop, arXiv:2510.18855.
    Needs rollout log-probabilities. Raises BatchError for malformed inputs.
    """
    check_policy_loss_inputs(inputs)
    mask = inputs.loss_mask
    log_ratio = log_ratio_of(inputs.logprobs, needed("rollout_logprobs", inputs.rollout_logprobs), mask).detach()
    ratio = log_ratio.exp()
    low, high = clip_range(config, ratio.dtype)
    outside = (ratio <= low) | (ratio >= high)
    return _weighted(inputs, torch.where(outside, 0.0, ratio), ratio_metrics(mask, log_ratio, clip_fraction=outside))


@reads("advantages", "rollout_logprobs", tokenwise=True)
def dppo(
    inputs: PolicyLossInputs,
    config: AlgorithmConfig,
    *,
    divergence: Literal["tv", "kl"] = "tv",
    max_ratio: Annotated[float, Range(1.0)] = 20.0,
) -> PolicyLossOutput:
    """`-M * stop_gradient(min(ratio, max_ratio)) * A * logprob`, `ratio = exp(logprob - rollout_logprob)`.

    Divergence PPO, Rethinking the Trust Region in LLM Reinforcement Learning, arXiv:2602.04879, binary variants. With
    `p = exp(rollout_logprob)`, `q = exp(logprob)`, the divergence is `D = |p - q|` (tv) or
    `p log(p / q) + (1 - p) log((1 - p) / (1 - q))` (kl), and `M = 0` where the step leaves the trust region: `A > 0`,
    `q > p` and `D > eps_clip_high`, or `A < 0`, `q < p` and `D > eps_clip_low`; else 1. As in the paper the region lies
    around the policy that sampled; verl takes the policy at the start of the update. Needs rollout log-probabilities.
    Raises BatchError for malformed inputs.

    Args:
        divergence: Total variation or KL of this token against all others.
        max_ratio: Importance weights are truncated here.
    """
    check_policy_loss_inputs(inputs)
    mask = inputs.loss_mask
    rollout = masked(needed("rollout_logprobs", inputs.rollout_logprobs), mask)
    logprobs = masked(inputs.logprobs, mask).detach()
    log_ratio = log_ratio_of(logprobs, rollout, mask)
    old, new = rollout.exp(), logprobs.exp()
    distance = (old - new).abs() if divergence == "tv" else _binary_kl(rollout, logprobs)
    rounding = logprob_rounding(logprobs.dtype)
    rising = (inputs.advantages > 0) & (new > old) & (distance > max(config.eps_clip_high, rounding))
    falling = (inputs.advantages < 0) & (new < old) & (distance > max(config.eps_clip_low, rounding))
    left = rising | falling
    weight = torch.where(left, 0.0, log_ratio.exp().clamp(max=max_ratio))
    return _weighted(inputs, weight, ratio_metrics(mask, log_ratio, clip_fraction=left, divergence=distance))


def _binary_kl(old_logprobs: Tensor, new_logprobs: Tensor) -> Tensor:
    """KL between Bernoulli variables with these log-probabilities of 1 (at most 0).

    The complement is `log(-expm1(logprob))`, kept away from `log(0)` by the dtype's smallest normal number.
    """
    tiny = torch.finfo(old_logprobs.dtype).tiny
    old_other = -torch.expm1(old_logprobs.clamp(max=0))
    new_other = (-torch.expm1(new_logprobs.clamp(max=0))).clamp(min=tiny)
    others = torch.where(old_other > 0, old_other * (old_other.clamp(min=tiny).log() - new_other.log()), 0.0)
    return old_logprobs.exp() * (old_logprobs - new_logprobs) + others


@reads("advantages", "old_logprobs", tokenwise=True)
def sapo(
    inputs: PolicyLossInputs, _config: AlgorithmConfig, *, tau_pos: Positive = 1.0, tau_neg: Positive = 1.05
) -> PolicyLossOutput:
    """`-A * (4 / tau) * sigmoid(tau * (ratio - 1))`, `tau = tau_pos` where `A > 0`, else `tau_neg`.

    Soft Adaptive Policy Optimization, arXiv:2511.20347: a smooth gate in place of clipping, whose slope at ratio 1 is
    that of the policy gradient. The paper averages losses per sequence: `loss_reduction=sequence_mean`.
    Raises BatchError for malformed inputs.

    Args:
        tau_pos: Temperature of the gate for positive advantages.
        tau_neg: Temperature of the gate for the others; larger fades faster.
    """
    check_policy_loss_inputs(inputs)
    mask = inputs.loss_mask
    log_ratio = log_ratio_of(inputs.logprobs, inputs.old_logprobs, mask)
    advantages = masked(inputs.advantages, mask)
    positive, negative = (advantages.new_tensor(tau) for tau in (tau_pos, tau_neg))
    tau = torch.where(advantages > 0, positive, negative)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * (4 / tau)
    return PolicyLossOutput(
        token_losses=masked(-gate * advantages, mask), metrics=ratio_metrics(mask, log_ratio, gate=gate)
    )


@reads("advantages", "old_logprobs", tokenwise=True)
def dro(
    inputs: PolicyLossInputs, _config: AlgorithmConfig, *, beta: Annotated[float, Range(0.0)] = 0.05
) -> PolicyLossOutput:
    """`-(A * logprob - beta / 2 * (logprob - old_logprob)^2)`.

    Offline Regularised Reinforcement Learning, arXiv:2405.19107, with an advantage in place of reward minus value; a token
    at a time, as Tinker documents its loss of this name (tinker-docs.thinkingmachines.ai/tinker/losses/dro). Raises
    BatchError for malformed inputs.

    Args:
        beta: Weight of the squared log-ratio.
    """
    check_policy_loss_inputs(inputs)
    mask = inputs.loss_mask
    log_ratio = log_ratio_of(inputs.logprobs, inputs.old_logprobs, mask)
    gain = masked(inputs.advantages, mask) * masked(inputs.logprobs, mask)
    losses = 0.5 * beta * log_ratio.square() - gain
    return PolicyLossOutput(token_losses=masked(losses, mask), metrics=ratio_metrics(mask, log_ratio))


def _weighted(inputs: PolicyLossInputs, weight: Tensor, metrics: dict[str, Metric]) -> PolicyLossOutput:
    """`-weight * A * logprob`; `weight` carries no gradient."""
    mask = inputs.loss_mask
    losses = -weight * masked(inputs.advantages, mask) * masked(inputs.logprobs, mask)
    return PolicyLossOutput(token_losses=masked(losses, mask), metrics=metrics)
