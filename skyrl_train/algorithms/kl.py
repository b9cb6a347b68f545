"""Estimators of KL(policy || reference) from the tokens that the policy sampled.

With `d = logprobs - ref_logprobs` (Schulman, "Approximating KL Divergence", 2020, joschu.net/blog/kl-approx.html):
k1 = d, unbiased, high variance, may be negative; k2 = d^2 / 2, biased, low variance, its gradient is that of the KL on
samples of the current policy; k3 = exp(-d) - 1 + d, unbiased and never negative; abs = |d|, a distance, no estimator.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from skyrl_train.algorithms.checks import require_bool, require_float

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before `exp`, so that one absurd token gives a large number and not infinity."""


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """`d`."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """`d^2 / 2`."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """`exp(-d) - 1 + d`, as `expm1` so that small distances keep their digits."""
    difference = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(difference) - difference


def absolute(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """`|d|`."""
    return (logprobs - ref_logprobs).abs()


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}
"""Each takes `logprobs, ref_logprobs` of one shape (any) and returns that shape, with the gradient through both.
Mask before calling (`token_kl` does): a NaN that is masked afterwards still reaches the gradient."""


def token_kl(name: str, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The named estimator at the tokens of `mask` (bool), exactly 0 elsewhere; all of one shape.

    Raises BatchError for other shapes or dtypes.
    """
    require_float("logprobs", logprobs, logprobs.shape)
    require_float("ref_logprobs", ref_logprobs, logprobs.shape)
    require_bool("mask", mask, logprobs.shape)
    zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    return KL_ESTIMATORS[name](torch.where(mask, logprobs, zero), torch.where(mask, ref_logprobs.to(logprobs), zero))
