"""One rank's rows as forwards: the bundled planners, filled up to a number of rows or up to a budget of positions, what
a planner is told beside the rows, and the micro-batches that follow. numpy only until there are micro-batches.

Rows whose tokens are computed once for several of them must share a forward to gain from it. So units are dealt out
whole: a host with the rows that it computes, or the rows of one prompt, whose prefixes are neighbours in the order. A unit
is cut, between rows, where it exceeds the limit by itself, or where units that stay whole would leave forwards so empty
that what the cut computes again costs less.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from skyrl_train.batch.batch_metadata import Rows, ranges
from skyrl_train.batch.layouts.cost import CostModel
from skyrl_train.batch.planner.documents import Admits
from skyrl_train.batch.planner.rows import NO_LIMIT, Forward, Planner, RowFacts, checked_forwards, facts_of
from skyrl_train.batch.planner.splits import pieces, split_packed, split_padded, split_rows
from skyrl_train.config import MicroBatchConfig
from skyrl_train.config.fields import LayoutChoice, LayoutName
from skyrl_train.errors import BatchError
from skyrl_train.parts import MICRO_BATCH_STRATEGIES
from skyrl_train.registry import part_name

if TYPE_CHECKING:
    from torch import Tensor

    from skyrl_train.batch.training_batch import TrainingInputBatch

LAYOUT_CHOICES: tuple[LayoutName, ...] = ("padded", "packed", "prefix_shared")
"""What `auto` chooses from; the earlier where costs are equal."""

_WORTH_CUTTING = 1.05
"""Forwards of whole units, over those that their positions would fill: from here on cutting units is tried."""
_GAIN_OVER_LOSS = 2.0
"""How much more, in share, forwards must get fewer than positions get more where units are cut."""


def fixed(rows: RowFacts) -> list[Forward]:
    """At most `rows.max_rows` rows in a forward, those of similar length together, the longest first."""
    return _cheapest(rows, counts_rows=True)


def token_budget(rows: RowFacts) -> list[Forward]:
    """At most `rows.budget` computed positions in a forward, as few forwards as are found, and level ones."""
    forwards = _cheapest(rows, counts_rows=False)
    # A cap of the configuration counts what is computed. Only a budget that was found knows what losses pad beside it.
    if not rows.column_share:
        return forwards
    return [narrow for forward in forwards for narrow in _narrowed(rows, forward)]


def _cheapest(rows: RowFacts, *, counts_rows: bool) -> list[Forward]:
    """The forwards of the layout, or for `auto` of the one whose pass over these rows is predicted to be cheapest."""
    if rows.num_rows == 0:
        return []
    if rows.layout != "auto":
        return _of_layout(rows, rows.layout, counts_rows=counts_rows)
    costs: dict[float, list[Forward]] = {}
    for name in LAYOUT_CHOICES:
        forwards = _of_layout(rows, name, counts_rows=counts_rows)
        sizes = rows.sizes([np.asarray(forward.rows) for forward in forwards], name)
        cost = float(rows.cost.of(sizes.positions, sizes.pairs, sizes.calls, layout=name).sum())
        # Of equal costs the layout that was tried first stays.
        costs.setdefault(cost, forwards)
    return costs[min(costs)]


def _of_layout(rows: RowFacts, layout: LayoutName, *, counts_rows: bool) -> list[Forward]:
    if layout == "prefix_shared":
        parts = _split_tree(rows, counts_rows=counts_rows)
    else:
        parts = _split_hosts(rows, layout, counts_rows=counts_rows)
    return [Forward(part, layout) for part in parts]


def _split_hosts(rows: RowFacts, layout: LayoutName, *, counts_rows: bool) -> list[Rows]:
    """Rows that are computed by themselves, by their lengths; each takes those along that it computes too."""
    hosts, host_of_row, sizes = np.unique(rows.hosts, return_inverse=True, return_counts=True)
    lengths = rows.lengths[hosts]
    if counts_rows:
        parts = split_rows(lengths, rows.max_rows)
    else:
        parts = (split_padded if layout == "padded" else split_packed)(lengths, rows.budget)
    if len(hosts) == rows.num_rows:
        return parts
    # Rows of a host lie together in `by_host`: those of a forward are the runs of its hosts.
    by_host, begins = np.argsort(host_of_row, kind="stable"), np.cumsum(sizes) - sizes
    return [by_host[ranges(begins[part], sizes[part])] for part in parts]


@dataclass(frozen=True)
class _Runs:
    """Runs of neighbours in the order: units, or parts of units, one after the other or not."""

    begins: Rows
    """The place in the order where each begins."""
    ends: Rows
    sizes: Rows
    """What a forward of each alone computes, in rows or in positions."""

    def rows_of(self, rows: RowFacts, forwards: Sequence[Rows]) -> list[Rows]:
        """The row numbers of each forward, in the order, where forwards are given by their runs."""
        counts = np.array([len(forward) for forward in forwards])
        runs, forward = np.concatenate(forwards), np.repeat(np.arange(len(forwards)), counts)
        runs = runs[np.lexsort((self.begins[runs], forward))]
        lengths = self.ends[runs] - self.begins[runs]
        num_rows = np.add.reduceat(lengths, np.cumsum(counts) - counts)
        return pieces(rows.order[ranges(self.begins[runs], lengths)], np.cumsum(num_rows) - num_rows)


def _split_tree(rows: RowFacts, *, counts_rows: bool) -> list[Rows]:
    """Row numbers of each forward where common first tokens are computed once.

    The limit counts the distinct tokens of each unit (or its rows); prefixes that units share with one another are extra.
    """
    if counts_rows:
        ones = np.ones(rows.num_rows, dtype=np.int64)
        units = _units(rows, whole=ones, own=ones, limit=rows.max_rows)
        return units.rows_of(rows, split_packed(units.sizes, rows.max_rows))
    # `whole` is what a row computes where it is the first of a forward, `own` where the row before it is there too.
    whole, limit = rows.lengths[rows.order], rows.budget
    own = whole - rows.shared
    units = _units(rows, whole=whole, own=own, limit=limit)
    together, total = split_packed(units.sizes, limit), int(units.sizes.sum())
    fewest = -(-total // limit)
    # Units of single rows cannot be cut; and where whole units nearly fill their forwards, nothing is to be gained.
    if len(together) > _WORTH_CUTTING * fewest and len(units.begins) < rows.num_rows:
        runs, cut = _Filling(units, whole, own, limit).run(fewest)
        # Fewer forwards save starting kernels and gathering weights; what a cut repeats costs arithmetic.
        growth = int(runs.sizes.sum()) / total - 1
        if len(together) / len(cut) - 1 > _GAIN_OVER_LOSS * growth:
            return runs.rows_of(rows, cut)
    return units.rows_of(rows, together)


def _units(rows: RowFacts, *, whole: Rows, own: Rows, limit: int) -> _Runs:
    """Rows of one prompt that are neighbours; a unit over the limit is cut into the longest runs that keep within it."""
    prompts = rows.prompts[rows.order]
    begins = np.flatnonzero(np.diff(prompts, prepend=prompts[0] - 1))
    before = np.cumsum(own) - own
    ends = np.append(begins[1:], rows.num_rows)

    def size(begin: Rows, end: Rows) -> Rows:
        computed: Rows = np.append(before, before[-1] + own[-1])[end] - before[begin] - own[begin] + whole[begin]
        return computed

    cuts: list[int] = []
    for unit in np.flatnonzero(size(begins, ends) > limit).tolist():
        at, end = int(begins[unit]), int(ends[unit])
        while at < end:
            cuts.append(at)
            # The last place up to which own tokens, after the whole first row, keep within the limit.
            reach = int(before[at] + own[at] - whole[at]) + limit
            at = max(at + 1, min(end, int(np.searchsorted(before + own, reach, side="right"))))
    begins = np.union1d(begins, np.array(cuts, dtype=np.int64))
    ends = np.append(begins[1:], rows.num_rows)
    return _Runs(begins, ends, size(begins, ends))


class _Filling:
    """Units into as few forwards as their sizes allow: whole where one fits, and what is left in parts, each the largest
    that fits anywhere, in the forward that it fills best."""

    def __init__(self, units: _Runs, whole: Rows, own: Rows, limit: int) -> None:
        self._units, self._limit = units, limit
        self._whole, self._shortest = whole.tolist(), int(whole.min())
        self._after: list[int] = np.cumsum(own).tolist()
        self._rooms: list[tuple[int, int]] = []
        """Room and number of each forward that takes another row, ascending: the tightest is found by bisection."""
        self._num_forwards = 0
        self._runs: list[tuple[int, int, int, int]] = []
        """Begin, end, size, and the forward it went to."""

    def run(self, fewest: int) -> tuple[_Runs, list[Rows]]:
        """The runs and those of each forward. No more than `fewest` forwards are begun for whole units, and others only
        for what fits nowhere."""
        begins, ends, sizes = (each.tolist() for each in (self._units.begins, self._units.ends, self._units.sizes))
        to_cut: list[int] = []
        # The largest first, as in packing: a small unit finds room later, a large one does not.
        for unit in np.argsort(-self._units.sizes, kind="stable").tolist():
            fits = bool(self._rooms) and self._rooms[-1][0] >= sizes[unit]
            if fits or self._num_forwards < fewest or sizes[unit] > self._limit:
                self._put(begins[unit], ends[unit], sizes[unit])
            else:
                to_cut.append(unit)
        for unit in to_cut:
            self._put_in_parts(begins[unit], ends[unit])
        begin, end, size, forward = np.array(self._runs, dtype=np.int64).T
        by_forward = np.argsort(forward, kind="stable")
        return _Runs(begin, end, size), pieces(by_forward, np.flatnonzero(np.diff(forward[by_forward], prepend=-1)))

    def _put_in_parts(self, begin: int, end: int) -> None:
        while begin < end:
            # The largest room there is: what does not fit in there begins a forward.
            first, room = self._whole[begin], self._rooms[-1][0] if self._rooms else 0
            if first > room:
                room = self._limit
            # The first row is computed whole, those after it add their own tokens.
            before = self._after[begin] - first
            stop = max(begin + 1, bisect_right(self._after, before + room, begin, end))
            self._put(begin, stop, self._after[stop - 1] - before)
            begin = stop

    def _put(self, begin: int, end: int, size: int) -> None:
        """The run goes where least room is left after it."""
        index = bisect_left(self._rooms, (size, -1))
        if index == len(self._rooms):
            # A row that exceeds the limit by itself has a forward, and fills it.
            room, number = max(size, self._limit), self._num_forwards
            self._num_forwards += 1
        else:
            room, number = self._rooms.pop(index)
        self._runs.append((begin, end, size, number))
        if room - size >= self._shortest:  # else no row fits any more, and the search is shorter without it
            insort(self._rooms, (room - size, number))


def _narrowed(rows: RowFacts, forward: Forward) -> list[Forward]:
    """The forward, halved, long rows from short ones, until what losses pad fits beside what the model computes."""
    numbers = np.asarray(forward.rows)
    if forward.layout == "padded" or rows.fits(numbers, forward.layout):
        return [forward]
    longest_first = numbers[np.argsort(-rows.lengths[numbers], kind="stable")]
    halves = longest_first[: len(numbers) // 2], longest_first[len(numbers) // 2 :]
    return [narrow for half in halves for narrow in _narrowed(rows, replace(forward, rows=half))]


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
    """The rows that one forward computes, and where they stand in the rank's batch."""

    batch: TrainingInputBatch
    rows: Tensor
    """int64: which rows of the rank's batch these are; empty where a dummy row keeps step with other ranks."""
    layout: LayoutName
    """How they lie in the forward: what `auto` left open is decided here."""

    def by_adapter(self) -> MicroBatch:
        """Return it with the rows of each adapter together."""
        # An adapted layer computes each run of one adapter in one product: the fewer runs, the larger they are.
        order = self.batch["adapter_index"].argsort(stable=True)
        return replace(self, batch=self.batch.take(order), rows=self.rows[order])


