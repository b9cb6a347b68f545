"""A mini-batch to data-parallel ranks and back: dealt by work, what shares computation together, restored on collection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from skyrl_train.batch.balance import CostModel, deal_rows
from skyrl_train.batch.deal_groups import deal_groups
from skyrl_train.batch.microbatch import lengths_of
from skyrl_train.batch.sharing import Together, common_prefixes
from skyrl_train.batch.token_budget import DUMMY_ROW_LENGTH, Rows
from skyrl_train.batch.training_batch import TrainingInputBatch, token_positions
from skyrl_train.errors import BatchError


@dataclass(frozen=True, kw_only=True)
class StagedBatch:
    """One shard per rank, with what is needed to put their results back in order."""

    shards: tuple[TrainingInputBatch, ...]
    """By rank; each has at least one row. Equal numbers of rows where no rows share computation, else equal work."""
    order: Tensor
    """int64: the rows of all shards, one after the other, as row numbers of the batch with its dummy rows."""
    row_offsets: Tensor
    """int64, of the batch with its dummy rows."""
    num_rows: int
    """Without dummy rows."""
    num_tokens: int

    @property
    def num_dummy_rows(self) -> int:
        return len(self.order) - self.num_rows

    def collect(self, results: Sequence[Tensor]) -> Tensor:
        """`[num_tokens]` in the batch's own order, without dummy rows, from each rank's flat `[tokens of its shard]`.

        Raises BatchError naming a rank whose result does not fit its shard.
        """
        if len(results) != len(self.shards):
            raise BatchError(f"{len(results)} results for {len(self.shards)} ranks")
        for rank, (result, shard) in enumerate(zip(results, self.shards)):
            if tuple(result.shape) != (shard.num_tokens,):
                raise BatchError(f"rank {rank} returned {tuple(result.shape)} for a shard of {shard.num_tokens} tokens")
        return restore_rows(torch.cat(list(results)), self.order, self.row_offsets)[: self.num_tokens]


def stage(
    batch: TrainingInputBatch, dp_size: int, *, cost: CostModel | None = None, together: Together = "row"
) -> StagedBatch:
    """Deals the rows of `batch` out, with dummy rows where ranks need them.

    Rows within one `together` unit share computation: units stay whole where ranks then have equal work, and what a row
    costs is what it adds. Where no rows share, each rank gets as many rows as the others.

    A closed mini-batch keeps its `loss_weights`, so that its shards' losses add up to its own. Works with fewer rows
    than ranks, and gives each of them at least one row. Raises BatchError for an empty batch.
    """
    if batch.num_rows == 0:
        raise BatchError("no rows to deal out")
    dealt = _deal(batch, dp_size, cost or CostModel(), "row" if "position_ids" in batch else together)
    padded = batch.pad_rows(sum(map(len, dealt)) - batch.num_rows)
    shares = [torch.from_numpy(rows) for rows in dealt]
    return StagedBatch(
        shards=tuple(padded.take(rows) for rows in shares),
        order=torch.cat(shares),
        row_offsets=padded.row_offsets,
        num_rows=batch.num_rows,
        num_tokens=batch.num_tokens,
    )


def _deal(batch: TrainingInputBatch, dp_size: int, cost: CostModel, together: Together) -> list[Rows]:
    """Row numbers of each rank, ascending; those past the end of the batch are dummy rows."""
    if dp_size > 1 and together != "row":
        common = common_prefixes(batch, together)
        if common.shared.any():
            again = cost.of(common.shared)
            places = deal_groups(cost.of(common.lengths) - again, again, common.starts, dp_size).places
            shares = [np.sort(common.rows[each]) for each in places]
            empty = [rank for rank, rows in enumerate(shares) if len(rows) == 0]
            for number, rank in enumerate(empty):
                shares[rank] = np.array([batch.num_rows + number])
            return shares
    dummies = np.full(-batch.num_rows % dp_size, DUMMY_ROW_LENGTH, dtype=np.int64)
    return list(deal_rows(cost.of(np.concatenate([lengths_of(batch), dummies])), dp_size))


def stage_chunks(
    batch: TrainingInputBatch,
    mini_batch_boundaries: Sequence[tuple[int, int]],
    dp_size: int,
    *,
    cost: CostModel | None = None,
    together: Together = "row",
) -> list[StagedBatch]:
    """`stage` for each `[start, stop)` range of rows: every mini-batch is padded and dealt out on its own."""
    parts = (batch.slice(start, stop) for start, stop in mini_batch_boundaries)
    return [stage(part, dp_size, cost=cost, together=together) for part in parts]


def restore_rows(flat: Tensor, order: Tensor, row_offsets: Tensor) -> Tensor:
    """Undoes a reordering: `flat` `[num_tokens]` holds the tokens of rows `order[0]`, `order[1]`, ... of a batch with
    `row_offsets`; returned in the batch's own order. Raises BatchError where `order` is not every row once.
    """
    num_rows = len(row_offsets) - 1
    if len(order) != num_rows or len(torch.unique(order)) != num_rows:
        raise BatchError(
            f"an order of {len(order)} rows ({len(torch.unique(order))} different) for a batch of {num_rows}"
        )
    restored = torch.empty_like(flat)
    restored[token_positions(row_offsets, order)] = flat
    return restored
