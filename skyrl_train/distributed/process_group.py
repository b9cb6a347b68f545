"""Joins one process to the group of a model's ranks.

CPU tensors go over gloo, CUDA tensors over NCCL. On one node the ranks meet in a file and gloo listens on loopback;
across nodes they meet at a port of rank 0's node.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from skyrl_train.endpoints import Rendezvous

_INTERFACE = "GLOO_SOCKET_IFNAME"
_PEER_IS_GONE = re.compile(
    r"gloo/transport/"  # reads, writes and waits of gloo, by the file that reports them
    r"|Gloo connectFullMesh failed|The client socket has timed out|Failed to recv, got 0 bytes"
    r"|ncclRemoteError|ncclSystemError|NCCL communicator was aborted|Watchdog caught collective operation timeout"
)
_is_on_one_node = False
"""Of the default group."""


def join(rendezvous: Rendezvous, device: torch.device) -> None:
    """Makes this process a rank. Raises what torch raises where the others do not come within `timeout_s`."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    global _is_on_one_node
    _is_on_one_node = rendezvous.single_node
    with as_default_group():
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "cpu:gloo",
            init_method=rendezvous.init_method,
            rank=rendezvous.rank,
            world_size=rendezvous.num_ranks,
            timeout=timedelta(seconds=rendezvous.timeout_s),
        )


@contextmanager
def as_default_group() -> Iterator[None]:
    """Groups of this process's fellow ranks that are made within listen on loopback where all ranks are on one node,
    unless the user's environment names a network interface. That is forgotten afterwards: later groups, such as one with
    engines, may reach other nodes."""
    if not _is_on_one_node or _INTERFACE in os.environ:
        yield
        return
    os.environ[_INTERFACE] = "lo"
    try:
        yield
    finally:
        os.environ.pop(_INTERFACE, None)


def open_store(rendezvous: Rendezvous) -> Any:
    """Return what all of a rendezvous find each other by, for one group of them or for several."""
    timeout = timedelta(seconds=rendezvous.timeout_s)
    torch_c10d: Any = dist
    if rendezvous.single_node:
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
    return store


def backend_in(store: Any, rendezvous: Rendezvous, device: torch.device, *, name: str = "") -> Any:
    """Return a backend (gloo or NCCL, by device) for a group that stands beside the process's default one, which there need
    not be; `name` tells groups in one store apart. Blocks until all whom `rendezvous` counts have come; raises what torch
    raises where they do not within `timeout_s`."""
    torch_c10d: Any = dist
    timeout = timedelta(seconds=rendezvous.timeout_s)
    if name:
        store = torch_c10d.PrefixStore(name, store)
    if device.type == "cuda":
        options = torch_c10d.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return torch_c10d.ProcessGroupNCCL(store, rendezvous.rank, rendezvous.num_ranks, options)
    gloo = torch_c10d.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    # Through options, since an environment variable would reach groups that other threads make meanwhile.
    loopback = rendezvous.single_node and _INTERFACE not in os.environ
    options._devices = [gloo.create_device(interface="lo") if loopback else gloo.create_default_device()]
    return gloo(store, rendezvous.rank, rendezvous.num_ranks, options)


def is_broken_collective(error: RuntimeError) -> bool:
    """Whether a collective failed for what became of another rank, or of the way to it: gloo says so in a RuntimeError
    alone, NCCL in one of its own with many other meanings."""
    return bool(_PEER_IS_GONE.search(str(error)))


def leave() -> None:
    """Leave the default process group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()
