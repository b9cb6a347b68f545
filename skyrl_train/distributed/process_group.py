"""Joins one process to the group of a model's ranks.

CPU tensors go over gloo, CUDA tensors over NCCL. On one node the ranks meet in a file and gloo listens on loopback;
across nodes they meet at a port of rank 0's node.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

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


def leave() -> None:
    """Idempotent."""
    if dist.is_initialized():
        dist.destroy_process_group()
