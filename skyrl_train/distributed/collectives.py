"""What all ranks of a model do together outside of its passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from skyrl_train.distributed.mesh import by_mesh

T = TypeVar("T")

_BUCKET_BYTES = 64 * 2**20
"""Gradients that are summed in one collective."""


def full(tensor: Tensor) -> Tensor:
    """Return the whole tensor, gathered from the ranks that it is divided over."""
    divided: Any = tensor
    return divided.full_tensor() if is_divided(tensor) else tensor


def is_divided(tensor: Tensor) -> bool:
    """Return whether ranks hold parts of the tensor."""
    return isinstance(tensor, DTensor)


def add_up(gradients: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Sum each gradient over the ranks of `group` (None: all), in place, in buckets of one type."""
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat, op=dist.ReduceOp.SUM, group=group)
        for gradient, part in zip(bucket, torch.split(flat, [gradient.numel() for gradient in bucket])):
            gradient.copy_(part.view_as(gradient))


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of all gradients together, each part counted once, wherever ranks hold it."""
    norms = [full(torch.nn.utils.get_total_norm(each)) for each in by_mesh(gradients)]
    if len(norms) == 1:
        return norms[0]
    # Ranks have added up along several meshes, each in its own order: replicas must not clip by different last bits.
    norm = torch.nn.utils.get_total_norm(norms)
    dist.broadcast(norm, src=0)
    return norm


def of_rank_0(value: T) -> T:
    """Return what rank 0 gave."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def largest(count: int) -> int:
    """Return the largest count of all ranks."""
    value = torch.tensor(count, dtype=torch.int64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return int(value)


def first_reason(reason: str, num_ranks: int) -> str:
    """Return the lowest rank's reason that is not empty, with its rank."""
    if not largest(int(bool(reason))):
        return ""
    reasons: list[str] = [""] * num_ranks
    dist.all_gather_object(reasons, reason)
    return next(f"{found} (rank {rank})" for rank, found in enumerate(reasons) if found)


def _buckets(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    """Neighbours of one type, about `_BUCKET_BYTES` together."""
    buckets: list[list[Tensor]] = []
    size = 0
    for gradient in gradients:
        num_bytes = gradient.numel() * gradient.element_size()
        if not buckets or size + num_bytes > _BUCKET_BYTES or buckets[-1][0].dtype != gradient.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(gradient)
        size += num_bytes
    return buckets
