"""Policy losses that clip or regularise the ratio between the new and the old policy."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from skyrl_train.algorithms.inputs import PolicyLossInputs, PolicyLossOutput
from skyrl_train.algorithms.losses.checks import check_policy_loss_inputs
from skyrl_train.algorithms.losses.kl import absolute_value, logprob_rounding
from skyrl_train.algorithms.losses.ratios import Turns, clipped_losses, log_ratio_of, masked, ratio_metrics, turns_of
from skyrl_train.config.algorithm import AlgorithmConfig, NonNegative, NotAbove, Share
from skyrl_train.config.fields import Range
from skyrl_train.registry import reads


@reads("advantages", "old_logprobs", tokenwise=True)
def regular(inputs: PolicyLossInputs, config: AlgorithmConfig) -> PolicyLossOutput:
    """`-min(ratio * A, clip(ratio, 1 - eps_clip_low, 1 + eps_clip_high) * A)`, `ratio = exp(logprob - old_logprob)`.

    PPO, arXiv:1707.06347, equation 7; different bounds below and above are DAPO's clip-higher, arXiv:2503.14476.
    Raises BatchError for malformed inputs.
    """
    check_policy_loss_inputs(inputs)
    mask = inputs.loss_mask
    log_ratio = log_ratio_of(inputs.logprobs, inputs.old_logprobs, mask)
    losses, was_clipped = clipped_losses(log_ratio.exp(), masked(inputs.advantages, mask), config)
    return PolicyLossOutput(
        token_losses=masked(losses, mask), metrics=ratio_metrics(mask, log_ratio, clip_fraction=was_clipped)
    )


@reads("advantages", "old_logprobs", tokenwise=True)
def dual_clip(
    inputs: PolicyLossInputs,
    config: AlgorithmConfig,
    *,
    clip_ratio_c: Annotated[float, Range(1.0, exclusive_min=True)] = 3.0,
) -> PolicyLossOutput:
    """`regular`, and for `A < 0` at most `-clip_ratio_c * A`, so that a huge ratio cannot give a huge loss.

    Mastering Complex Control in MOBA Games with Deep Reinforcement Learning, arXiv:1912.09729, equation 5:
    `max(min(ratio * A, clip(ratio) * A), c * A)` for negative advantages. Raises BatchError for malformed inputs.

    Args:
        clip_ratio_c: With a negative advantage the loss is at most this times its size.
    """
    check_policy_loss_inputs(inputs)
    mask = inputs.loss_mask
    log_ratio = log_ratio_of(inputs.logprobs, inputs.old_logprobs, mask)
    advantages = masked(inputs.advantages, mask)
    losses, was_clipped = clipped_losses(log_ratio.exp(), advantages, config)
    ceiling = -clip_ratio_c * advantages
    capped = (advantages < 0) & (losses > ceiling)
    metrics = ratio_metrics(mask, log_ratio, clip_fraction=was_clipped, dual_clip_fraction=capped)
    return PolicyLossOutput(token_losses=masked(torch.where(capped, ceiling, losses), mask), metrics=metrics)


def _covariance(inputs: PolicyLossInputs, turns: Turns) -> Tensor:
    """`A_t * (logprob_t - mean of the turn's logprobs)`, without gradient.

    The paper centres both factors over the whole batch, which would make a token's loss depend on which rows share its
    micro-batch. Here log-probabilities are centred over the turn, and advantages are taken as they are, since
    estimators centre them already (centring over a turn would make them 0 if they are the same for all its
    tokens). A log-probability that differs from the mean by rounding alone, as all of a turn of certain tokens do, counts
    as the mean, so that neither a bound of 0 nor the order of tokens is decided by rounding.
    """
    with torch.no_grad():
        logprobs = masked(inputs.logprobs, inputs.loss_mask)
        centred = logprobs - turns.mean(logprobs)
        rounding = logprob_rounding(inputs.compute_dtype or logprobs.dtype)
        return masked(inputs.advantages, inputs.loss_mask) * torch.where(centred.abs() > rounding, centred, 0.0)


def _quota(turns: Turns, share: float) -> Tensor:
    """`[rows, len]`: that share of a turn's tokens, rounded down, but at least one unless the share is 0."""
    count = (turns.length() * share).long()
    return count.clamp(min=1) if share > 0 else count


@reads("advantages", "old_logprobs")
def clip_cov(
    inputs: PolicyLossInputs,
    config: AlgorithmConfig,
    *,
    share: Share = 0.0002,
    low: Annotated[float, NotAbove("high")] = 1.0,
    high: float = 5.0,
) -> PolicyLossOutput:
    """`regular`, but without the gradient (a loss of 0) for some tokens of high covariance, which cost most entropy.

    Clip-Cov of The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models, arXiv:2505.22617. Tokens
    qualify that are not clipped already and whose covariance lies between `low` and `high`; of these `share` of the
    turn's tokens, at least one, are left out. Differences: covariances are taken per turn (see `_covariance`), and the
    highest are chosen where the paper draws, so the loss needs no randomness and does not depend on micro-batches. Raises
    BatchError for malformed inputs.

    Args:
        share: Share of a turn's tokens whose gradient is stopped.
        low: Smallest covariance that qualifies.
        high: Largest covariance that qualifies.
    """
    check_policy_loss_inputs(inputs)
    mask = inputs.loss_mask
    log_ratio = log_ratio_of(inputs.logprobs, inputs.old_logprobs, mask)
    losses, was_clipped = clipped_losses(log_ratio.exp(), masked(inputs.advantages, mask), config)
    turns = turns_of(mask)
    covariance = _covariance(inputs, turns)
    candidates = mask & ~was_clipped & (covariance > low) & (covariance < high)
    chosen = turns.largest(covariance, candidates, _quota(turns, share))
    metrics = ratio_metrics(mask, log_ratio, clip_fraction=was_clipped, covariance_fraction=chosen)
    return PolicyLossOutput(token_losses=masked(losses, mask & ~chosen), metrics=metrics)


@reads("advantages", "old_logprobs")
def kl_cov(
    inputs: PolicyLossInputs, _config: AlgorithmConfig, *, share: Share = 0.002, coef: NonNegative = 1.0
) -> PolicyLossOutput:
    """`-ratio * A`, plus `coef * |logprob - old_logprob|` for the tokens of highest covariance.

    KL-Cov of arXiv:2505.22617. `share` of a turn's tokens, at least one, get the penalty; covariances per turn as in
    `clip_cov`, where the paper ranks over the batch. Where `logprob` is `old_logprob` but for rounding, the penalty has
    slope 0 (`kl.absolute_value`). Raises BatchError for malformed inputs.

    Args:
        share: Share of a turn's tokens, of largest covariance, that get the KL penalty.
        coef: Its weight.
    """
    check_policy_loss_inputs(inputs)
    mask = inputs.loss_mask
    log_ratio = log_ratio_of(inputs.logprobs, inputs.old_logprobs, mask)
    turns = turns_of(mask)
    chosen = turns.largest(_covariance(inputs, turns), mask, _quota(turns, share))
    losses = -log_ratio.exp() * masked(inputs.advantages, mask)
    losses = losses + masked(coef * absolute_value(log_ratio, inputs.compute_dtype), chosen)
    return PolicyLossOutput(
        token_losses=masked(losses, mask), metrics=ratio_metrics(mask, log_ratio, covariance_fraction=chosen)
    )
