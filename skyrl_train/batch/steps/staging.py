"""A mini-batch to data-parallel ranks and back: equal work for each, what shares computation together, results put back
in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from skyrl_train.batch.boundaries import token_positions
from skyrl_train.batch.layouts.cost import CostModel
from skyrl_train.batch.planner.balance import shard_rows
from skyrl_train.batch.planner.rows import facts_of
from skyrl_train.batch.training_batch import TrainingInputBatch
from skyrl_train.config.fields import LayoutChoice
from skyrl_train.errors import BatchError, counted

Together = Literal["row", "trajectory", "prompt"]
"""The largest unit within which rows share computation."""


def computed_together(layout: LayoutChoice, *, merge_turns: bool) -> Together:
    """The unit that a layout shares computation within."""
    if layout in ("prefix_shared", "auto"):
        return "prompt"
    return "trajectory" if merge_turns else "row"


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
        """Rows without loss that were added."""
        return len(self.order) - self.num_rows

    def collect(self, results: Sequence[Tensor]) -> Tensor:
        """`[num_tokens, ...]` in the batch's own order, without dummy rows, from each rank's `[tokens of its shard, ...]`.

        Raises BatchError naming a rank whose result does not fit its shard.
        """
        if len(results) != len(self.shards):
            raise BatchError(f"{counted(len(results), 'result')} for {counted(len(self.shards), 'rank')}")
        for rank, (result, shard) in enumerate(zip(results, self.shards)):
            if tuple(result.shape) != (shard.num_tokens, *results[0].shape[1:]):
                raise BatchError(f"rank {rank} returned {tuple(result.shape)} for a shard of {shard.num_tokens} tokens")
        return restore_rows(torch.cat(list(results)), self.order, self.row_offsets)[: self.num_tokens]


def stage(
    batch: TrainingInputBatch, dp_size: int, *, cost: CostModel | None = None, together: Together = "row"
) -> StagedBatch:
    """Shards the rows of `batch`, with dummy rows where ranks need them.

    Rows within one `together` unit share computation: units stay whole where ranks then have equal work, and what a row
    costs is what it adds. Where no rows share, each rank gets as many rows as the others.

    A closed mini-batch keeps its `loss_weights`, so that its shards' losses add up to its own. Works with fewer rows
    than ranks, and gives each of them at least one row. Raises BatchError for an empty batch.
    """
    return stage_chunks(batch, [(0, batch.num_rows)], dp_size, cost=cost, together=together)[0]


def stage_chunks(
    batch: TrainingInputBatch,
    mini_batch_boundaries: Sequence[tuple[int, int]],
    dp_size: int,
    *,
    cost: CostModel | None = None,
    together: Together = "row",
) -> list[StagedBatch]:
    """`stage` for each `[start, stop)` range of rows: every mini-batch is padded and sharded on its own."""
    parts = (batch.slice(start, stop) for start, stop in mini_batch_boundaries)
    return [_staged(part, dp_size, cost or CostModel(), together) for part in parts]


def _staged(batch: TrainingInputBatch, dp_size: int, cost: CostModel, together: Together) -> StagedBatch:
    if batch.num_rows == 0:
        raise BatchError("no rows to shard")
    if "position_ids" in batch or dp_size == 1:
        together = "row"  # rows that hold several sequences share nothing; one rank has all rows in any case
    layout: LayoutChoice = "prefix_shared" if together == "prompt" else "packed"
    facts = facts_of(batch, layout=layout, merge_turns=together == "trajectory")
    dealt, _ = shard_rows(facts, dp_size, cost)
    padded = batch.pad_rows(sum(map(len, dealt)) - batch.num_rows)
    shares = [torch.from_numpy(rows) for rows in dealt]
    return StagedBatch(
        shards=tuple(padded.take(rows) for rows in shares),
        order=torch.cat(shares),
        row_offsets=padded.row_offsets,
        num_rows=batch.num_rows,
        num_tokens=batch.num_tokens,
    )


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