@dataclass
class MemoryAwareBatchIterator:
    """Cuts batches into micro-batches: by a planner, within budgets that are stated, or that were found to fit the memory
    and may be lowered on the way, on all ranks alike."""

    budgets: TokenBudgets
    _: KW_ONLY
    plan: Planner = token_budget
    name: str = "token_budget"
    """Of the planner, in the configuration."""
    layout: LayoutChoice = "padded"
    merge_turns: bool = False
    max_rows: tuple[int, int] = (NO_LIMIT, NO_LIMIT)
    """In training and in scoring, for planners that count rows."""
    checks_budget: bool = False
    """Whether a planner that exceeds the budget is refused before memory runs out."""
    cost: CostModel = field(default_factory=CostModel)
    is_one_forward: bool = False
    """Whether all rows of a batch make one micro-batch, to measure it."""

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
            # Sharded parameters are gathered within each forward: a rank with fewer of them would leave the others waiting.
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
        # Limits are put in here: facts are those of rows, whatever phase and budget they are planned for.
        facts = replace(
            rows,
            layout=self.layout,
            training=training,
            budget=self.budgets.of(training=training),
            column_share=self.budgets.cell_shares[phase],
            max_rows=self.max_rows[phase],
            cost=self.cost,
        )
        if self.is_one_forward:
            return [Forward(np.arange(rows.num_rows), facts.default_layout)]
        return checked_forwards(self.plan, facts, name=self.name, within_budget=self.checks_budget)

    def lower(self, positions: int, *, training: bool) -> None:
        """From now on at most so many; never more than before, and at least one."""
        lowered = max(1, min(positions, self.budgets.of(training=training)))
        self.budgets = replace(self.budgets, training=lowered) if training else replace(self.budgets, forward=lowered)

    def under(self, budgets: TokenBudgets) -> MemoryAwareBatchIterator:
        """The same within budgets that were found: by someone else's planner, whose answer is checked, or by
        `token_budget`, which keeps within them wherever cutting helps."""
        plan = token_budget if self.plan is fixed else self.plan  # `fixed` knows of no budget
        return replace(self, budgets=budgets, plan=plan, checks_budget=plan is not token_budget, is_one_forward=False)

    def as_one_forward(self) -> MemoryAwareBatchIterator:
        """All rows of a batch in one micro-batch, to measure it; `under` is again what it was."""
        return replace(self, is_one_forward=True)


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
        cost=cost or CostModel(),
    )


def training_limit(trainer_config: MicroBatchConfig) -> Admits:
    """What of (rows, longest row, tokens) fits one micro-batch of training by the stated caps, whatever a planner does:
    steps close by it at `docs_per_step`, and depend on no device."""
    if MICRO_BATCH_STRATEGIES.name_of(trainer_config.micro_batching) == "fixed":
        return lambda num_rows, _longest, _tokens: num_rows <= trainer_config.micro_train_batch_size_per_gpu
    cap, is_padded = trainer_config.max_tokens_per_microbatch, trainer_config.layout not in ("packed", "prefix_shared")
    return lambda num_rows, longest, tokens: num_rows <= 1 or (num_rows * longest if is_padded else tokens) <= cap
