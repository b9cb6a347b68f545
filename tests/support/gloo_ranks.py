"""A function on several ranks, each a process of its own, that share a gloo group."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import distributed, multiprocessing

from skyrl_train.distributed import join, leave
from skyrl_train.endpoints import Rendezvous

DEADLINE_S = 300.0
"""Of joining and of each collective. On a busy machine one rank may be a minute behind the other: that is no failure."""
END_S = 900.0
"""Of all of it."""


def on_ranks(
    body: Callable[..., Any], folder: Path, *args: Any, num_ranks: int = 2, deadline_s: float = DEADLINE_S
) -> list[Any]:
    """What `body(rank, folder, *args)` returned on each rank, in order. Fails as soon as one of them does, or where one
    waits for another for longer than `deadline_s`."""
    meeting = folder / f"meeting-{uuid4().hex}"
    # Ranks are forks of a process that imported all this once and has run nothing: a spawned one takes four seconds for it.
    multiprocessing.set_forkserver_preload(["tests.support.sequence_cases", body.__module__])
    context = multiprocessing.start_processes(
        _rank,
        args=(body, folder, args, meeting, num_ranks, deadline_s, dict(os.environ)),
        nprocs=num_ranks,
        join=False,
        start_method="forkserver",
    )
    assert context is not None
    ends = time.monotonic() + END_S
    try:
        while not context.join(timeout=1.0):
            assert time.monotonic() < ends, f"{num_ranks} ranks did not come to an end within {END_S:g} s"
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(_returned(meeting, rank), weights_only=False) for rank in range(num_ranks)]


def _returned(meeting: Path, rank: int) -> Path:
    return meeting.with_suffix(f".rank{rank}")


def _rank(
    rank: int,
    body: Callable[..., Any],
    folder: Path,
    args: tuple[Any, ...],
    meeting: Path,
    num_ranks: int,
    deadline_s: float,
    environment: dict[str, str],
) -> None:
    os.environ.clear()  # the server's is that of the first test that had ranks
    os.environ.update(environment)
    torch.set_num_threads(1)
    join(
        Rendezvous(rank=rank, num_ranks=num_ranks, init_method=f"file://{meeting}", timeout_s=deadline_s),
        torch.device("cpu"),
    )
    try:
        torch.save(body(rank, folder, *args), _returned(meeting, rank))
        # A rank that leaves closes its connections, over which another may still be receiving.
        distributed.barrier()
    finally:
        leave()
    # Gloo's own thread may still be releasing tensors of the last collective, for which it takes Python's lock: in an
    # interpreter that is being torn down that aborts the process.
    os._exit(0)
