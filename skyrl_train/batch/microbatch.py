"""How one rank's rows are cut into forwards. Changes speed and memory, never the gradient.

A strategy sees the rows of one rank and names the rows of each micro-batch. It may cut and order them as it likes;
that every row is in exactly one micro-batch is checked. torch is imported only where tensors appear, so that a plan
can be made without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from skyrl_train.config.schema import TrainerConfig
from skyrl_train.errors import BatchError
from skyrl_train.registry import resolve

if TYPE_CHECKING:
    from torch import Tensor

    from skyrl_train.batch.training_batch import TrainingInputBatch

Rows = NDArray[np.int64]
"""Row numbers."""


class MicroBatchStrategy(Protocol):
    """Cuts rows into micro-batches."""

    def split(self, batch: TrainingInputBatch, *, training: bool) -> list[Tensor]:
        """Row numbers (int64) of each micro-batch, each row in exactly one. `training` is False for a forward alone."""
        ...


@dataclass(frozen=True, kw_only=True)
class FixedRows:
    """At most so many rows in a micro-batch; rows of similar length go together, the longest first."""

    rows_per_train_micro_batch: int
    rows_per_forward_micro_batch: int

    def split(self, batch: TrainingInputBatch, *, training: bool) -> list[Tensor]:
        return _to_tensors(self.split_lengths(lengths_of(batch), training=training))

    def split_lengths(self, lengths: Rows, *, training: bool) -> list[Rows]:
        """As `split`, from the rows' lengths alone."""
        limit = self.rows_per_train_micro_batch if training else self.rows_per_forward_micro_batch
        return fixed_rows(lengths, limit)


def fixed_rows(lengths: Rows, max_rows: int) -> list[Rows]:
    """As few micro-batches of at most `max_rows` rows as there can be, level to within one row, longest rows first."""
    if len(lengths) == 0:
        return []
    order = np.argsort(-lengths, kind="stable")
    return np.array_split(order, -(-len(lengths) // max_rows))


def _make_fixed(trainer: TrainerConfig) -> MicroBatchStrategy:
    return FixedRows(
        rows_per_train_micro_batch=trainer.micro_train_batch_size_per_gpu,
        rows_per_forward_micro_batch=trainer.micro_forward_batch_size_per_gpu,
    )


MICRO_BATCH_STRATEGIES: dict[str, Callable[[TrainerConfig], MicroBatchStrategy]] = {
    "fixed": _make_fixed,
}
"""Each makes a strategy from the `trainer` config, as a `package.module:attr` of your own must."""


def make_micro_batch_strategy(trainer_config: TrainerConfig) -> MicroBatchStrategy:
    """The strategy that `trainer.micro_batching` names. Raises ConfigError for an unknown name."""
    return resolve(trainer_config.micro_batching, MICRO_BATCH_STRATEGIES, field="trainer.micro_batching")(
        trainer_config
    )


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One forward."""

    batch: TrainingInputBatch
    rows: Tensor
    """int64: which rows of the rank's batch these are; empty where a dummy row keeps step with other ranks."""


def micro_batches(
    batch: TrainingInputBatch,
    strategy: MicroBatchStrategy,
    *,
    training: bool,
    agree: Callable[[int], int] = lambda count: count,
) -> Iterator[MicroBatch]:
    """The forwards of one rank's rows, in order.

    `agree` turns this rank's number of micro-batches into the number that every rank runs (the largest; a collective
    where there are several ranks). Where it is more, dummy micro-batches of one row without loss follow.
    Raises BatchError where the strategy loses or doubles a row.
    """
    import torch

    parts = checked_split(batch, strategy, training=training)
    count = agree(len(parts))
    if count < len(parts):
        raise BatchError(f"the ranks agreed on {count} micro-batches, but this one has {len(parts)}")
    for rows in parts:
        yield MicroBatch(batch=batch.take(rows), rows=rows)
    for _ in range(count - len(parts)):
        yield MicroBatch(batch=batch.slice(0, 0).pad_rows(1, uid="dummy"), rows=torch.zeros(0, dtype=torch.int64))


def checked_split(batch: TrainingInputBatch, strategy: MicroBatchStrategy, *, training: bool) -> list[Tensor]:
    """`strategy.split`; raises BatchError unless every row is in exactly one micro-batch and none is empty."""
    import torch

    parts = [torch.as_tensor(part, dtype=torch.int64) for part in strategy.split(batch, training=training)]
    rows = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
    name = type(strategy).__name__
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < batch.num_rows:
        raise BatchError(f"{name} named rows {int(rows.min())} to {int(rows.max())} of {batch.num_rows} rows")
    times = torch.bincount(rows, minlength=batch.num_rows)
    wrong = torch.nonzero(times != 1)
    if len(wrong):
        row = int(wrong[0])
        raise BatchError(f"{name} put row {row} in {int(times[row])} micro-batches: every row belongs in exactly one")
    if any(len(part) == 0 for part in parts):
        raise BatchError(f"{name} made an empty micro-batch")
    return parts


def lengths_of(batch: TrainingInputBatch) -> Rows:
    """Tokens of each row, int64 `[num_rows]`."""
    return np.asarray(batch.lengths.cpu().numpy(), dtype=np.int64)


def _to_tensors(parts: list[Rows]) -> list[Tensor]:
    import torch

    return [torch.from_numpy(part) for part in parts]
