"""Attention over segments on a CPU: the fused kernel of torch, in parts over different keys that are joined.

Two partial results over different keys, each with its log-sum-exp, join exactly: with `l = logaddexp(l1, l2)` the
output is `exp(l1 - l) * o1 + exp(l2 - l) * o2`. The backward of a part is the kernel's own, given the joined output and
log-sum-exp in place of the part's: the probabilities `exp(score - l)` and the row sums of `grad * out` that it forms
from them are those of the whole. No mask is ever built.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skyrl_train.batch.prefix_tree import Segment

_flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

_SHORTEST_RUN = 16
"""Queries, on average. Shorter runs take more calls than they save."""


class Part(NamedTuple):
    """One call of the kernel: queries `[low, high)` over keys `[start, stop)`."""

    low: int
    high: int
    start: int
    stop: int
    causal: bool
    """Over the keys of the same positions; else each query sees each key."""
    joins: bool
    """Other parts came before for these queries."""


@dataclass(frozen=True)
class Parts:
    """All calls of one attention. Parts that do not join hold each query once."""

    calls: tuple[Part, ...]
    whole: bool
    """Whether parts that do not join hold each key once, too."""


def all_parts(segments: Sequence[Segment]) -> Parts:
    """Return each segment over itself, then everything below a segment over it."""
    # Segments partition the positions, so that own parts write each query and each key once, and none needs to be zeroed.
    own = [Part(start, stop, start, stop, True, False) for start, stop, _ in segments]
    below = [Part(stop, end, start, stop, False, True) for start, stop, end in segments if end > stop]
    return Parts((*own, *below), whole=True)


def parts_of_queries(segments: Sequence[Segment], positions: Sequence[int]) -> Parts | None:
    """Return the calls for the queries at `positions` (sorted) alone, which are numbered from 0: each run of neighbours over
    itself and over what its segment has before it, then everything below a segment over it. None where runs are too
    short."""
    own, before, below = list[Part](), list[Part](), list[Part]()
    for start, stop, end in segments:
        # positions are sorted, and everything below a segment is one slice of them
        first, behind, last = (bisect_left(positions, bound) for bound in (start, stop, end))
        for low, high in _runs(positions, first, behind):
            at = positions[low]
            own.append(Part(low, high, at, at + high - low, True, False))
            if at > start:
                before.append(Part(low, high, start, at, False, True))
        if last > behind:
            below.append(Part(behind, last, start, stop, False, True))
    # Each run is a call of the kernel: many short ones take longer than to compute queries that nobody reads.
    if len(positions) < _SHORTEST_RUN * len(own):
        return None
    return Parts((*own, *before, *below), whole=False)


def _runs(positions: Sequence[int], first: int, behind: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of the runs of neighbours among `positions[first:behind]`."""
    low = first
    for index in range(first + 1, behind + 1):
        if index == behind or positions[index] != positions[index - 1] + 1:
            yield low, index
            low = index


def joined_attention(query: Tensor, key: Tensor, value: Tensor, parts: Parts, *, scale: float) -> Tensor:
    """`[rows, heads, queries, size]`, of query `[rows, heads, queries, size]` and key and value
    `[rows, heads or a divisor, positions, size]`; all of one dtype. All rows have the same parts."""
    found: Tensor = _JoinedAttention.apply(query, key, value, parts, scale)  # type: ignore[no-untyped-call]
    return found


class _JoinedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, parts: Parts, scale: float) -> Tensor:
        rows, heads, queries, size = query.shape
        # in the order in which the output projection reads it, so that no copy follows
        out = query.new_empty(rows, queries, heads, size).transpose(1, 2)
        sums = torch.empty(rows, heads, queries, dtype=accumulator(query.dtype), device=query.device)
        for part in parts.calls:
            found, found_sums = _flash(*_slices(query, key, value, part), 0.0, part.causal, scale=scale)
            if part.joins:
                _join(out[:, :, part.low : part.high], sums[:, :, part.low : part.high], found, found_sums)
            else:
                out[:, :, part.low : part.high] = found
                sums[:, :, part.low : part.high] = found_sums
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.parts, ctx.scale = parts, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, sums = ctx.saved_tensors
        by_query, by_key, by_value = (
            torch.empty_like(tensor.transpose(1, 2)).transpose(1, 2) for tensor in (query, key, value)
        )
        # keys that only some queries see are written by several parts, or by none
        if not ctx.parts.whole:
            by_key.zero_()
            by_value.zero_()
        for part in ctx.parts.calls:
            queries, keys = slice(part.low, part.high), slice(part.start, part.stop)
            # given the joined output and sums, the kernel forms the probabilities of the whole, not of the part
            found = _flash_backward(
                grad_out[:, :, queries],
                *_slices(query, key, value, part),
                out[:, :, queries],
                sums[:, :, queries],
                0.0,
                part.causal,
                scale=ctx.scale,
            )
            _put(by_query[:, :, queries], found[0], adds=part.joins)
            _put(by_key[:, :, keys], found[1], adds=part.joins or not ctx.parts.whole)
            _put(by_value[:, :, keys], found[2], adds=part.joins or not ctx.parts.whole)
        return by_query, by_key, by_value, None, None


def _slices(query: Tensor, key: Tensor, value: Tensor, part: Part) -> tuple[Tensor, Tensor, Tensor]:
    keys = slice(part.start, part.stop)
    return query[:, :, part.low : part.high], key[:, :, keys], value[:, :, keys]


def _put(whole: Tensor, part: Tensor, *, adds: bool) -> None:
    if adds:
        whole += part
    else:
        whole.copy_(part)


def _join(out: Tensor, sums: Tensor, part: Tensor, part_sums: Tensor) -> None:
    """Adds a part over other keys to `out` `[1, heads, n, size]` and its log-sum-exps `[1, heads, n]`, in place."""
    joined = torch.logaddexp(sums, part_sums)
    mine, its = ((each - joined).exp_().unsqueeze(-1) for each in (sums, part_sums))
    if out.dtype == joined.dtype:
        out.mul_(mine).addcmul_(part, its)
    else:  # half precision is added up in float32
        out.copy_(out * mine + part * its)
    sums.copy_(joined)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which sums over keys are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32
