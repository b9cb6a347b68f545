"""How the rows of one rank are cut into forwards: part of `trainer` in either kind of run, and what learners see of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from skyrl_train.config.fields.facts import (
    BatchSize,
    CutsRows,
    LayoutChoice,
    LayoutOnly,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Range,
)
from skyrl_train.parts import MICRO_BATCH_STRATEGIES
from skyrl_train.registry import PartSpec


@dataclass(frozen=True, kw_only=True)
class MicroBatchConfig:
    """The settings of `trainer` that decide what one forward computes."""

    layout: CutsRows[LayoutChoice] = "padded"
    """What one forward computes: rows side by side, back to back, or each shared prefix once; auto predicts the
    cheapest for each step. Changes speed and memory, never the gradient."""
    micro_batching: CutsRows[Annotated[PartSpec, MICRO_BATCH_STRATEGIES]] = "fixed"
    """How rows are cut into forwards: `fixed` rows, `token_budget`, `auto` (sizes itself), or a custom planner, which sizes
    itself too where it declares that it reads `memory_budget`."""
    micro_train_batch_size_per_gpu: CutsRows[BatchSize] = 32
    """Rows per forward and backward on one rank (fixed)."""
    micro_forward_batch_size_per_gpu: LayoutOnly[BatchSize] = 64
    """Rows per forward-only pass on one rank (fixed)."""
    max_tokens_per_microbatch: CutsRows[PositiveInt] = 8192
    """Hard cap on computed token positions of a forward and backward on one rank (token_budget, packed rows of
    supervised training)."""
    max_tokens_per_forward_microbatch: LayoutOnly[PositiveInt] = 16384
    """The same for forward-only passes."""
    max_positions: LayoutOnly[PositiveInt] = 65536
    """Most token positions of a forward and backward on one rank where micro-batches size themselves (auto), however much
    memory there is: beyond, no speed is gained. A forward alone may have twice as many; a longer row goes alone."""
    memory_budget_gb: LayoutOnly[NonNegativeFloat] = 0.0
    """GiB that the models of one process may hold (auto). 0: what the CUDA device has free. Must be given on a CPU,
    where tensors are counted; on CUDA a cap, for a device that others use too."""
    memory_margin: LayoutOnly[Annotated[float, Range(0.0, 0.5)]] = 0.05
    """Share by which a micro-batch may need more than was measured at the start (auto)."""
    memory_probe: LayoutOnly[Literal["measure", "trace", "xla", "both"]] = "measure"
    """Where micro-batches that size themselves (auto) know their memory from. measure: forwards and backwards of growing
    size at the start. trace: torch's own graph of the real step, on tensors without memory; nothing is run. xla:
    what XLA plans for a model of the same sizes in JAX (extra `jax`); nothing is run. both: measured, beginning at what
    was traced, and the difference is told. A plan traces one step of a model and remembers it; xla has it compile."""
    memory_retries: LayoutOnly[NonNegativeInt] = 3
    """How often one mini-batch is cut smaller and recomputed if memory runs out nevertheless (auto)."""

    def most_positions(self, *, training: bool) -> int:
        """Return the most positions of one forward where micro-batches size themselves."""
        return self.max_positions * (1 if training else 2)

    @property
    def sizes_itself(self) -> bool:
        """Whether models are probed for the memory that their passes take: for `auto`, and for a custom planner that
        reads `memory_budget`."""
        return "memory_budget" in MICRO_BATCH_STRATEGIES.reads(self.micro_batching).columns
