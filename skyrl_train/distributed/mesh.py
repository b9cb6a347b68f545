"""Where a rank stands among those of its model: axes, and the process group along each.

    replicate   ranks that hold the same and compute other rows; gradients are summed over them
    shard       ranks that hold parts of each parameter and gather them (FSDP2)
    tensor      ranks that compute the same rows with parts of each matrix (`tensor_parallel.py`); fastest links, one node

A rank's number counts `tensor` fastest, then `shard`, then `replicate`. With 8 ranks, `fsdp_size=2` and
`tensor_parallel_size=2`:

    replicate 0:  shard 0: ranks 0 1    shard 1: ranks 2 3        replicate 1:  shard 0: ranks 4 5    shard 1: ranks 6 7

Ranks along `sequence` and `expert` are neighbours on the axis `shard`, at the same place of the others: parameters outside
of experts are sharded over them like over any others. `same_experts` goes from one group of `expert` to the next: those of
one expert are sharded along it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from skyrl_train.config.models import MeshSizes
from skyrl_train.distributed.process_group import as_default_group

T = TypeVar("T", bound=Tensor)
Axis = Literal["replicate", "shard", "tensor", "sequence", "expert", "same_experts"]


def ranks_along(sizes: MeshSizes, axis: Axis) -> list[list[int]]:
    """Return the ranks of each group along `axis`, in order; every rank is in one of them."""
    grid = torch.arange(sizes.num_ranks).view(sizes.replicate, sizes.shard, sizes.tensor)
    if axis in ("sequence", "expert", "same_experts"):
        size = sizes.sequence if axis == "sequence" else sizes.expert
        lines = grid.view(sizes.replicate, -1, size, sizes.tensor).movedim(1 if axis == "same_experts" else 2, -1)
    else:
        lines = grid.movedim(("replicate", "shard", "tensor").index(axis), -1)
    found: list[list[int]] = lines.flatten(0, -2).tolist()
    return found


def by_mesh(tensors: Iterable[T]) -> list[list[T]]:
    """Return the tensors in groups that are spread over the same mesh, or over none: kernels over many tensors at once take
    no others together."""
    groups: dict[object, list[T]] = {}
    for tensor in tensors:
        groups.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(groups.values())


@dataclass(frozen=True, kw_only=True)
class RankMesh:
    """The axes of this rank's model, whose ranks are those of the default process group.

    All ranks make it, and ask for what they need of it in the same order: each group is made when it is first asked for, by
    all of them.
    """

    sizes: MeshSizes
    device_type: str
    """`cpu` or `cuda`: over what parameters are exchanged."""
    timeout_s: float | None = None
    """Deadline of each collective along an axis; None: that of torch. The group of all ranks has its own."""

    def group(self, axis: Axis) -> dist.ProcessGroup:
        """Return the group along `axis` that this rank is in. A collective of all ranks."""
        return self._groups[axis]

    def index(self, axis: Axis) -> int:
        """Return the place of this rank on `axis`, from 0."""
        return next(line.index(self._rank) for line in ranks_along(self.sizes, axis) if self._rank in line)

    @cached_property
    def parameters(self) -> DeviceMesh:
        """The mesh over which FSDP2 shards: `shard`, or `replicate` x `shard`."""
        names = tuple(name for name in ("replicate", "shard") if name in self._named.mesh_dim_names)  # type: ignore[operator]
        return self._named[names]

    @cached_property
    def tensor(self) -> DeviceMesh:
        """The mesh of the ranks that have parts of the same matrices; there is one where `sizes.tensor` is more than 1."""
        return self._named["tensor"]

    @cached_property
    def experts(self) -> DeviceMesh:
        """The mesh of experts: `same_experts` x `expert`, behind `replicate` where there is one."""
        replicate: list[Axis] = ["replicate"] if self.sizes.replicate > 1 else []
        return self._over([*replicate, "same_experts", "expert"])

    @cached_property
    def _rank(self) -> int:
        return dist.get_rank()

    @cached_property
    def _groups(self) -> _Groups:
        return _Groups(self)

    @cached_property
    def _named(self) -> DeviceMesh:
        """The mesh of all ranks, of which the others are parts."""
        axes = list(self._axes())
        if axes == ["shard"]:
            return init_device_mesh(self.device_type, (self.sizes.shard,), mesh_dim_names=("shard",))
        return self._over(axes)

    def _over(self, axes: list[Axis]) -> DeviceMesh:
        """The mesh of all ranks, which these axes number in their order."""
        shape = [len(ranks_along(self.sizes, axis)[0]) for axis in axes]
        return DeviceMesh.from_group(
            [self.group(axis) for axis in axes],
            self.device_type,
            mesh=torch.arange(self.sizes.num_ranks).view(shape),
            mesh_dim_names=tuple(axes),
        )

    def _axes(self) -> Iterator[Axis]:
        if self.sizes.replicate > 1:
            yield "replicate"
        yield "shard"
        if self.sizes.tensor > 1:
            yield "tensor"


class _Groups(dict[Axis, dist.ProcessGroup]):
    """Process groups by axis, with the run's deadline, which torch's own meshes do not give theirs."""

    def __init__(self, mesh: RankMesh) -> None:
        super().__init__()
        self._mesh = mesh

    def __missing__(self, axis: Axis) -> dist.ProcessGroup:
        lines = ranks_along(self._mesh.sizes, axis)
        found: Any = dist.group.WORLD
        if len(lines) > 1:
            with as_default_group():
                deadline = self._mesh.timeout_s
                timeout = None if deadline is None else timedelta(seconds=deadline)
                found, _ = dist.new_subgroups_by_enumeration(lines, timeout=timeout)  # type: ignore[no-untyped-call]
        self[axis] = found
        return self[axis]
