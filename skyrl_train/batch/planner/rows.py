"""The one planner: which rows go into one forward.

    plan(rows: RowFacts, **arguments) -> list[Forward]

What a plan is made of. `RowFacts` is what may be known of rows without their tokens: lengths, common first tokens,
prompts, trajectories, and the limits of one forward. One object serves a run, which reads it from a batch (`facts_of`);
dealing rows to ranks, which cuts it in shares (`RowFacts.take`, `batch/planner/balance.py`); and a dry run, which draws
it from lengths. A planner is a pure function of it, in numpy. The bundled ones are `fixed` and `token_budget`
(`batch/planner/forwards.py`); anyone's own has the same signature. Documents only count (`batch/planner/documents.py`).
First tokens are compared in one place (`batch/layouts/prefix_tree.py`), and costs are predicted by one model
(`batch/layouts/cost.py`).

A planner decides about speed and memory, never about the gradient. One that declares `@reads("memory_budget")` is treated
as `auto` is: the model is probed before the first step, `RowFacts.budget` is what was found to fit, and after an
out-of-memory the planner is called again with a smaller one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray

from skyrl_train.batch.batch_metadata import DUMMY_ROW_LENGTH, Rows
from skyrl_train.batch.layouts.cost import CostModel
from skyrl_train.batch.layouts.prefix_tree import hosts_of, least_between, prefix_order, sharing_keys
from skyrl_train.config.fields import LayoutChoice, LayoutName
from skyrl_train.errors import BatchError, counted

if TYPE_CHECKING:
    from skyrl_train.batch.training_batch import TrainingInputBatch

NO_LIMIT = 1 << 40
"""Rows or positions: more than any batch has."""


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
    layout: LayoutChoice = "padded"
    """`trainer.layout`, or what the model supports in its place. Only with `auto` may a forward name another."""
    training: bool = True
    """False for a forward without backward."""
    budget: int = NO_LIMIT
    """The most token positions of one forward of several rows: for a planner that reads `memory_budget` what was found
    to fit the memory; else `trainer.max_tokens_per_microbatch`, without backward
    `trainer.max_tokens_per_forward_microbatch`."""
    column_share: float = 0.0
    """What losses hold for a token of `[rows, longest]` that is not computed, as a share of a computed position."""
    max_rows: int = NO_LIMIT
    """`trainer.micro_train_batch_size_per_gpu`, without backward `trainer.micro_forward_batch_size_per_gpu`: for planners
    that count rows."""
    cost: CostModel = field(default_factory=CostModel)
    """What a forward costs on this model and device."""

    @property
    def num_rows(self) -> int:
        """How many rows this rank computes."""
        return len(self.lengths)

    @property
    def default_layout(self) -> LayoutName:
        """Of a forward that names none."""
        return "prefix_shared" if self.layout == "auto" else self.layout

    @property
    def num_distinct(self) -> int:
        """Positions of one forward of all rows that pads nothing."""
        return self.positions(np.arange(self.num_rows), "packed" if self.layout == "padded" else None)

    def positions(self, rows: Sequence[int] | Rows, layout: LayoutName | None = None) -> int:
        """Token positions that one forward of `rows` computes, padding included and common first tokens once.

        Without a `layout` it is that of the rows, `prefix_shared` for `auto`.
        """
        if len(rows) == 0:
            return 0
        return int(self.sizes([np.asarray(rows, dtype=np.int64)], layout).positions[0])

    def fits(self, rows: Sequence[int] | Rows, layout: LayoutName | None = None) -> bool:
        """Whether a forward of `rows` keeps within the budget. A single row always does: nothing can be cut smaller."""
        if len(rows) <= 1:
            return True
        chosen = np.asarray(rows, dtype=np.int64)
        positions = self.positions(chosen, layout)
        if (layout or self.default_layout) == "padded" or not self.column_share:
            return positions <= self.budget
        # Losses pad their columns to rows times the longest, whatever the model computes: one long row with many short ones
        # may hold more memory there than in the model.
        padded = len(chosen) * int(self.lengths[chosen].max())
        return padded <= self.budget or positions + self.column_share * max(0, padded - positions) <= self.budget

    def sizes(self, parts: Sequence[Rows], layout: LayoutName | None = None) -> ForwardSizes:
        """What forwards of `parts` compute; each part holds at least one row."""
        counts = np.array([len(part) for part in parts], dtype=np.int64)
        rows, forward = np.concatenate(parts), np.repeat(np.arange(len(parts)), counts)
        name = layout or self.default_layout
        if name == "prefix_shared":
            return self._tree_sizes(rows, forward)
        # Of the rows that share a host, the longest one that is there computes the others.
        # The last key counts first: by forward, then by host, then by length.
        by_host = np.lexsort((self.lengths[rows], self.hosts[rows], forward))
        rows, forward = rows[by_host], forward[by_host]
        is_longest = (np.diff(self.hosts[rows], append=-1) != 0) | (np.diff(forward, append=-1) != 0)
        lengths, forward = self.lengths[rows[is_longest]], forward[is_longest]
        begins = np.flatnonzero(np.diff(forward, prepend=-1))
        computed = np.diff(begins, append=len(lengths))
        # A token attends to itself and to all before it: n (n + 1) / 2 pairs of a row, padding included where it is one.
        if name == "padded":
            longest = np.maximum.reduceat(lengths, begins)
            return ForwardSizes(computed * longest, computed * longest * (longest + 1) / 2, np.ones_like(computed))
        pairs = np.add.reduceat(lengths * (lengths + 1) / 2, begins)
        return ForwardSizes(np.add.reduceat(lengths, begins), pairs, computed)

    def _tree_sizes(self, rows: Rows, forward: Rows) -> ForwardSizes:
        # In the order of the tree, what a row adds is what it does not share with the row before it in its forward.
        places = self.places_of(rows)
        by_place = np.lexsort((places, forward))
        places, rows, forward = places[by_place], rows[by_place], forward[by_place]
        shared, lengths = self.shared_along(places, forward), self.lengths[rows]
        begins = np.flatnonzero(np.diff(forward, prepend=-1))
        pairs = (lengths * (lengths + 1) - shared * (shared + 1)) / 2
        # A row attends to what it shares and to itself in two calls of the kernel, which are joined.
        calls = 1 + (shared > 0)
        return ForwardSizes(*(np.add.reduceat(each, begins) for each in (lengths - shared, pairs, calls)))

    def shared_along(self, places: Rows, group: Rows) -> Rows:
        """First tokens that the row at each of `places` (of `order`, ascending within a group) has in common with the one
        before it in its group; 0 for the first of a group. Groups lie one after the other."""
        shared = np.zeros(len(places), dtype=np.int64)
        follows = np.flatnonzero(np.diff(group) == 0) + 1
        shared[follows] = least_between(self.shared, places[follows - 1], places[follows])
        return shared

    def places_of(self, rows: Rows) -> Rows:
        """Where each of `rows` is in `order`."""
        return self._place_of_row[rows]

    def take(self, rows: Rows) -> RowFacts:
        """The facts of these rows alone, renumbered in this order; numbers from `num_rows` on are dummy rows."""
        # Dummy rows are told like others, so that a dry run counts what they compute; they share nothing with any row.
        is_real = rows < self.num_rows
        real, num_dummies = rows[is_real], int((~is_real).sum())
        dummies = np.zeros(num_dummies, dtype=np.int64)
        numbers = np.arange(len(rows))
        of_real, of_dummies = numbers[is_real], numbers[~is_real]
        places = self.places_of(real)
        by_place = np.argsort(places)
        # Of the rows that one host computed, the longest that is left computes the others.
        by_host = np.lexsort((self.lengths[real], self.hosts[real]))
        ends = np.flatnonzero(np.diff(self.hosts[real][by_host], append=-1))
        hosts = numbers.copy()
        hosts[of_real[by_host]] = of_real[by_host[ends[np.searchsorted(ends, np.arange(len(real)))]]]

        def column(known: Rows, of_dummies: Rows) -> Rows:
            joined = np.empty(len(rows), dtype=np.int64)
            joined[is_real], joined[~is_real] = known[real], of_dummies
            return joined

        return replace(
            self,
            lengths=column(self.lengths, dummies + DUMMY_ROW_LENGTH),
            loss_tokens=column(self.loss_tokens, dummies),
            # No batch numbers its prompts below 0: every dummy row is a prompt by itself.
            prompts=column(self.prompts, -1 - np.arange(num_dummies)),
            trajectories=column(self.trajectories, -1 - np.arange(num_dummies)),
            order=np.concatenate([of_real[by_place], of_dummies]),
            shared=np.concatenate([self.shared_along(places[by_place], np.zeros_like(real)), dummies]),
            hosts=hosts,
        )

    @cached_property
    def _place_of_row(self) -> Rows:
        places = np.empty(self.num_rows, dtype=np.int64)
        places[self.order] = np.arange(self.num_rows)
        return places


@dataclass(frozen=True)
class ForwardSizes:
    """What forwards compute, `[num_forwards]` each."""

    positions: Rows
    """Token positions, padding included."""
    pairs: NDArray[np.float64]
    """Tokens that attend to one another."""
    calls: Rows
    """Separate attention kernels in a layer."""


@dataclass(frozen=True, eq=False)
class Forward:
    """The rows of one forward."""

    rows: Sequence[int] | Rows
    """Row numbers, at least one."""
    layout: LayoutName | None = None
    """What computes them; None is the layout of the rows."""


Planner = Callable[[RowFacts], list[Forward]]
"""From the facts of a rank's rows to its forwards, each row in exactly one; a planner's own arguments are bound already."""


def facts_of(batch: TrainingInputBatch, *, layout: LayoutChoice, merge_turns: bool) -> RowFacts:
    """The facts of a batch's rows, without limits. Tokens are compared only where `layout` or merged turns ask for it, and
    not where that was done when the rows were made (`RowSharing`)."""
    sharing = getattr(batch.token_columns, "sharing", None)
    if sharing is not None and (sharing.facts.layout, sharing.merge_turns) == (layout, merge_turns):
        known: RowFacts = sharing.facts.take(sharing.rows)
        # What rows share does not change; which of their tokens carry loss may have, since they were made.
        return replace(known, loss_tokens=batch.loss_tokens().numpy())
    bounds = batch.row_offsets.cpu().numpy()
    order, shared = np.arange(batch.num_rows), np.zeros(batch.num_rows, dtype=np.int64)
    if layout in ("prefix_shared", "auto"):
        ids = sharing_keys(batch)
        found = prefix_order([ids[start:stop] for start, stop in pairwise(bounds.tolist())])
        order, shared = np.array(found.rows, dtype=np.int64), np.array(found.shared, dtype=np.int64)
    # Rows that hold several sequences each are no turns of one conversation.
    merges = merge_turns and "position_ids" not in batch
    return RowFacts(
        lengths=np.diff(bounds).astype(np.int64),
        loss_tokens=batch.loss_tokens().cpu().numpy(),
        prompts=batch["prompt_index"].cpu().numpy().astype(np.int64),
        trajectories=batch["trajectory_index"].cpu().numpy().astype(np.int64),
        order=order,
        shared=shared,
        hosts=hosts_of(batch) if merges else np.arange(batch.num_rows),
        layout=layout,
    )


def checked_forwards(plan: Planner, facts: RowFacts, *, name: str, within_budget: bool) -> list[Forward]:
    """The forwards of `plan`, each with int64 rows and a layout; `name` is what the configuration calls it.

    Raises BatchError where a row is not in exactly one of them, a layout cannot be chosen, or, `within_budget`, several
    rows exceed it.
    """
    found: Any = plan(facts)  # someone else's code: what its signature promises is checked, too
    if not isinstance(found, list | tuple) or not all(isinstance(each, Forward) for each in found):
        raise BatchError(f"{name} must return a list of Forward(rows, layout), but returned {found!r:.80}")
    forwards = [Forward(_row_numbers(each.rows, name), _layout(each.layout, facts, name)) for each in found]
    rows = np.concatenate([np.asarray(forward.rows) for forward in forwards] or [np.zeros(0, dtype=np.int64)])
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < facts.num_rows:
        raise BatchError(f"{name} named rows {int(rows.min())} to {int(rows.max())} of {facts.num_rows} rows")
    # A row in no forward would lose its loss, one in two would count twice, and the gradient would show neither.
    times = np.bincount(rows, minlength=facts.num_rows)
    wrong = np.flatnonzero(times != 1)
    if len(wrong):
        row = int(wrong[0])
        raise BatchError(f"{name} put row {row} in {int(times[row])} forwards: every row belongs in exactly one")
    for forward in forwards if within_budget else ():
        if not facts.fits(forward.rows, forward.layout):
            raise BatchError(
                f"{name} put {counted(len(forward.rows), 'row')} with {facts.positions(forward.rows, forward.layout)} "
                f"positions (layout {forward.layout}) in one forward, where {facts.budget} were found to fit the memory. "
                "Take another row only while rows.fits(row_numbers, layout) says so"
            )
    return forwards


def _row_numbers(rows: Sequence[int] | Rows, name: str) -> Rows:
    numbers: NDArray[Any] = np.asarray(rows)
    if numbers.ndim != 1 or len(numbers) == 0:
        raise BatchError(f"{name} made a forward without rows, or not of a list of row numbers: {rows!r:.80}")
    if numbers.dtype.kind not in "iu":
        raise BatchError(f"{name} must name rows by whole numbers; got {numbers.dtype} {rows!r:.80}")
    return numbers.astype(np.int64)


def _layout(layout: LayoutName | None, facts: RowFacts, name: str) -> LayoutName:
    if layout is None or layout == facts.layout:
        return facts.default_layout
    if facts.layout == "auto" and layout in get_args(LayoutName):
        return layout
    raise BatchError(
        f"{name} named the layout {layout!r} where rows have {facts.layout}. A planner chooses among "
        f"{', '.join(get_args(LayoutName))} with trainer.layout=auto alone, of a model that supports all of them"
    )
