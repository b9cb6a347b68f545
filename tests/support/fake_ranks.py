"""One process that takes itself for a rank of several, whose collectives reach nobody."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def as_rank(rank: int, num_ranks: int) -> Iterator[DeviceMesh]:
    """Be that rank; gives the mesh of all of them."""
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (num_ranks,))
    finally:
        dist.destroy_process_group()
