"""Ranks that compute micro-batches together (`strategy.sequence_parallel_size`): sizes and rules."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl_train.config.schema import Config
from skyrl_train.errors import Violation

FIELD = "strategy.sequence_parallel_size"


def data_parallel_size(num_ranks: int, sequence_parallel_size: int) -> int:
    """Shares into which rows are dealt: ranks that compute micro-batches together have the same."""
    shares, _ = divmod(num_ranks, sequence_parallel_size)
    return max(1, shares)


def sequence_parallel_violations(config: Config) -> Iterator[Violation]:
    """What does not go with ranks that share micro-batches; that they divide a model's ranks is a rule of batch sizes,
    that they divide its attention heads is found out where it is loaded."""
    size = config.strategy.sequence_parallel_size
    if size == 1:
        return
    if config.strategy.name == "single":
        yield Violation(
            field=FIELD,
            rule="must be 1 with strategy=single, which is one process",
            value=str(size),
            remedy="add strategy=fsdp2 or strategy=ddp, or drop strategy.sequence_parallel_size",
        )
    if config.model.attention != "auto":
        yield Violation(
            field="model.attention",
            rule=f"must be auto with {FIELD}={size}: attention over positions of several ranks has kernels of its own",
            value=repr(config.model.attention),
            remedy=f"drop model.attention, or set {FIELD}=1",
        )
