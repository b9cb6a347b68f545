"""Policy losses: one number per trained token.

The loss of an optimizer step is `sum(loss_weights * token_losses)` with weights fixed over the closed mini-batch, so a
loss may not depend on which rows share its micro-batch: whatever it averages, it averages within a turn
(`ratios.turns_of`), so that rows per turn or per trajectory make no difference either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from skyrl_train.algorithms.inputs import PolicyLossInputs, PolicyLossOutput
from skyrl_train.algorithms.losses.checks import check_loss_output, needed
from skyrl_train.algorithms.losses.off_policy import off_policy_weights
from skyrl_train.algorithms.losses.ratios import Turns, masked, rows_of, turns_of
from skyrl_train.config.algorithm import AlgorithmConfig, loss_reads
from skyrl_train.parts import POLICY_LOSSES
from skyrl_train.registry import Reads, part_name
from skyrl_train.telemetry import Mean, Metric

DECLARED_METRICS = """
off_policy/negatives_left_out_fraction | share | Tokens of negative advantage left out. | with
    `off_policy.negative_kl_max`
"""

__all__ = ["POLICY_LOSSES", "PolicyLoss", "PolicyLossInputs", "PolicyLossOutput", "policy_loss"]

PolicyLoss = Callable[[PolicyLossInputs, AlgorithmConfig], PolicyLossOutput]


def is_tokenwise(config: AlgorithmConfig) -> bool:
    """Whether the configured loss of a token is a function of that token alone."""
    weighted = config.off_policy.enabled or config.off_policy.negative_kl_max > 0
    return loss_reads(config).tokenwise and not weighted


def policy_loss(inputs: PolicyLossInputs, config: AlgorithmConfig) -> PolicyLossOutput:
    """Return the configured loss, times the weights of `trainer.algorithm.off_policy` where they are on.

    Where weights are taken over the whole step they come with the inputs; see `step_columns.py`.

    Raises ConfigError for an unknown name; BatchError for malformed inputs, or where a custom loss returns another
    shape than `[rows, len]`.
    """
    loss: PolicyLoss = POLICY_LOSSES.resolve(config.policy_loss)
    inputs = with_proximal(inputs, config)
    output = loss(_as_declared(inputs, loss_reads(config)), config)
    check_loss_output(output, inputs.logprobs.shape, f"policy loss {part_name(config.policy_loss)!r}")
    if inputs.policy_weights is not None:
        return replace(output, token_losses=output.token_losses * inputs.policy_weights.to(output.token_losses.dtype))
    losses, metrics = output.token_losses, dict(output.metrics)
    if config.off_policy.enabled or config.off_policy.negative_kl_max > 0:
        sequences = rows_of(inputs.loss_mask) if config.sequence_unit == "trajectory" else turns_of(inputs.loss_mask)
        weights, found = sequence_weights(inputs, sequences, config)
        losses, metrics = losses * weights.to(losses.dtype), metrics | found
    return PolicyLossOutput(token_losses=losses, metrics=metrics)


def with_proximal(inputs: PolicyLossInputs, config: AlgorithmConfig) -> PolicyLossInputs:
    """Return the inputs with the proximal policy's log-probabilities as the old ones: the engine's where `config.proximal`
    is behaviour. Raises BatchError where there are none.
    """
    if config.proximal == "recompute":
        return inputs
    return replace(inputs, old_logprobs=needed("rollout_logprobs", inputs.rollout_logprobs))


def _as_declared(inputs: PolicyLossInputs, reads: Reads) -> PolicyLossInputs:
    """Return the inputs with the columns that the loss declares. One that it does not is missing, or NaN where the type
    has no None, so that reading it cannot go unnoticed.
    """
    nothing = inputs.logprobs.detach().new_full((), torch.nan).expand_as(inputs.logprobs)
    hidden: dict[str, Any] = {"old_logprobs": nothing, "advantages": nothing}
    hidden |= {"rollout_logprobs": None, "ref_logprobs": None, "values": None}
    return replace(inputs, **{name: value for name, value in hidden.items() if name not in reads.columns})


def sequence_weights(
    inputs: PolicyLossInputs, sequences: Turns, config: AlgorithmConfig, *, copies: Tensor | None = None
) -> tuple[Tensor, dict[str, Metric]]:
    """Return `[rows, len]` without gradient: what `trainer.algorithm.off_policy` makes of these sequences. `copies`: as of
    `off_policy_weights`. Raises BatchError.
    """
    weights, metrics = torch.ones_like(inputs.logprobs), dict[str, Metric]()
    if config.off_policy.enabled:
        rollout = needed("rollout_logprobs", inputs.rollout_logprobs)
        correction = off_policy_weights(
            inputs.old_logprobs, rollout, inputs.loss_mask, config.off_policy, sequences=sequences, copies=copies
        )
        weights, metrics = weights * correction.weights, metrics | correction.metrics
    if config.off_policy.negative_kl_max > 0:
        left_out = rejected_negatives(inputs, sequences, config.off_policy.negative_kl_max)
        weights = torch.where(left_out, 0.0, weights)
        share = Mean(float(left_out.sum()), float(inputs.loss_mask.sum()))
        metrics["off_policy/negatives_left_out_fraction"] = share
    return weights.detach(), metrics


@torch.no_grad()
def rejected_negatives(inputs: PolicyLossInputs, sequences: Turns, largest: float) -> Tensor:
    """Return `[rows, len]` bool: tokens with a negative advantage in sequences the policy has moved away from.

    Away: the mean over the sequence of `rollout_logprob - logprob` is above `largest`; without the engine's
    log-probabilities those of before the update stand for them. Off-policy sequence masking of DeepSeek-V3.2,
    arXiv:2512.02556, section 3.1: a bad sample that the policy would hardly draw any more teaches nothing.
    """
    base = inputs.old_logprobs if inputs.rollout_logprobs is None else inputs.rollout_logprobs
    divergence = sequences.mean(masked(base - inputs.logprobs.detach(), inputs.loss_mask))
    return (masked(inputs.advantages, inputs.loss_mask) < 0) & (divergence > largest)
