"""Whole tensors from the shards of ranks, many in one collective.

A sharded tensor (DTensor) lies on a mesh of ranks: along some dimensions of the mesh each rank has a part of it, along the
others the same. Parts are put together one dimension of the mesh after the other, in the order in which they were not cut:

    FSDP2                   [Shard(0)]                          one collective
    HSDP                    [Replicate(), Shard(0)]             one, among the ranks of a replica
    FSDP2 over TP           [_StridedShard(0), Shard(0)]        two; FSDP2 cut what tensor parallelism had cut before

All tensors of a call that lie alike share each collective, whatever their types: bytes travel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from skyrl_train.model.parallel import all_gather

_ALIGNMENT = 16


@dataclass
class _Part:
    """What this rank has of a tensor so far."""

    local: Tensor
    whole: tuple[int, ...]
    mesh: Any = None
    steps: tuple[tuple[int, int], ...] = ()
    """(dimension of the mesh, dimension of the tensor) that are still to be put together, the next one first."""

    def size_after_step(self) -> int:
        """Return the size, of the dimension that the next step puts together, once it has."""
        _, dim = self.steps[0]
        size = self.whole[dim]
        for mesh_dim, other in reversed(self.steps[1:]):
            if other == dim:
                size = _chunk_size(size, self.mesh.size(mesh_dim), self.mesh.get_coordinate()[mesh_dim])
        return size


def gather_whole(
    tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype | None], device: torch.device | None = None
) -> list[Tensor]:
    """Return each tensor whole, in its entry of `dtypes` (None: its own), in which it travels.

    Ranks of a mesh call it with the same tensors in the same order. `device` is where the collectives are: shards that
    are kept in host memory are moved there first, and rounded there; None leaves them.
    """
    parts = [_part_of(tensor, dtype, device) for tensor, dtype in zip(tensors, dtypes, strict=True)]
    while True:
        together: dict[tuple[Any, int], list[_Part]] = {}
        for part in parts:
            if part.steps:
                together.setdefault((part.mesh, part.steps[0][0]), []).append(part)
        if not together:
            return [part.local for part in parts]
        for (_, mesh_dim), alike in together.items():
            _put_together(alike, mesh_dim)


def own_box(tensor: Tensor, *, share: int, num_shares: int) -> tuple[Tensor, tuple[int, ...]] | None:
    """Return what this rank is to hand over of a tensor, and where that begins in the whole, so that all ranks together
    hand over each value once; an empty box where others have it. None where what a rank has is not one box, or where that is
    not known to be handed over once.

    A tensor that every rank has whole is handed over by share 0 of it, e.g. by another rank for each tensor.
    """
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return (tensor if share % num_shares == 0 else tensor[:0] if tensor.ndim else tensor.new_empty(0)), (
            0,
        ) * tensor.ndim
    if tensor.device_mesh.size() != num_shares or _strided(tensor.placements):
        return None  # others, in another mesh, have the same; or rows lie apart
    sharded: Tensor = tensor.to_local()
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    coordinates: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
    is_first = all(place.is_shard() or at == 0 for place, at in zip(tensor.placements, coordinates))
    return (sharded if is_first else sharded[:0]), tuple(offset)


def _strided(placements: Sequence[Any]) -> bool:
    return any(type(place).__name__ == "_StridedShard" for place in placements)


def _part_of(tensor: Tensor, dtype: torch.dtype | None, device: torch.device | None) -> _Part:
    part = _Part(tensor.detach(), tuple(tensor.shape))
    if isinstance(tensor, DTensor):
        if any(place.is_partial() for place in tensor.placements):
            raise ValueError("a tensor whose parts have to be added up is no weight")
        sharded: Any = part.local
        part.local, part.mesh, part.steps = sharded.to_local(), tensor.device_mesh, _steps(tensor.placements)
    if device is not None:
        part.local = part.local.to(device, non_blocking=True)
    if dtype is not None:
        part.local = part.local.to(dtype)
    return part


def _steps(placements: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """A tensor was cut along the mesh's dimensions from the first to the last, but by who cut shards again: FSDP2, whose
    dimension of the mesh stands before that of tensor parallelism, says so by a strided placement."""
    cut = [(mesh_dim, place) for mesh_dim, place in enumerate(placements) if not place.is_replicate()]
    strided = [each for each in cut if type(each[1]).__name__ == "_StridedShard"]
    plain = [each for each in cut if each not in strided]
    return tuple((mesh_dim, place.dim) for mesh_dim, place in (*reversed(strided), *reversed(plain)))


def _put_together(parts: Sequence[_Part], mesh_dim: int) -> None:
    """Do the next step of all these parts, in one collective."""
    group = parts[0].mesh.get_group(mesh_dim)
    num_ranks = parts[0].mesh.size(mesh_dim)
    rank = parts[0].mesh.get_coordinate()[mesh_dim]
    places, total = [], 0
    for part in parts:
        largest = list(part.local.shape)
        largest[part.steps[0][1]] = _chunk_size(part.size_after_step(), num_ranks, 0)
        places.append(total)
        total += -(-math.prod(largest) * part.local.element_size() // _ALIGNMENT) * _ALIGNMENT
    received = torch.empty(num_ranks, total, dtype=torch.uint8, device=parts[0].local.device)
    sent = received[rank]
    for part, place in zip(parts, places):
        num_bytes = part.local.numel() * part.local.element_size()
        sent[place : place + num_bytes].view(part.local.dtype).copy_(part.local.reshape(-1))
    all_gather(received.view(-1), sent, group=group)
    for part, place in zip(parts, places):
        (_, dim), *rest = part.steps
        size = part.size_after_step()
        found = []
        for other in range(num_ranks):
            shape = list(part.local.shape)
            shape[dim] = _chunk_size(size, num_ranks, other)
            num_bytes = math.prod(shape) * part.local.element_size()
            found.append(received[other, place : place + num_bytes].view(part.local.dtype).view(shape))
        part.local, part.steps = torch.cat(found, dim=dim), tuple(rest)


def _chunk_size(size: int, num_chunks: int, index: int) -> int:
    """Size of one of `torch.chunk`'s parts, where the last ones may be short or empty."""
    full = -(-size // num_chunks)
    return max(0, min(full, size - index * full))
