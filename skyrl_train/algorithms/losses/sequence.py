"""Policy losses whose ratio is that of a whole sequence: a turn, or a trajectory with `sequence_unit=trajectory`.

Each reads one number of its sequence, without gradient: its statistic. Where a trajectory lies in several rows, which
may be computed apart, the statistic is taken once over the closed mini-batch (`step_columns.py`) and comes as the
column `sequence_log_ratio`; else it is taken from the rows of the micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from skyrl_train.algorithms.inputs import PolicyLossInputs, PolicyLossOutput
from skyrl_train.algorithms.losses.checks import check_policy_loss_inputs
from skyrl_train.algorithms.losses.kl import MAX_LOG_RATIO
from skyrl_train.algorithms.losses.ratios import (
    Turns,
    clip_range,
    clipped_losses,
    log_ratio_of,
    masked,
    ratio_metrics,
    rows_of,
    turns_of,
)
from skyrl_train.config.algorithm import AlgorithmConfig, NonNegative
from skyrl_train.parts import POLICY_LOSSES
from skyrl_train.registry import reads

SequenceStatistic = Callable[[PolicyLossInputs, Turns, AlgorithmConfig], Tensor]
"""`(inputs, their sequences, config) -> [rows, len]` without gradient: at each trained token, that of its sequence."""


T = TypeVar("T")


def reads_sequences(statistic: SequenceStatistic) -> Callable[[T], T]:
    """Declare what a policy loss reads of a token's whole sequence.

    With `sequence_unit=trajectory` and trajectories of several rows it then comes as `inputs.sequence_log_ratio`.
    """

    def declare(loss: T) -> T:
        loss.sequence_statistic = statistic  # type: ignore[attr-defined]
        return loss

    return declare


def _clipped_log_ratio(inputs: PolicyLossInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """GMPO's `d_t` with its gradient, and where the bound won; both `[rows, len]`."""
    log_ratio = log_ratio_of(inputs.logprobs, inputs.old_logprobs, inputs.loss_mask)
    sign = masked(inputs.advantages, inputs.loss_mask).sign()
    low, high = clip_range(config, log_ratio.dtype)
    bounded = log_ratio.detach().clamp(low - 1, high - 1)
    beyond = sign * bounded < sign * log_ratio.detach()
    return torch.where(beyond, bounded, torch.where(sign == 0, 0.0, log_ratio)), beyond


def _mean_log_ratio(inputs: PolicyLossInputs, sequences: Turns, _config: AlgorithmConfig) -> Tensor:
    mask = inputs.loss_mask
    return sequences.mean(masked(inputs.logprobs.detach(), mask) - masked(inputs.old_logprobs, mask))


def _mean_clipped_log_ratio(inputs: PolicyLossInputs, sequences: Turns, config: AlgorithmConfig) -> Tensor:
    return sequences.mean(_clipped_log_ratio(inputs, config)[0].detach())


def _sum_log_ratio(inputs: PolicyLossInputs, sequences: Turns, _config: AlgorithmConfig) -> Tensor:
    return sequences.total(log_ratio_of(inputs.logprobs.detach(), inputs.old_logprobs, inputs.loss_mask))


@reads("advantages", "old_logprobs")
@reads_sequences(_mean_log_ratio)
def gspo(inputs: PolicyLossInputs, config: AlgorithmConfig) -> PolicyLossOutput:
    """`regular` with the sequence's ratio `s = exp(mean_t(logprob_t - old_logprob_t))` in place of the token's.

    Group Sequence Policy Optimization, arXiv:2507.18071, in its form GSPO-token (equations 14 to 16): the value is `s`,
    the gradient `s * grad logprob_t`, so that advantages may differ between tokens; with equal ones it is GSPO. The
    paper averages losses per sequence: `loss_reduction=sequence_mean`. Raises BatchError for malformed inputs.
    """
    check_policy_loss_inputs(inputs)
    mask = inputs.loss_mask
    logprobs = masked(inputs.logprobs, mask)
    sequence = _statistic(_mean_log_ratio, inputs, config).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = (sequence + logprobs - logprobs.detach()).exp()
    losses, was_clipped = clipped_losses(ratio, masked(inputs.advantages, mask), config)
    return PolicyLossOutput(
        token_losses=masked(losses, mask), metrics=ratio_metrics(mask, sequence, clip_fraction=was_clipped)
    )


