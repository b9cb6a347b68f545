"""Ranks that compute one micro-batch together, each a part of its positions (Ulysses, arXiv:2309.14509).

Everything in a model but attention works on positions one by one, so that a rank needs its own alone. Attention needs all
positions, but works on heads one by one. Around it, ranks exchange one for the other:

    rank 0: positions 0-3 of heads a b          rank 0: positions 0-7 of head a
    rank 1: positions 4-7 of heads a b   <--->  rank 1: positions 0-7 of head b

Each element is sent once and to one rank, so the gradient goes the same way back. Parameters are whole on each rank or
gathered from all of them; a rank's gradient of them is that of its positions, and the sum over all ranks is the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from math import lcm, prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_train.distributed.process_group import as_default_group
from skyrl_train.errors import ModelError


class SequenceGroup:
    """The ranks that this one computes micro-batches with. Implements `batch.layouts.PositionGroup`.

    With `size` 2, ranks 0 and 1 are a group, 2 and 3 the next: the rows of a mesh (data parallel x sequence parallel)
    whose columns are ranks with other rows.
    """

    def __init__(self, size: int, *, timeout_s: float) -> None:
        """All ranks of the default process group call it; `size` divides their number. `timeout_s`: deadline of each
        exchange."""
        with as_default_group():
            self.process_group, _ = dist.new_subgroups(size, timeout=timedelta(seconds=timeout_s))  # type: ignore[no-untyped-call]
        self.size = size
        self.rank = dist.get_rank(self.process_group)
        self.before_collective: Callable[[], None] = lambda: None
        """Where ranks learn that another left the pass (`distributed/oom_consensus.py`)."""

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange positions for heads, as `PositionGroup` says. Where there are fewer key and value heads than ranks,
        each goes to several of them.

        Raises ModelError where the ranks do not divide the heads.
        """
        heads, kv_heads = query.shape[1], key.shape[1]
        if heads % self.size:
            raise ModelError(f"strategy.sequence_parallel_size={self.size} does not divide {heads} attention heads")
        copies = lcm(kv_heads, self.size) // kv_heads
        if copies > 1:
            key, value = (each.repeat_interleave(copies, dim=1) for each in (key, value))
        exchanged: tuple[Tensor, Tensor, Tensor] = _Exchange.apply(self, True, query, key, value)  # type: ignore[no-untyped-call]
        return exchanged

    def to_positions(self, out: Tensor) -> Tensor:
        """Exchange heads for positions, as `PositionGroup` says."""
        (exchanged,) = _Exchange.apply(self, False, out)  # type: ignore[no-untyped-call]
        found: Tensor = exchanged
        return found

    def combine(self, values: Tensor) -> Tensor:
        """Add the values of the group's ranks, as `PositionGroup` says."""
        combined: Tensor = _Combine.apply(self, values)  # type: ignore[no-untyped-call]
        return combined


class _Exchange(torch.autograd.Function):
    """`_exchange`, whose gradient is exchanged back."""

    @staticmethod
    def forward(ctx: Any, group: SequenceGroup, to_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.to_heads = group, to_heads
        return _exchange(tensors, group, to_heads=to_heads)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_exchange(grads, ctx.group, to_heads=not ctx.to_heads)


class _Combine(torch.autograd.Function):
    """A sum over ranks whose gradient is not: every rank has the whole loss, and sends back the share of what it put in."""

    @staticmethod
    def forward(ctx: Any, group: SequenceGroup, values: Tensor) -> Tensor:  # noqa: ARG004
        combined = values.clone(memory_format=torch.contiguous_format)
        group.before_collective()
        dist.all_reduce(combined, op=dist.ReduceOp.SUM, group=group.process_group)
        return combined

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:  # noqa: ARG004
        return None, grad


def _exchange(tensors: tuple[Tensor, ...], group: SequenceGroup, *, to_heads: bool) -> tuple[Tensor, ...]:
    """`[rows, heads, own positions, size]` to `[rows, own heads, positions, size]` or back; all tensors of one type, in
    one collective."""
    split, join = (1, 2) if to_heads else (2, 1)
    parts = [torch.stack(tensor.chunk(group.size, dim=split)) for tensor in tensors]
    sizes = [prod(part.shape[1:]) for part in parts]
    sent = torch.cat([part.view(group.size, -1) for part in parts], dim=1)
    received = torch.empty_like(sent)
    group.before_collective()
    dist.all_to_all_single(received, sent, group=group.process_group)
    return tuple(
        torch.cat(list(flat.view(part.shape).unbind(0)), dim=join)
        for flat, part in zip(torch.split(received, sizes, dim=1), parts)
    )
