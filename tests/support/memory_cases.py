"""Memory that runs out where a test wants it to, and learners whose micro-batches size themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_train.batch.planner import MemoryAwareBatchIterator, TokenBudgets
from skyrl_train.distributed import ModelStrategy, Replicated, Sharded
from skyrl_train.learner import ModelEngine
from skyrl_train.learner.memory import CountingMeter

DEADLINE_S = 60.0
"""Of each collective: a rank that is left waiting for another fails after so long."""
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
    """Micro-batches of at most so many positions, retried where memory runs out."""
    batches = MemoryAwareBatchIterator(
        TokenBudgets(training=tokens, forward=tokens),
        layout=engine.passes.layout,
        merge_turns=engine.passes.merge_turns,
    )
    engine.oom_retry.begin(meter, batches, retries=retries, resident=engine.held_tensors)
    return batches


def spread(name: str, dtype: torch.dtype = torch.float64) -> ModelStrategy:
    """Over the ranks of the default group, with sums of gradients in `dtype`."""
    if name == "ddp":
        return Replicated()
    return Sharded(device=torch.device("cpu"), dtype=dtype, cpu_offload=False)


def full_weights(engine: ModelEngine) -> Tensor:
    """All parameters in one vector, gathered."""
    full = engine.strategy.full
    return torch.cat([full(parameter.detach()).flatten().clone() for parameter in engine.parameters.values()])
