"""The seam of micro-batch planners: which rows go into one forward.

    plan(rows: RowFacts, **arguments) -> list[Forward]

A planner is a pure function of facts in numpy, so the same one serves a run, where facts come from a batch, and a dry
run, where they come from lengths alone. It decides about speed and memory, never about the gradient. A planner that
declares `@reads("memory_budget")` is treated as `auto` is: the model is probed before the first step, `RowFacts.budget`
is what was found to fit, and after an out-of-memory the planner is called again with a smaller one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray

from skyrl_train.batch.token_budget import Rows, TokenBudget
from skyrl_train.config.rules import LayoutChoice, LayoutName
from skyrl_train.errors import BatchError

if TYPE_CHECKING:
    from torch import Tensor

    from skyrl_train.batch.training_batch import TrainingInputBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class RowFacts:
    """What a planner is told of the rows that one rank computes in one pass. All of them carry loss.

    Worked example: two answers to prompt 0 and one to prompt 1, rows `a b c d`, `a b e` and `f g`, with
    `layout=prefix_shared`: `lengths` 4 3 2, `prompts` 0 0 1, `order` 0 1 2, `shared` 0 2 0, `positions([0, 1])` 5.
    """

    lengths: Rows
    """int64 `[num_rows]`: tokens of each row."""
    loss_tokens: Rows
    """int64 `[num_rows]`: how many of them carry loss; in a dry run, which knows no tokens, all but the first."""
    prompts: Rows
    """int64 `[num_rows]`: equal for the rows that answer one prompt."""
    trajectories: Rows
    """int64 `[num_rows]`: equal for the turns of one trajectory that are rows of their own."""
    order: Rows
    """int64 `[num_rows]`: row numbers in an order in which rows with common first tokens are neighbours."""
    shared: Rows
    """int64 `[num_rows]`: first tokens that each row of `order` has in common with the one before it there; 0 unless
    `layout` is `prefix_shared` or `auto`, which alone compute them once."""
    hosts: Rows
    """int64 `[num_rows]`: the row whose forward computes this one too, if both are in it; itself unless a later turn
    goes on from it and `generator.merge_stepwise=auto`."""
    layout: LayoutChoice
    """`trainer.layout`, or what the model supports in its place. Only with `auto` may a forward name another."""
    training: bool
    """False for a forward without backward."""
    budget: int
    """The most token positions of one forward of several rows: for a planner that reads `memory_budget` what was found
    to fit the memory; else `trainer.max_tokens_per_microbatch`, without backward
    `trainer.max_tokens_per_forward_microbatch`."""
    column_share: float = 0.0
    """What losses hold for a token of `[rows, longest]` that is not computed, as a share of a computed position."""

    @property
    def num_rows(self) -> int:
        """Rows of this rank."""
        return len(self.lengths)

    def positions(self, rows: Sequence[int] | Rows, layout: LayoutName | None = None) -> int:
        """Token positions that one forward of `rows` computes, padding included and common first tokens once.

        Without a `layout` it is that of the rows, `prefix_shared` for `auto`.
        """
        chosen = np.asarray(rows, dtype=np.int64)
        if len(chosen) == 0:
            return 0
        name = layout or self.default_layout
        if name == "prefix_shared":
            # What two rows have in common is the least that neighbours between them in the order have in common.
            places = np.sort(self._place_of_row[chosen])
            common = np.minimum.reduceat(self.shared[: places[-1] + 1], places[:-1] + 1) if len(places) > 1 else 0
            return int(self.lengths[chosen].sum() - np.sum(common))
        # Of the rows that share a host, the longest one that is there computes the others.
        by_host = chosen[np.lexsort((self.lengths[chosen], self.hosts[chosen]))]
        is_longest = np.diff(self.hosts[by_host], append=-1) != 0
        computed = self.lengths[by_host[is_longest]]
        return int(len(computed) * computed.max() if name == "padded" else computed.sum())

    def fits(self, rows: Sequence[int] | Rows, layout: LayoutName | None = None) -> bool:
        """Whether a forward of `rows` keeps within the budget. A single row always does: nothing can be cut smaller."""
        chosen = np.asarray(rows, dtype=np.int64)
        if len(chosen) <= 1:
            return True
        positions = self.positions(chosen, layout)
        if (layout or self.default_layout) == "padded" or not self.column_share:
            return positions <= self.budget
        # Losses pad their columns to rows times the longest, whatever the model computes.
        padded = len(chosen) * int(self.lengths[chosen].max())
        return padded <= self.budget or positions + self.column_share * max(0, padded - positions) <= self.budget

    @property
    def default_layout(self) -> LayoutName:
        """Of a forward that names none."""
        return "prefix_shared" if self.layout == "auto" else self.layout

    @cached_property
    def _place_of_row(self) -> Rows:
        places = np.empty(self.num_rows, dtype=np.int64)
        places[self.order] = np.arange(self.num_rows)
        return places


@dataclass(frozen=True, eq=False)
class Forward:
    """The rows of one forward."""

    rows: Sequence[int] | Rows
    """Row numbers, at least one."""
    layout: LayoutName | None = None
    """What computes them; None is the layout of the rows."""


@dataclass(frozen=True, kw_only=True)
class CustomPlanner:
    """A planner where the bundled ones run. Implements MicroBatchStrategy."""

    plan: Callable[[RowFacts], list[Forward]]
    """With its arguments bound."""
    name: str
    """As the configuration names it, for error messages."""
    layout: LayoutChoice
    merge_turns: bool
    stated: TokenBudget
    """The caps of the configuration. By them steps close at a number of documents: a step depends on no device."""
    budgets: tuple[int, int] | None = None
    """Positions in training and in scoring that were found to fit the memory; None: as stated, and not enforced."""
    column_shares: tuple[float, float] = (0.0, 0.0)
    """`RowFacts.column_share` in training and in scoring."""

    def under(self, budgets: tuple[int, int], column_shares: tuple[float, float]) -> CustomPlanner:
        """The same planner within budgets that were found."""
        return replace(self, budgets=budgets, column_shares=column_shares)

    def split(self, batch: TrainingInputBatch, *, training: bool) -> list[Tensor]:
        """Row numbers of each forward."""
        import torch

        return [torch.from_numpy(forward.rows) for forward in self.forwards(batch, training=training)]

    def layout_of(self, batch: TrainingInputBatch, *, training: bool) -> LayoutName:  # noqa: ARG002
        """Of forwards that name none, and of dummy rows."""
        return "prefix_shared" if self.layout == "auto" else self.layout

    def admits(self, num_rows: int, longest: int, num_tokens: int, *, training: bool) -> bool:
        """Whether such rows keep within the stated cap."""
        return self.stated.admits(num_rows, longest, num_tokens, training=training)

    def forwards(self, batch: TrainingInputBatch, *, training: bool) -> list[Forward]:
        """The planner's forwards of a batch, every row in exactly one. Raises BatchError as `forwards_of`."""
        if batch.num_rows == 0:
            return []
        return self.forwards_of(self._facts(batch, training=training))

    def forwards_of(self, facts: RowFacts) -> list[Forward]:
        """The planner's forwards, each with int64 rows and a layout.

        Raises BatchError where a row is not in exactly one of them, a layout cannot be chosen, or several rows exceed a
        budget that was found to fit the memory.
        """
        found: Any = self.plan(facts)
        if not isinstance(found, list | tuple) or not all(isinstance(each, Forward) for each in found):
            raise BatchError(f"{self._subject} must return a list of Forward(rows, layout), but returned {found!r:.80}")
        forwards = [Forward(self._row_numbers(each.rows), self._layout(each.layout, facts)) for each in found]
        self._check_rows(forwards, facts.num_rows)
        if self.budgets is not None:
            for forward in forwards:
                self._check_budget(forward, facts)
        return forwards

    def make_facts(self, *, training: bool, **columns: Rows) -> RowFacts:
        """Facts with the layout and the budget of this planner; `columns` are the arrays of RowFacts."""
        phase = 0 if training else 1
        return RowFacts(
            layout=self.layout,
            training=training,
            budget=self.budgets[phase] if self.budgets else self.stated.cap(training=training),
            column_share=self.column_shares[phase],
            **columns,
        )

    def _facts(self, batch: TrainingInputBatch, *, training: bool) -> RowFacts:
        from skyrl_train.batch.merge import hosts_of
        from skyrl_train.batch.prefix_tree import prefix_order

        bounds = batch.row_offsets.cpu().numpy()
        loss_before = np.concatenate([[0], np.cumsum(batch["loss_mask"].cpu().numpy())])
        order, shared = np.arange(batch.num_rows), np.zeros(batch.num_rows, dtype=np.int64)
        if self.layout in ("prefix_shared", "auto"):
            ids = batch["input_ids"].cpu().numpy()
            sorted_rows = prefix_order([ids[start:stop] for start, stop in pairwise(bounds.tolist())])
            order, shared = (np.array(each, dtype=np.int64) for each in (sorted_rows.rows, sorted_rows.shared))
        merges = self.merge_turns and "position_ids" not in batch
        return self.make_facts(
            training=training,
            lengths=np.diff(bounds).astype(np.int64),
            loss_tokens=np.diff(loss_before[bounds]).astype(np.int64),
            prompts=batch["prompt_index"].cpu().numpy().astype(np.int64),
            trajectories=batch["trajectory_index"].cpu().numpy().astype(np.int64),
            order=order,
            shared=shared,
            hosts=hosts_of(batch) if merges else np.arange(batch.num_rows),
        )

    @property
    def _subject(self) -> str:
        return f"trainer.micro_batching={self.name}"

    def _row_numbers(self, rows: Sequence[int] | Rows) -> Rows:
        numbers: NDArray[Any] = np.asarray(rows)
        if numbers.ndim != 1 or len(numbers) == 0:
            raise BatchError(
                f"{self._subject} made a forward without rows, or not of a list of row numbers: {rows!r:.80}"
            )
        if numbers.dtype.kind not in "iu":
            raise BatchError(f"{self._subject} must name rows by whole numbers; got {numbers.dtype} {rows!r:.80}")
        return numbers.astype(np.int64)

    def _layout(self, layout: LayoutName | None, facts: RowFacts) -> LayoutName:
        if layout is None or layout == facts.layout:
            return facts.default_layout
        if facts.layout == "auto" and layout in get_args(LayoutName):
            return layout
        raise BatchError(
            f"{self._subject} named the layout {layout!r} where rows have {facts.layout}. A planner chooses among "
            f"{', '.join(get_args(LayoutName))} with trainer.layout=auto alone, of a model that supports all of them"
        )

    def _check_rows(self, forwards: list[Forward], num_rows: int) -> None:
        rows = np.concatenate([np.asarray(forward.rows) for forward in forwards] or [np.zeros(0, dtype=np.int64)])
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < num_rows:
            raise BatchError(f"{self._subject} named rows {int(rows.min())} to {int(rows.max())} of {num_rows} rows")
        times = np.bincount(rows, minlength=num_rows)
        wrong = np.flatnonzero(times != 1)
        if len(wrong):
            row = int(wrong[0])
            raise BatchError(
                f"{self._subject} put row {row} in {int(times[row])} forwards: every row belongs in exactly one"
            )

    def _check_budget(self, forward: Forward, facts: RowFacts) -> None:
        if not facts.fits(forward.rows, forward.layout):
            raise BatchError(
                f"{self._subject} put {len(forward.rows)} rows with {facts.positions(forward.rows, forward.layout)} "
                f"positions (layout {forward.layout}) in one forward, where {facts.budget} were found to fit the memory. "
                "Take another row only while rows.fits(row_numbers, layout) says so"
            )
