"""A function on several ranks, each a process of its own, that share a gloo group."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

from skyrl_train.distributed.process_group import Rendezvous, join, leave

DEADLINE_S = 300.0
"""Of joining and of each collective. Ranks import torch and transformers on their way, and on a busy machine one may be
a minute behind the other: that is no failure."""
END_S = 900.0
"""Of all of it."""


def on_two_ranks(body: Callable[..., None], folder: Path, *args: Any) -> None:
    """Runs `body(rank, folder, *args)` as ranks 0 and 1. Fails as soon as one of them does."""
    context = multiprocessing.start_processes(
        _rank, args=(body, folder, args), nprocs=2, join=False, start_method="spawn"
    )
    assert context is not None
    ends = time.monotonic() + END_S
    try:
        while not context.join(timeout=1.0):
            assert time.monotonic() < ends, f"two ranks did not come to an end within {END_S:g} s"
    finally:
        for process in context.processes:
            process.kill()


def _rank(rank: int, body: Callable[..., None], folder: Path, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/{body.__name__}-{'-'.join(map(str, args))}"
    join(Rendezvous(rank=rank, num_ranks=2, init_method=meeting, timeout_s=DEADLINE_S), torch.device("cpu"))
    try:
        body(rank, folder, *args)
        # A rank that leaves closes its connections, over which another may still be receiving.
        distributed.barrier()
    finally:
        leave()
