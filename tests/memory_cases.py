"""Memory that runs out where a test wants it to, and learners whose micro-batches size themselves."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing

from skyrl_train.batch.memory_batches import MemoryAwareBatchIterator, TokenBudgets
from skyrl_train.distributed.strategy import ModelStrategy, Replicated, Sharded
from skyrl_train.learner.engine import ModelEngine
from skyrl_train.learner.memory_meter import CountingMeter

DEADLINE_S = 60.0
"""Of each collective: a rank that is left waiting for another fails after so long."""
_END_S = 600.0
"""Of a whole test, on however busy a machine."""
MIB = 1 << 20


class FailingMeter(CountingMeter):
    """Counts allocations, and refuses those of these numbers; the first is 1."""

    def __init__(self, limit_bytes: int = 1 << 40) -> None:
        super().__init__(limit_bytes)
        self.num_allocations = 0
        self.refused: set[int] = set()

    def refuse(self, *numbers: int) -> None:
        """Counts anew."""
        self.num_allocations, self.refused = 0, set(numbers)

    def _require_room(self, num_bytes: int) -> None:
        self.num_allocations += 1
        if self.num_allocations in self.refused:
            raise torch.OutOfMemoryError(f"allocation {self.num_allocations} was refused")
        super()._require_room(num_bytes)


def size_itself(
    engine: ModelEngine, meter: CountingMeter, *, tokens: int, retries: int = 3
) -> MemoryAwareBatchIterator:
    """Micro-batches of at most so many positions, healed."""
    batches = MemoryAwareBatchIterator(
        TokenBudgets(training=tokens, forward=tokens),
        layout=engine.passes.layout,
        merge_turns=engine.passes.merge_turns,
    )
    engine.healing.begin(meter, batches, retries=retries, held=engine.held_tensors)
    return batches


def spread(name: str, dtype: torch.dtype = torch.float64) -> ModelStrategy:
    """Over the ranks of the default group, with sums of gradients in `dtype`."""
    if name == "ddp":
        return Replicated()
    return Sharded(device=torch.device("cpu"), dtype=dtype, cpu_offload=False)


def on_two_ranks(body: Callable[..., None], folder: Path, *args: Any) -> list[Any]:
    """What `body(rank, folder, *args)` saved to `rank{rank}.pt`, run in two processes that share a gloo group.

    Fails where one waits for the other for longer than `DEADLINE_S`.
    """
    context = multiprocessing.start_processes(
        _rank, args=(body, folder, args), nprocs=2, join=False, start_method="spawn"
    )
    assert context is not None
    ends = time.monotonic() + _END_S
    try:
        while not context.join(timeout=1.0):
            assert time.monotonic() < ends, f"two ranks did not come to an end within {_END_S:g} s"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def _rank(rank: int, body: Callable[..., None], folder: Path, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "store"), 2)
    distributed.init_process_group("gloo", rank=rank, world_size=2, store=store, timeout=timedelta(seconds=DEADLINE_S))
    try:
        body(rank, folder, *args)
    finally:
        distributed.destroy_process_group()


def full_weights(engine: ModelEngine) -> Tensor:
    """All parameters in one vector, gathered."""
    full = engine.strategy.full
    return torch.cat([full(parameter.detach()).flatten().clone() for parameter in engine.parameters.values()])
