"""Pieces of policy losses: masking that keeps junk out of the gradient, log-ratios, means as metrics."""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_train.algorithms.kl import MAX_LOG_RATIO
from skyrl_train.telemetry.metrics import Mean, Metric


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where `mask`, exactly 0 elsewhere, whatever stood there. Before `exp`, so that gradients stay finite."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def log_ratio_of(logprobs: Tensor, base_logprobs: Tensor, mask: Tensor) -> Tensor:
    """`logprobs - base_logprobs` where `mask`, clamped to +-20, 0 elsewhere. Carries the gradient of `logprobs`."""
    return masked(logprobs - base_logprobs, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """`[rows, 1]`: mean over each row's masked tokens, 0 for a row without any."""
    return masked(values, mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


def largest_in_row(values: Tensor, candidates: Tensor, count: Tensor) -> Tensor:
    """`[rows, len]` bool: each row's `count` `[rows, 1]` candidates with the largest values, the earlier on ties."""
    ordering = torch.where(candidates, values, -torch.inf).argsort(dim=1, descending=True, stable=True)
    return candidates & (ordering.argsort(dim=1) < count)


def token_means(mask: Tensor, **columns: Tensor) -> dict[str, Metric]:
    """`policy/NAME`: mean over the masked tokens, with one transfer from the device for all of them."""
    with torch.no_grad():
        totals = [masked(column.detach().double(), mask).sum() for column in columns.values()]
        *sums, weight = torch.stack([*totals, mask.sum().double()]).tolist()
    return {f"policy/{name}": Mean(total, weight) for name, total in zip(columns, sums)}


def ratio_metrics(mask: Tensor, log_ratio: Tensor, **columns: Tensor) -> dict[str, Metric]:
    """Mean ratio and `k3` estimate of KL(old || new) beside the loss's own columns."""
    detached = log_ratio.detach()
    return token_means(mask, ratio=detached.exp(), approx_kl=torch.expm1(detached) - detached, **columns)
