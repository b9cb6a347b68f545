"""Estimators of KL(policy || reference) from the tokens that the policy sampled.

With `d = logprobs - ref_logprobs` (Schulman, "Approximating KL Divergence", 2020, joschu.net/blog/kl-approx.html):
k1 = d, unbiased, high variance, may be negative; k2 = d^2 / 2, biased, low variance, its gradient is that of the KL on
samples of the current policy; k3 = exp(-d) - 1 + d, unbiased and never negative; abs = |d|, a distance, no estimator.

In the first update after scoring, and while the reference still equals the policy, each d is rounding noise. A slope that
jumps there would take its sign from that noise, so every such jump lies `logprob_rounding` away from 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_train.batch import require_bool, require_float
from skyrl_train.parts import KL_ESTIMATORS
from skyrl_train.registry import PartSpec, part_name

__all__ = ["KL_ESTIMATORS", "absolute_value", "logprob_rounding", "token_kl", "unbiased_kl"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before `exp`, so that one absurd token gives a large number and not infinity."""


_LOGPROB_ROUNDING = {torch.float64: 1e-11, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
"""By the type in which the model computes: the largest difference found between layouts of the same tokens, rounded up
generously (3e-14 in float64, 2e-6 in float32 for models of two layers, 3e-5 in float32 between engine and trainer, 0.04 in
bfloat16; float16 has eight times the precision of bfloat16)."""


def logprob_rounding(dtype: torch.dtype) -> float:
    """Return how far apart two evaluations of one token's log-probability may be when the model computes in `dtype`."""
    return _LOGPROB_ROUNDING[dtype]


def absolute_value(difference: Tensor, compute_dtype: torch.dtype | None = None) -> Tensor:
    """Return `|difference|` of two log-probabilities, whose slope is 0 where the difference is rounding, else +-1.

    The value is exact everywhere. `compute_dtype` is the type in which the model computed them; None: their own type.
    """
    size = difference.abs()
    flat = size.detach() <= logprob_rounding(compute_dtype or difference.dtype)
    return torch.where(flat, size.detach(), size)


# An estimator takes `logprobs, ref_logprobs` of one shape (any) and returns that shape, with the gradient through both.
# Mask before calling (`token_kl` does): a NaN that is masked afterwards still reaches the gradient.


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return `d`, the estimator k1."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return `d^2 / 2`, the estimator k2."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return `exp(-d) - 1 + d`, the estimator k3, as `expm1` so that small distances keep their digits."""
    difference = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(difference) - difference


def absolute(logprobs: Tensor, ref_logprobs: Tensor, compute_dtype: torch.dtype | None = None) -> Tensor:
    """`|d|`, flat at 0 as `absolute_value` is."""
    return absolute_value(logprobs - ref_logprobs, compute_dtype)


def unbiased_kl(token_kls: Tensor, logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """`ratio * KL` per token, `ratio = exp(logprob - old_logprob)`, with the gradient through both; all of one shape.

    Tokens that the old policy sampled, weighed to be the policy's: with k3 an unbiased estimate of KL(policy || reference)
    whose gradient is unbiased too, also where the ratio is 1. DeepSeek-V3.2, arXiv:2512.02556, section 3.1.
    """
    zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    log_ratio = torch.where(mask, logprobs - old_logprobs, zero).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.exp() * token_kls


def token_kl(
    estimator: PartSpec,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return what the estimator says of the tokens of `mask` (bool), exactly 0 elsewhere; all of one shape.

    `compute_dtype` is the type in which the model computed the log-probabilities; None: the type that they have.
    Raises BatchError for other shapes or dtypes, also of what a custom estimator returns.
    """
    require_float("logprobs", logprobs, logprobs.shape)
    require_float("ref_logprobs", ref_logprobs, logprobs.shape)
    require_bool("mask", mask, logprobs.shape)
    zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    kept, reference = torch.where(mask, logprobs, zero), torch.where(mask, ref_logprobs.to(logprobs), zero)
    name = KL_ESTIMATORS.name_of(estimator)
    if name == "abs":
        return absolute(kept, reference, compute_dtype)
    found: Tensor = KL_ESTIMATORS.resolve(estimator)(kept, reference)
    if name in KL_ESTIMATORS:
        return found
    require_float(f"the KL from {part_name(estimator)!r}", found, logprobs.shape)
    return torch.where(mask, found, zero)
