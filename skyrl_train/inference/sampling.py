"""One token per row from logits, by inverse transform: a uniform number decides each row, whatever the others do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_train.types import SamplingParams

_BELOW_ONE = 1.0 - 2.0**-40
"""Keeps `uniform * total` below `total`, so that no token of probability zero is chosen."""


@dataclass(frozen=True, kw_only=True)
class SamplingTable:
    """Sampling parameters as columns, one entry per row; None where no row uses the feature."""

    temperatures: Tensor
    """float32 [rows, 1]; 1 for greedy rows."""
    greedy: Tensor | None
    """bool [rows]"""
    top_k: Tensor | None
    """int64 [rows]; the vocabulary size where off."""
    top_p: Tensor | None
    """float64 [rows, 1]"""
    min_p: Tensor | None
    """float32 [rows, 1]"""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], *, vocab_size: int, device: torch.device) -> SamplingTable:
        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        limits = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
        return cls(
            temperatures=column([p.temperature or 1.0 for p in params], torch.float32),
            greedy=torch.tensor([p.temperature == 0 for p in params], device=device)
            if any(p.temperature == 0 for p in params)
            else None,
            top_k=torch.tensor(limits, device=device) if min(limits) < vocab_size else None,
            top_p=column([p.top_p for p in params], torch.float64) if any(p.top_p < 1 for p in params) else None,
            min_p=column([p.min_p for p in params], torch.float32) if any(p.min_p > 0 for p in params) else None,
        )

    def take(self, rows: Tensor) -> SamplingTable:
        """The table of those rows."""

        def select(column: Tensor | None) -> Tensor | None:
            return None if column is None else column[rows]

        return SamplingTable(
            temperatures=self.temperatures[rows],
            greedy=select(self.greedy),
            top_k=select(self.top_k),
            top_p=select(self.top_p),
            min_p=select(self.min_p),
        )


def sample_tokens(logits: Tensor, uniforms: Tensor, table: SamplingTable) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probabilities.

    Truncation keeps, in this order, the `top_k` likeliest tokens, the smallest set of them with `top_p` of their mass,
    and of those the ones with at least `min_p` of the likeliest token's probability.

    Args:
        logits: `[rows, vocab]`, any float type.
        uniforms: float64 `[rows]` in [0, 1).
        table: Sampling parameters of the rows.

    Returns:
        tokens: int64 `[rows]`.
        logprobs: float32 `[rows]`, after temperature and before truncation; at temperature 1 for greedy rows.
    """
    scaled = logits.float() / table.temperatures
    logprobs = scaled.log_softmax(dim=-1)
    probabilities = logprobs.exp()
    if table.top_k is not None or table.top_p is not None or table.min_p is not None:
        probabilities = _truncate(probabilities, table)
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    targets = (uniforms * _BELOW_ONE)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    if table.greedy is not None:
        tokens = torch.where(table.greedy, logprobs.argmax(dim=-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _truncate(probabilities: Tensor, table: SamplingTable) -> Tensor:
    """Zero for each token that the rows' parameters drop; the others as they are (not renormalised)."""
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if table.top_k is not None:
        keep &= torch.arange(ordered.shape[-1], device=ordered.device) < table.top_k[:, None]
    if table.top_p is not None:
        kept = ordered.double() * keep
        mass_before = kept.cumsum(dim=-1) - kept
        keep &= mass_before < table.top_p * kept.sum(dim=-1, keepdim=True)
    if table.min_p is not None:
        keep &= ordered >= table.min_p * ordered[:, :1]
    return torch.zeros_like(probabilities).scatter(1, order, ordered * keep)
