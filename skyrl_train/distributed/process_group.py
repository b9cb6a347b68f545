"""Joins one process to the group of a model's ranks.

CPU tensors go over gloo, CUDA tensors over NCCL. On one node the ranks meet in a file and gloo listens on loopback;
across nodes they meet at a port of rank 0's node.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the ranks of one model meet."""

    rank: int
    num_ranks: int
    init_method: str
    """`file:///path` of a file that does not exist yet (one node), or `tcp://address:port` of rank 0's node."""
    timeout_s: float
    """Deadline of joining and of each collective."""

    @property
    def single_node(self) -> bool:
        return self.init_method.startswith("file://")


def join(rendezvous: Rendezvous, device: torch.device) -> None:
    """Makes this process a rank. Raises what torch raises where the others do not come within `timeout_s`."""
    if rendezvous.single_node:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "cpu:gloo",
        init_method=rendezvous.init_method,
        rank=rendezvous.rank,
        world_size=rendezvous.num_ranks,
        timeout=timedelta(seconds=rendezvous.timeout_s),
    )


def meet(rendezvous: Rendezvous, device: torch.device) -> Any:
    """A backend (gloo or NCCL, by device) for a group that stands beside the process's default one, which there need not
    be. Blocks until all have come; raises what torch raises where they do not within `timeout_s`."""
    timeout = timedelta(seconds=rendezvous.timeout_s)
    torch_c10d: Any = dist
    if rendezvous.single_node:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = torch_c10d.FileStore(rendezvous.init_method.removeprefix("file://"), rendezvous.num_ranks)
    else:
        host, _, port = rendezvous.init_method.removeprefix("tcp://").rpartition(":")
        store = torch_c10d.TCPStore(
            host,
            int(port),
            rendezvous.num_ranks,
            is_master=rendezvous.rank == 0,
            timeout=timeout,
            wait_for_workers=False,
        )
    store.set_timeout(timeout)
    if device.type == "cuda":
        options = torch_c10d.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return torch_c10d.ProcessGroupNCCL(store, rendezvous.rank, rendezvous.num_ranks, options)
    return torch_c10d.ProcessGroupGloo(store, rendezvous.rank, rendezvous.num_ranks, timeout)


def leave() -> None:
    """Idempotent."""
    if dist.is_initialized():
        dist.destroy_process_group()
