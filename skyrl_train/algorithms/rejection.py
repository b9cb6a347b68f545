"""Which tokens and sequences are left out because what sampled them is too far from the policy. No gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from skyrl_train.algorithms.inputs import PolicyLossInputs
from skyrl_train.algorithms.kl import logprob_rounding
from skyrl_train.algorithms.ratios import Turns, masked

DIVERGENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: log_ratio,
    "k2": lambda log_ratio: 0.5 * log_ratio.square(),
    "k3": lambda log_ratio: torch.expm1(log_ratio) - log_ratio,
}
"""Of `log_ratio = old_logprob - rollout_logprob`: estimators of KL(rollout || policy) up to the sign of k1."""


@torch.no_grad()
def rejected(log_ratio: Tensor, sequences: Turns, criteria: Mapping[str, Any]) -> Tensor:
    """`[rows, len]` bool: tokens that any of the criteria leaves out.

    `log_ratio` `[rows, len]` float, 0 where nothing is trained. A criterion is `token_kN`, of each token by itself, or
    `sequence_{sum,mean,max}_kN`, of all tokens of a sequence, N one of 1 to 3; what it is bounded by is a pair (low, high)
    of ratios for k1 and the largest divergence for k2 and k3. Trust-region masking and its relatives: When Speed Kills
    Stability (Liu et al., 2025) and Trust Region Masking, arXiv:2512.23075.
    """
    found = torch.zeros_like(sequences.mask)
    for name, bound in criteria.items():
        level, divergence = name.rsplit("_", 1)
        value = DIVERGENCES[divergence](log_ratio)
        if level != "token":
            value = {
                "sequence_sum": sequences.total,
                "sequence_mean": sequences.mean,
                "sequence_max": sequences.highest,
            }[level](value)
        low, high = (-math.inf, bound) if divergence != "k1" else _log_bounds(bound, log_ratio.dtype)
        found |= (value < low) | (value > high)
    return found & sequences.mask


@torch.no_grad()
def rejected_negatives(inputs: PolicyLossInputs, sequences: Turns, largest: float) -> Tensor:
    """`[rows, len]` bool: tokens with a negative advantage in sequences the policy has moved away from.

    Away: the mean over the sequence of `rollout_logprob - logprob` is above `largest`; without the engine's
    log-probabilities those of before the update stand for them. Off-policy sequence masking of DeepSeek-V3.2,
    arXiv:2512.02556, section 3.1: a bad sample that the policy would hardly draw any more teaches nothing.
    """
    base = inputs.old_logprobs if inputs.rollout_logprobs is None else inputs.rollout_logprobs
    divergence = sequences.mean(masked(base - inputs.logprobs.detach(), inputs.loss_mask))
    return (masked(inputs.advantages, inputs.loss_mask) < 0) & (divergence > largest)


def _log_bounds(bound: Any, dtype: torch.dtype) -> tuple[float, float]:
    """Of the log-ratio; one at 0 moves to where rounding ends, since ratios of one policy to itself lie around 1."""
    low, high = (math.log(value) for value in bound)
    rounding = logprob_rounding(dtype)
    return min(low, -rounding) if abs(low) < rounding else low, max(high, rounding) if abs(high) < rounding else high
