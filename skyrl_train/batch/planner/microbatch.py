"""One rank's rows as forwards: a planner, what it is told beside the rows, and the micro-batches that follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from skyrl_train.batch.layouts.cost import CostModel
from skyrl_train.batch.planner.documents import Admits
from skyrl_train.batch.planner.forwards import fixed, one_forward, token_budget
from skyrl_train.batch.planner.rows import NO_LIMIT, Forward, Planner, RowFacts, checked_forwards, facts_of
from skyrl_train.config import MicroBatchConfig
from skyrl_train.config.fields import LayoutChoice, LayoutName
from skyrl_train.errors import BatchError
from skyrl_train.parts import MICRO_BATCH_STRATEGIES
from skyrl_train.registry import part_name

if TYPE_CHECKING:
    from torch import Tensor

    from skyrl_train.batch.training_batch import TrainingInputBatch


@dataclass(frozen=True, kw_only=True)
class TokenBudgets:
    """The most positions of one micro-batch. A longer row goes alone."""

    training: int
    forward: int
    cell_shares: tuple[float, float] = (0.0, 0.0)
    """In training and in scoring: what a padded position of `[rows, longest]` that the model does not compute takes of
    memory in losses, as a share of a position that it does."""

    def of(self, *, training: bool) -> int:
        """The budget of one phase."""
        return self.training if training else self.forward


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One forward."""

    batch: TrainingInputBatch
    rows: Tensor
    """int64: which rows of the rank's batch these are; empty where a dummy row keeps step with other ranks."""
    layout: LayoutName
    """What computes them."""


class MemoryAwareBatchIterator:
    """Cuts batches into micro-batches: by a planner, within budgets that are stated, or that were found to fit the memory
    and may be lowered on the way, on all ranks alike."""

    def __init__(
        self,
        budgets: TokenBudgets,
        *,
        plan: Planner = token_budget,
        name: str = "token_budget",
        layout: LayoutChoice = "padded",
        merge_turns: bool = False,
        max_rows: tuple[int, int] = (NO_LIMIT, NO_LIMIT),
        checks_budget: bool = False,
        cost: CostModel | None = None,
    ) -> None:
        """`name`: of the planner, in the configuration. `max_rows`: in training and in scoring, for planners that count
        rows. With `checks_budget`, a planner that exceeds the budget is refused before memory runs out."""
        self.budgets = budgets
        self.layout: LayoutChoice = layout
        self.merge_turns = merge_turns
        self._plan = plan
        self._name = name
        self._max_rows = max_rows
        self._checks_budget = checks_budget
        self._is_one_forward = False
        self.cost = cost or CostModel()

    def iterate(
        self,
        batch: TrainingInputBatch,
        *,
        training: bool,
        agree: Callable[[int], int] = lambda count: count,
    ) -> Iterator[MicroBatch]:
        """The forwards of one rank's rows, in order; `training` is False for forwards without backward.

        `agree` turns this rank's number of micro-batches into the number that every rank runs (the largest; a collective
        where there are several ranks). Where it is more, dummy micro-batches of one row without loss follow.
        Raises BatchError where a planner's answer cannot be used (`planner.checked_forwards`).
        """
        import torch

        forwards = self.forwards(batch, training=training)
        count = agree(len(forwards))
        if count < len(forwards):
            raise BatchError(f"the ranks agreed on {count} micro-batches, but this one has {len(forwards)}")
        layout: LayoutName = "prefix_shared" if self.layout == "auto" else self.layout
        for forward in forwards:
            rows, layout = torch.as_tensor(forward.rows), forward.layout or layout
            yield MicroBatch(batch=batch.take(rows), rows=rows, layout=layout)
        for _ in range(count - len(forwards)):
            dummy = batch.slice(0, 0).pad_rows(1, uid="dummy")
            yield MicroBatch(batch=dummy, rows=torch.zeros(0, dtype=torch.int64), layout=layout)

    def forwards(self, batch: TrainingInputBatch, *, training: bool) -> list[Forward]:
        """The planner's forwards of a batch, every row in exactly one. Raises BatchError as `iterate`."""
        if batch.num_rows == 0:
            return []
        facts = facts_of(batch, layout=self.layout, merge_turns=self.merge_turns)
        return self.forwards_of(facts, training=training)

    def forwards_of(self, rows: RowFacts, *, training: bool) -> list[Forward]:
        """The same of rows whose facts are known, as in a dry run."""
        phase = 0 if training else 1
        facts = replace(
            rows,
            layout=self.layout,
            training=training,
            budget=self.budgets.of(training=training),
            column_share=self.budgets.cell_shares[phase],
            max_rows=self._max_rows[phase],
            cost=self.cost,
        )
        if self._is_one_forward:
            return checked_forwards(one_forward, facts, name="one_forward", within_budget=False)
        return checked_forwards(self._plan, facts, name=self._name, within_budget=self._checks_budget)

    def lower(self, positions: int, *, training: bool) -> None:
        """From now on at most so many; never more than before, and at least one."""
        lowered = max(1, min(positions, self.budgets.of(training=training)))
        self.budgets = replace(self.budgets, training=lowered) if training else replace(self.budgets, forward=lowered)

    def under(self, budgets: TokenBudgets) -> MemoryAwareBatchIterator:
        """The same within budgets that were found: by someone else's planner, whose answer is checked, or by
        `token_budget`, which keeps within them wherever cutting helps."""
        found = copy(self)
        if self._plan is fixed:  # knows of no budget
            found._plan = token_budget
        found.budgets, found._checks_budget = budgets, found._plan is not token_budget
        found._is_one_forward = False
        return found

    def as_one_forward(self) -> MemoryAwareBatchIterator:
        """All rows of a batch in one micro-batch, to measure it; `under` is again what it was."""
        measured = copy(self)
        measured._is_one_forward = True
        return measured


def make_micro_batch_strategy(
    trainer_config: MicroBatchConfig, *, merge_turns: bool = False, cost: CostModel | None = None
) -> MemoryAwareBatchIterator:
    """What `trainer.micro_batching` names, under the caps of the configuration.

    With `merge_turns`, turns that extend one another count as the row that computes them, and stay with it. `cost`
    decides which layout is cheapest. Raises ConfigError for an unknown name.
    """
    spec = trainer_config.micro_batching
    return MemoryAwareBatchIterator(
        TokenBudgets(
            training=trainer_config.max_tokens_per_microbatch,
            forward=trainer_config.max_tokens_per_forward_microbatch,
        ),
        plan=MICRO_BATCH_STRATEGIES.resolve(spec),
        name=f"trainer.micro_batching={part_name(spec)}",
        layout=trainer_config.layout,
        merge_turns=merge_turns,
        max_rows=(trainer_config.micro_train_batch_size_per_gpu, trainer_config.micro_forward_batch_size_per_gpu),
        cost=cost,
    )


def training_limit(trainer_config: MicroBatchConfig) -> Admits:
    """What of (rows, longest row, tokens) fits one micro-batch of training by the stated caps, whatever a planner does:
    steps close by it at `docs_per_step`, and depend on no device."""
    if MICRO_BATCH_STRATEGIES.name_of(trainer_config.micro_batching) == "fixed":
        return lambda num_rows, _longest, _tokens: num_rows <= trainer_config.micro_train_batch_size_per_gpu
    cap, is_padded = trainer_config.max_tokens_per_microbatch, trainer_config.layout not in ("packed", "prefix_shared")
    return lambda num_rows, longest, tokens: num_rows <= 1 or (num_rows * longest if is_padded else tokens) <= cap
