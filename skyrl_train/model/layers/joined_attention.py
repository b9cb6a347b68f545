"""Attention over segments on a CPU: the fused kernel of torch, in parts over different keys that are joined.

Two partial results over different keys, each with its log-sum-exp, join exactly: with `l = logaddexp(l1, l2)` the
output is `exp(l1 - l) * o1 + exp(l2 - l) * o2`. The backward of a part is the kernel's own, given the joined output and
log-sum-exp in place of the part's: the probabilities `exp(score - l)` and the row sums of `grad * out` that it forms
from them are those of the whole. No mask is ever built.

The kernel's causal form computes the pairs that it does not use as well, of up to 512 keys, which halves its rate. So
positions are cut in halves: the later half over the earlier one is a rectangle, of which each pair is used.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skyrl_train.batch.layouts import Segment
from skyrl_train.model.layers.linear import multiplies_halves
from skyrl_train.model.parallel.tiles import is_traced

_flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

_LONGEST_CAUSAL = 96
"""Queries of a causal call. Of fewer the calls themselves take longer, of more the pairs that are not used do."""

_MOST_CAUSAL = 16
"""Causal calls of a segment, however long it is: then one pair in 16 is computed in vain, and calls stay few."""

_WIDE = 768
"""Queries from which the kernel's backward works on 256 of them at a time: only then is it faster in half precision than in
float32, which fewer are computed in, and all where a processor has no instructions for it."""

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
    own, joining = list[Part](), list[Part]()
    for start, stop, end in segments:
        _cut(start, stop, start, _longest(stop - start), own, joining)
        if end > stop:
            joining.append(Part(stop, end, start, stop, False, True))
    return Parts((*own, *joining), whole=True)


def _longest(queries: int) -> int:
    """Return how many of so many queries one causal call may have; all in a trace, for whose memory the
    cuts make no difference and whose time they do."""
    return queries if is_traced() else max(_LONGEST_CAUSAL, -(-queries // _MOST_CAUSAL))


def _cut(low: int, high: int, start: int, longest: int, own: list[Part], joining: list[Part]) -> None:
    """Append the calls of queries `[low, high)` over the keys of the same positions, the first at `start`: causal
    ones to `own`, rectangles to `joining`."""
    if high - low <= longest:
        own.append(Part(low, high, start, start + high - low, True, False))
        return
    half = (high - low + 1) // 2
    _cut(low, low + half, start, longest, own, joining)
    _cut(low + half, high, start + half, longest, own, joining)
    joining.append(Part(low + half, high, start, start + half, False, True))


def parts_of_queries(segments: Sequence[Segment], positions: Sequence[int]) -> Parts | None:
    """Return the calls for the queries at `positions` (sorted) alone, which are numbered from 0: each run of neighbours over
    itself and over what its segment has before it, then everything below a segment over it. None where runs are too
    short."""
    own, joining, runs = list[Part](), list[Part](), 0
    for start, stop, end in segments:
        # positions are sorted, and everything below a segment is one slice of them
        first, behind, last = (bisect_left(positions, bound) for bound in (start, stop, end))
        for low, high in _runs(positions, first, behind):
            at, runs = positions[low], runs + 1
            _cut(low, high, at, _longest(high - low), own, joining)
            if at > start:
                joining.append(Part(low, high, start, at, False, True))
        if last > behind:
            joining.append(Part(behind, last, start, stop, False, True))
    # Each run is a call of the kernel: many short ones take longer than to compute queries that nobody reads.
    if len(positions) < _SHORTEST_RUN * runs:
        return None
    return Parts((*own, *joining), whole=False)


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
        wide = accumulator(query.dtype)
        q, k, v = (each.to(wide) for each in (query, key, value))
        # in the order in which the output projection reads it, so that no copy follows
        out = q.new_empty(rows, queries, heads, size).transpose(1, 2)
        sums = torch.empty(rows, heads, queries, dtype=wide, device=query.device)
        for part in parts.calls:
            found, found_sums = _flash(*_slices(q, k, v, part), 0.0, part.causal, scale=scale)
            if part.joins:
                _join(out[:, :, part.low : part.high], sums[:, :, part.low : part.high], found, found_sums)
            else:
                out[:, :, part.low : part.high] = found
                sums[:, :, part.low : part.high] = found_sums
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.parts, ctx.scale = parts, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, sums = ctx.saved_tensors
        given = (query, key, value, out, grad_out)
        operands = tuple(each.to(sums.dtype) for each in given)
        by_query, by_key, by_value = (torch.empty_like(each.transpose(1, 2)).transpose(1, 2) for each in operands[:3])
        # keys that only some queries see are written by several parts, or by none
        if not ctx.parts.whole:
            by_key.zero_()
            by_value.zero_()
        for part in ctx.parts.calls:
            queries, keys = slice(part.low, part.high), slice(part.start, part.stop)
            q, k, v, o, by_o = given if part.high - part.low >= _WIDE and multiplies_halves() else operands
            # given the joined output and sums, the kernel forms the probabilities of the whole, not of the part
            found = _flash_backward(
                by_o[:, :, queries],
                *_slices(q, k, v, part),
                o[:, :, queries],
                sums[:, :, queries],
                0.0,
                part.causal,
                scale=ctx.scale,
            )
            _put(by_query[:, :, queries], found[0], adds=part.joins)
            _put(by_key[:, :, keys], found[1], adds=part.joins or not ctx.parts.whole)
            _put(by_value[:, :, keys], found[2], adds=part.joins or not ctx.parts.whole)
        return by_query.to(query.dtype), by_key.to(key.dtype), by_value.to(value.dtype), None, None


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
    out.mul_(mine).addcmul_(part, its)
    sums.copy_(joined)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which sums over keys are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32
