"""Correction for tokens that were not sampled by the policy the update starts from, and a ledger of the reasons.

The log-ratio between the policy that is trained and the engine that sampled has three parts:

    logprob - rollout_logprob  =  (sampler_logprob - rollout_logprob)   engine numerics: same weights, other kernels
                                + (old_logprob - sampler_logprob)       staleness: the weights moved since sampling
                                + (logprob - old_logprob)               drift within the batch: earlier mini-batches

`sampler_logprob` is the trainer's own evaluation of the weights that sampled; where the weights are the same as at the
start of the update it is `old_logprob`. Losses handle the drift; the weights here handle the first two together.

So three policies are kept apart: behaviour (`rollout_logprob`, the engine's of each token), proximal (`old_logprob`, of the
weights when the batch closes) and current (`logprob`). The importance weight is proximal / behaviour, and what a loss clips
is the ratio current / proximal: Decoupled PPO, arXiv:2505.24298, section 5.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skyrl_train.algorithms.losses.kl import MAX_LOG_RATIO, logprob_rounding
from skyrl_train.algorithms.losses.ratios import Turns, masked, turns_of
from skyrl_train.batch import require_bool, require_float, require_rows
from skyrl_train.config.algorithm import OffPolicyConfig
from skyrl_train.telemetry import Max, Mean, Metric, later

DECLARED_METRICS = """
off_policy/{ratio,weight} | | Means of trainer over engine, and of the weight made of it. | with weights or masks | verl
    `rollout_corr/rollout_is_mean`
off_policy/weights_bounded_fraction | share | Tokens whose weight a bound changed. | with weights or masks
off_policy/turns_{left_out,under_low,over_high}_fraction | share | Turns without a gradient: all, under the lower bound,
    over the upper. | with weights or masks | verl `rollout_corr/rollout_rs_masked_fraction`
off_policy/{numerics,staleness,drift,unattributed}_{mean,abs_mean,abs_max} | nats | Parts of the difference to the
    engine's log-probabilities (`docs/algorithms.md`). | with engine log-probabilities
off_policy/{abs,k1,kl,drift}/age_<n> | nats | By token age: size of difference, k1 and k3 of KL(behaviour || proximal),
    size of drift. | with older weights
off_policy/in_flight/cache_distance{,_max} | nats | What older keys and values make of a log-probability. | with
    `trainer.in_flight_updates`
