"""Micro-batches that size themselves: rows packed under the token budgets that were found to fit the memory.

The budgets are positions that a forward computes, one for training and one for scoring (see `memory/fit.py`).
They are the same on all ranks and may be lowered on the way, on all ranks alike.

Losses pad their columns to rows times the longest, whatever the model computes. Where rows are packed, one long row and
many short ones make that the larger of the two, so that each such cell counts as a share of a position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from skyrl_train.batch.microbatch import ByLength, MicroBatch, MicroBatchStrategy, micro_batches
from skyrl_train.batch.planner import CustomPlanner, Forward
from skyrl_train.batch.token_budget import TokenBudget
from skyrl_train.config.rules import LayoutChoice, LayoutName

if TYPE_CHECKING:
    from torch import Tensor

    from skyrl_train.batch.training_batch import TrainingInputBatch


@dataclass(frozen=True, kw_only=True)
class TokenBudgets:
    """The most positions of one micro-batch. A longer row goes alone."""

    training: int
    forward: int
    cell_shares: tuple[float, float] = (0.0, 0.0)
    """In training and in scoring: what a cell of `[rows, longest]` beyond the positions takes of memory, in positions."""

    def of(self, *, training: bool) -> int:
        """Of one phase."""
        return self.training if training else self.forward


class OneForward:
    """All rows in one micro-batch, to measure it. Implements MicroBatchStrategy."""

    def split(self, batch: TrainingInputBatch, *, training: bool) -> list[Tensor]:  # noqa: ARG002
        """One part."""
        import torch

        return [torch.arange(batch.num_rows)]


class MemoryAwareBatchIterator:
    """A micro-batch strategy under budgets that change. Implements MicroBatchStrategy."""

    def __init__(self, budgets: TokenBudgets, *, layout: LayoutChoice = "padded", merge_turns: bool = False) -> None:
        self.budgets = budgets
        self._layout = layout
        self._merge_turns = merge_turns

    def iterate(
        self,
        batch: TrainingInputBatch,
        *,
        training: bool,
        agree: Callable[[int], int] = lambda count: count,
    ) -> Iterator[MicroBatch]:
        """The forwards of one rank's rows, as many as every other rank runs; dummies of one row fill up."""
        return micro_batches(batch, self, training=training, agree=agree)

    def split(self, batch: TrainingInputBatch, *, training: bool) -> list[Tensor]:
        """Row numbers of each micro-batch: as few as the budget allows, then level ones."""
        parts = self._strategy().split(batch, training=training)
        if not self.budgets.cell_shares[0 if training else 1]:
            return parts
        name = self.layout_of(batch, training=training)
        return [piece for part in parts for piece in self._narrow(batch, part, name, training=training)]

    def layout_of(self, batch: TrainingInputBatch, *, training: bool) -> LayoutName:
        """The layout, or for `auto` the one that is predicted to be cheapest under the budget."""
        return self._strategy().layout_of(batch, training=training)

    def lower(self, positions: int, *, training: bool) -> None:
        """From now on at most so many; never more than before, and at least one."""
        lowered = max(1, min(positions, self.budgets.of(training=training)))
        self.budgets = replace(self.budgets, training=lowered) if training else replace(self.budgets, forward=lowered)

    def _narrow(self, batch: TrainingInputBatch, part: Tensor, name: LayoutName, *, training: bool) -> list[Tensor]:
        """The part, halved, long rows from short ones, until cells and positions fit together."""
        lengths = batch.lengths[part]
        cells, budget = len(part) * int(lengths.max()), self.budgets.of(training=training)
        if len(part) == 1 or cells <= budget or name == "padded":
            return [part]
        from skyrl_train.batch.layout import make_layout

        positions = make_layout(batch.take(part), name, merge=self._merge_turns).num_positions
        if positions + self.budgets.cell_shares[0 if training else 1] * max(0, cells - positions) <= budget:
            return [part]
        ordered, middle = part[lengths.argsort(descending=True, stable=True)], len(part) // 2
        halves = ordered[:middle], ordered[middle:]
        return [piece for half in halves for piece in self._narrow(batch, half, name, training=training)]

    def _strategy(self) -> ByLength:
        planner = TokenBudget(
            tokens_per_train_micro_batch=self.budgets.training,
            tokens_per_forward_micro_batch=self.budgets.forward,
            padded=self._layout not in ("packed", "prefix_shared"),
        )
        return ByLength(planner, layout=self._layout, merge_turns=self._merge_turns)


class BudgetedPlanner(MemoryAwareBatchIterator):
    """A custom planner under budgets that change: it is called again with what is left of them."""

    def __init__(self, planner: CustomPlanner, budgets: TokenBudgets) -> None:
        super().__init__(budgets, layout=planner.layout, merge_turns=planner.merge_turns)
        self._planner = planner

    @property
    def planner(self) -> CustomPlanner:
        """The planner under the budgets as they are now."""
        budgets = self.budgets
        return self._planner.under((budgets.training, budgets.forward), budgets.cell_shares)

    def forwards(self, batch: TrainingInputBatch, *, training: bool) -> list[Forward]:
        """As the planner says; raises BatchError where its answer cannot be used."""
        return self.planner.forwards(batch, training=training)

    def split(self, batch: TrainingInputBatch, *, training: bool) -> list[Tensor]:
        """Row numbers of each of its forwards."""
        return self.planner.split(batch, training=training)

    def layout_of(self, batch: TrainingInputBatch, *, training: bool) -> LayoutName:
        """Of forwards that name none."""
        return self.planner.layout_of(batch, training=training)


def under_budgets(
    strategy: MicroBatchStrategy, budgets: TokenBudgets, *, layout: LayoutChoice, merge_turns: bool
) -> MemoryAwareBatchIterator:
    """The micro-batches of a model whose budgets were found: those of its custom `strategy`, or the bundled ones."""
    if isinstance(strategy, BudgetedPlanner):
        strategy = strategy.planner
    if isinstance(strategy, CustomPlanner):
        return BudgetedPlanner(strategy, budgets)
    return MemoryAwareBatchIterator(budgets, layout=layout, merge_turns=merge_turns)