@reads("advantages", "old_logprobs")
@reads_sequences(_mean_clipped_log_ratio)
def gmpo(inputs: PolicyLossInputs, config: AlgorithmConfig) -> PolicyLossOutput:
    """`-A * exp(mean_t(d_t))`: the geometric mean of the sequence's token ratios, each clipped.

    `d_t = sign(A) * min(sign(A) * l_t, sign(A) * clip(l_t, -eps_clip_low, eps_clip_high))`, `l_t = logprob_t -
    old_logprob_t`: bounds are on the log-ratio. Geometric-Mean Policy Optimization, arXiv:2507.20673, equation 4, with
    its bounds of 0.4. As in `gspo` the value is that of the sequence and the gradient reaches each token by its own
    `d_t`, with the token's own advantage; with equal advantages, as every estimator of outcomes gives them, it is the
    paper's gradient. The paper averages per sequence: `loss_reduction=sequence_mean`. Raises BatchError for malformed
    inputs.
    """
    check_policy_loss_inputs(inputs)
    mask = inputs.loss_mask
    clipped, was_clipped = _clipped_log_ratio(inputs, config)
    sequence = _statistic(_mean_clipped_log_ratio, inputs, config).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    losses = -masked(inputs.advantages, mask) * (sequence + clipped - clipped.detach()).exp()
    return PolicyLossOutput(
        token_losses=masked(losses, mask), metrics=ratio_metrics(mask, sequence, clip_fraction=was_clipped)
    )


@reads("advantages", "old_logprobs")
@reads_sequences(_sum_log_ratio)
def vespo(
    inputs: PolicyLossInputs,
    config: AlgorithmConfig,
    *,
    k_pos: NonNegative = 2.0,
    lambda_pos: NonNegative = 3.0,
    k_neg: NonNegative = 3.0,
    lambda_neg: NonNegative = 2.0,
) -> PolicyLossOutput:
    """`-stop_gradient(phi(w)) * A * logprob`, `phi(w) = w^k * exp(lambda * (1 - w))`, w the sequence's product of ratios.

    `k` and `lambda` are `k_pos` and `lambda_pos` where `A >= 0`, else `k_neg` and `lambda_neg`; `phi(1) = 1`. Variational
    Sequence-Level Soft Policy Optimization, arXiv:2602.10693: a smooth weight in place of clipping, without a correction
    for length. Raises BatchError for malformed inputs.

    Args:
        k_pos: Power of the sequence's weight, advantages from 0.
        lambda_pos: Damping of larger weights, advantages from 0.
        k_neg: Power of the sequence's weight, negative advantages.
        lambda_neg: Damping of larger weights, negative advantages.
    """
    check_policy_loss_inputs(inputs)
    mask = inputs.loss_mask
    log_w = _statistic(_sum_log_ratio, inputs, config).clamp(LOG_SMALLEST_WEIGHT, MAX_LOG_RATIO)
    advantages = masked(inputs.advantages, mask)
    rises = advantages >= 0

    def chosen(positive: float, negative: float) -> Tensor:
        return torch.where(rises, advantages.new_tensor(positive), advantages.new_tensor(negative))

    k = chosen(k_pos, k_neg)
    rate = chosen(lambda_pos, lambda_neg)
    phi = (rate + k * log_w - rate * log_w.exp()).exp()
    losses = -phi * advantages * masked(inputs.logprobs, mask)
    return PolicyLossOutput(token_losses=masked(losses, mask), metrics=ratio_metrics(mask, log_w, gate=phi))


LOG_SMALLEST_WEIGHT = math.log(1e-8)
"""VESPO's authors keep the sequence's weight above 1e-8."""


def statistic_of(config: AlgorithmConfig) -> SequenceStatistic | None:
    """Return the statistic that the configured loss, bundled or custom, declares with `reads_sequences`; None where it
    declares none."""
    loss = POLICY_LOSSES.resolve(config.policy_loss)
    # With arguments beside its name the loss is a partial, which does not show the attributes of what it wraps.
    found: SequenceStatistic | None = getattr(getattr(loss, "func", loss), "sequence_statistic", None)
    return found


def _statistic(statistic: SequenceStatistic, inputs: PolicyLossInputs, config: AlgorithmConfig) -> Tensor:
    if inputs.sequence_log_ratio is not None:
        return masked(inputs.sequence_log_ratio.to(inputs.logprobs.dtype), inputs.loss_mask)
    mask = inputs.loss_mask
    sequences = rows_of(mask) if config.sequence_unit == "trajectory" else turns_of(mask)
    return statistic(inputs, sequences, config)