"""


@dataclass(frozen=True, kw_only=True)
class Correction:
    weights: Tensor
    """`[rows, len]` without gradient; 0 where a token or its turn is left out. 1 outside the loss mask."""
    metrics: dict[str, Metric]
    """`off_policy/...`: mean ratio and weight, shares of tokens that were bounded and of turns that were left out."""


@torch.no_grad()
def off_policy_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    config: OffPolicyConfig,
    *,
    sequences: Turns | None = None,
    copies: Tensor | None = None,
) -> Correction:
    """Weights from `ratio = exp(old_logprob - rollout_logprob)`; all `[rows, len]`, `loss_mask` bool.

    Truncated importance sampling per token: Your Efficient RL Framework Secretly Brings You Off-Policy RL Training
    (Yao et al., 2025, fengyao.notion.site/off-policy-rl). Masked per token: IcePop, arXiv:2510.18855. Per sequence
    (product over a turn's tokens), geometric mean, and masks on either: When Speed Kills Stability (Liu et al., 2025, a
    report without arXiv number). Further criteria: `rejected`. Everything is taken per sequence, a turn where
    `sequences` gives no other, so it depends neither on the micro-batch nor on whether a trajectory has one row or one row
    per turn; but with `batch_normalize` the tokens are all of those of the optimizer step, of which `copies`, integers, says
    how often each counts in the mean (once unless given). A NaN stays a NaN: it is never masked away silently. Raises
    BatchError for malformed inputs.
    """
    shape = require_rows("old_logprobs", old_logprobs)
    require_float("old_logprobs", old_logprobs, shape)
    require_float("rollout_logprobs", rollout_logprobs, shape)
    require_bool("loss_mask", loss_mask, shape)
    log_ratio = masked(old_logprobs - rollout_logprobs, loss_mask)
    turns = turns_of(loss_mask) if sequences is None else sequences
    product, geometric, ratio = _exp(turns.total(log_ratio)), _exp(turns.mean(log_ratio)), _exp(log_ratio)

    weights, changed = _weights(ratio, product, geometric, config)
    if config.batch_normalize:
        weights = weights / _mean_weight(weights, turns, config, copies)
    under, over = torch.zeros_like(loss_mask), torch.zeros_like(loss_mask)
    if config.sequence_mask != "none":
        value = geometric if config.sequence_mask == "geometric" else product
        low, high = _away_from_1(config.sequence_mask_low, config.sequence_mask_high, ratio.dtype)
        under, over = value < low, value > high
    low, high = _away_from_1(config.outlier_low, config.outlier_high, ratio.dtype)
    if config.outlier_low > 0:
        under = under | (turns.total((ratio < low).double()) > 0)
    if config.outlier_high > 0:
        over = over | (turns.total((ratio > high).double()) > 0)
    left_out = rejected(log_ratio, turns, config.reject) | under | over
    weights = torch.where(left_out, torch.zeros_like(weights), weights)
    weights = torch.where(loss_mask, weights, torch.ones_like(weights))

    tokens = [masked(column.double(), loss_mask).sum() for column in (ratio, weights, changed)]
    flags = (left_out & turns.starts, under & turns.starts, over & turns.starts, turns.starts, loss_mask)
    sums = torch.stack([*tokens, *(flag.sum().double() for flag in flags)]).tolist()
    ratio_sum, weight_sum, changed_sum, turns_out, turns_under, turns_over, num_turns, num_tokens = sums
    return Correction(
        weights=weights,
        metrics={
            "off_policy/ratio": Mean(ratio_sum, num_tokens),
            "off_policy/weight": Mean(weight_sum, num_tokens),
            "off_policy/weights_bounded_fraction": Mean(changed_sum, num_tokens),
            "off_policy/turns_left_out_fraction": Mean(turns_out, num_turns),
            "off_policy/turns_under_low_fraction": Mean(turns_under, num_turns),
            "off_policy/turns_over_high_fraction": Mean(turns_over, num_turns),
        },
    )


def _mean_weight(weights: Tensor, turns: Turns, config: OffPolicyConfig, copies: Tensor | None) -> Tensor:
    """Return the mean weight over tokens, or over sequences where a sequence has one weight; 1 where nothing has any."""
    chosen = turns.mask if config.weight == "token" else turns.starts
    kept = weights[chosen] if copies is None else weights[chosen].repeat_interleave(copies.view_as(chosen)[chosen])
    mean = kept.mean() if kept.numel() else weights.new_ones(())
    return torch.where(mean > SMALLEST_MEAN_WEIGHT, mean, 1.0)


SMALLEST_MEAN_WEIGHT = 1e-8
"""Weights whose mean is not above this are not divided by it."""


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _weights(ratio: Tensor, product: Tensor, geometric: Tensor, config: OffPolicyConfig) -> tuple[Tensor, Tensor]:
    """Return the weights before turns are left out, and where truncation or the mask acted; both `[rows, len]`."""
    if not config.weighs:
        return torch.ones_like(ratio), torch.zeros_like(ratio, dtype=torch.bool)
    chosen = {"token": ratio, "sequence": product, "geometric": geometric}[config.weight]
    low, high = _away_from_1(config.weight_low, config.weight_high, chosen.dtype)
    outside = (chosen < low) | (chosen > high)
    if config.weight_mode == "truncate":
        return chosen.clamp(config.weight_low, config.weight_high), outside
    inside = torch.ones_like(chosen) if config.weight_mode == "mask_only" else chosen
    # A NaN is outside of nothing: it stays, where a 1 would hide it.
    return torch.where(outside, torch.zeros_like(chosen), torch.where(chosen.isnan(), chosen, inside)), outside


def _away_from_1(low: float, high: float, dtype: torch.dtype) -> tuple[float, float]:
    """Return the bounds, of which one at 1 itself moves to where rounding ends: ratios of one policy to itself lie
    around 1.
    """
    rounding = logprob_rounding(dtype)
    return (1 - rounding if abs(low - 1) < rounding else low), (1 + rounding if abs(high - 1) < rounding else high)


@dataclass(frozen=True, kw_only=True)
class LogRatioLedger:
    """`[rows, len]` each, 0 outside the loss mask; they add up to `logprobs - rollout_logprobs`."""

    numerics: Tensor
    staleness: Tensor
    drift: Tensor
    unattributed: Tensor
    """What cannot be separated: numerics and staleness together, of stale tokens that the sampling weights were not
    evaluated on."""

    def metrics(self, loss_mask: Tensor) -> dict[str, Metric]:
        """`off_policy/PART_{mean,abs_mean,abs_max}` over the trained tokens."""
        found: dict[str, Metric] = {}
        weight = later(loss_mask.sum().double())
        for name in ("numerics", "staleness", "drift", "unattributed"):
            part = getattr(self, name).double()
            found[f"off_policy/{name}_mean"] = Mean(later(part.sum()), weight)
            found[f"off_policy/{name}_abs_mean"] = Mean(later(part.abs().sum()), weight)
            found[f"off_policy/{name}_abs_max"] = Max(later(part.abs().max()) if part.numel() else 0.0)
        return found

    def metrics_by_age(
        self, loss_mask: Tensor, token_age: Tensor, ages: Sequence[int], *, knows_drift: bool = True
    ) -> dict[str, Metric]:
        """The same by the age of the tokens, in versions; for each age N

            off_policy/abs/age_N        mean |log-ratio| before the update: numerics at age 0, staleness beside it above
            off_policy/k1/age_N, kl/age_N   estimators k1 and k3 of KL(behaviour || proximal), from the same
            off_policy/drift/age_N      mean |log-ratio| of the drift; left out where it is among what is unattributed

        `token_age` `[rows, len]` integer; `ages` are those of the step's trained tokens, so that each has tokens. Ages from
        `LARGEST_AGE_SHOWN` on are counted together under it; those below 0, of recordings of another run, under none.
        """
        found: dict[str, Metric] = {}
        before = (self.numerics + self.staleness + self.unattributed).double()
        clamped = before.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        values = {"abs": before.abs(), "k1": -before, "kl": DIVERGENCES["k3"](clamped)}
        if knows_drift:
            values["drift"] = self.drift.abs()
        shown = token_age.clamp(max=LARGEST_AGE_SHOWN)
        for age in sorted({min(age, LARGEST_AGE_SHOWN) for age in ages if age >= 0}):
            of_age = loss_mask & (shown == age)
            count = later(of_age.sum().double())
            for name, value in values.items():
                found[f"off_policy/{name}/age_{age}"] = Mean(later(masked(value.double(), of_age).sum()), count)
        return found

    def metrics_behind_updates(self, loss_mask: Tensor, token_age: Tensor) -> dict[str, Metric]:
        """`off_policy/in_flight/cache_distance` and `cache_distance_max`: mean and largest size of the numerics of tokens of
        age 0 that stand behind an update within their turn. Where engines keep the keys and values of older weights, that
        is what these make of the log-probability that the model alone gives. Arguments as above; there are such tokens."""
        oldest = turns_of(loss_mask).highest(token_age.double())
        behind = loss_mask & (token_age == 0) & (oldest > 0)
        distance = masked(self.numerics.double().abs(), behind)
        return {
            "off_policy/in_flight/cache_distance": Mean(later(distance.sum()), later(behind.sum().double())),
            "off_policy/in_flight/cache_distance_max": Max(later(distance.max())),
        }


LARGEST_AGE_SHOWN = 16
"""Ages from here on share their metrics, so that a recording of another run does not bring hundreds."""


@torch.no_grad()
def log_ratio_ledger(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    is_stale: Tensor,
    sampler_logprobs: Tensor | None = None,
) -> LogRatioLedger:
    """Split the log-ratio of each trained token into the parts that the module's docstring names.

    `[rows, len]` each, `loss_mask` and `is_stale` bool, the latter for tokens sampled by other weights than the update
    starts from. For tokens that are not stale `old_logprobs` is the trainer's view of the sampling weights. For stale ones
    it is `sampler_logprobs`; without it their part before the update cannot be split and is reported as unattributed.
    Raises BatchError for malformed inputs.
    """
    shape = require_rows("logprobs", logprobs)
    columns = {"logprobs": logprobs, "old_logprobs": old_logprobs, "rollout_logprobs": rollout_logprobs}
    for name, column in columns.items():
        require_float(name, column, shape)
    require_bool("loss_mask", loss_mask, shape)
    require_bool("is_stale", is_stale, shape)
    nothing = torch.zeros_like(old_logprobs)
    drift = masked(logprobs - old_logprobs, loss_mask)
    if sampler_logprobs is None:
        before = masked(old_logprobs - rollout_logprobs, loss_mask)
        return LogRatioLedger(
            numerics=torch.where(is_stale, nothing, before),
            staleness=nothing,
            drift=drift,
            unattributed=torch.where(is_stale, before, nothing),
        )
    require_float("sampler_logprobs", sampler_logprobs, shape)
    sampler = torch.where(is_stale, sampler_logprobs, old_logprobs)
    return LogRatioLedger(
        numerics=masked(sampler - rollout_logprobs, loss_mask),
        staleness=masked(old_logprobs - sampler, loss_mask),
        drift=drift,
        unattributed=nothing,
    )


DIVERGENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: log_ratio,
    "k2": lambda log_ratio: 0.5 * log_ratio.square(),
    "k3": lambda log_ratio: torch.expm1(log_ratio) - log_ratio,
}
"""Of `log_ratio = old_logprob - rollout_logprob`: estimators of KL(rollout || policy) up to the sign of k1."""


@torch.no_grad()
def rejected(log_ratio: Tensor, sequences: Turns, criteria: Mapping[str, Any]) -> Tensor:
    """Return `[rows, len]` bool: tokens that any of the criteria leaves out.

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


def _log_bounds(bound: Any, dtype: torch.dtype) -> tuple[float, float]:
    """Return the bounds of the log-ratio; one at 0 moves to where rounding ends, since ratios of one policy to itself
    lie around 1.
    """
    low, high = (math.log(value) for value in bound)
    rounding = logprob_rounding(dtype)
    return min(low, -rounding) if abs(low) < rounding else low, max(high, rounding) if abs(high) < rounding else high
