"""The bundled planners: forwards filled up to a number of rows, or up to a budget of token positions. numpy only.

Rows whose tokens are computed once for several of them must share a forward to gain from it. So units are dealt out
whole: a host with the rows that it computes, or the rows of one prompt, whose prefixes are neighbours in the order. A unit
is cut, between rows, where it exceeds the limit by itself, or where units that stay whole would leave forwards so empty
that what the cut computes again costs less.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from skyrl_train.batch.planner import Forward, RowFacts
from skyrl_train.batch.token_budget import Rows, ranges, split_packed, split_padded, split_rows
from skyrl_train.config.rules import LayoutName

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
    if not rows.column_share:
        return forwards
    return [narrow for forward in forwards for narrow in _narrowed(rows, forward)]


def one_forward(rows: RowFacts) -> list[Forward]:
    """All rows in one forward, to measure it."""
    return [Forward(np.arange(rows.num_rows))]


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
        cost = float(rows.cost.of(sizes.positions, sizes.pairs, sizes.calls).sum())
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
    by_host, begins = np.argsort(host_of_row, kind="stable"), np.cumsum(sizes) - sizes
    return [by_host[ranges(begins[part], sizes[part])] for part in parts]


@dataclass(frozen=True)
class _Units:
    """Runs of places in the order, of one prompt each: what stays together in a forward if it may."""

    begins: Rows
    """Where each unit begins; the next begins where it ends."""
    num_places: int
    sizes: Rows
    """What a forward of each alone computes, in rows or in positions."""

    def places(self, units: Sequence[int] | Rows) -> Rows:
        """The places of these units, in order."""
        chosen = np.sort(np.asarray(units, dtype=np.int64))
        ends = np.append(self.begins[1:], self.num_places)
        return ranges(self.begins[chosen], ends[chosen] - self.begins[chosen])


def _split_tree(rows: RowFacts, *, counts_rows: bool) -> list[Rows]:
    """Row numbers of each forward where common first tokens are computed once.

    The limit counts the distinct tokens of each unit (or its rows); prefixes that units share with one another are extra.
    """
    if counts_rows:
        ones = np.ones(rows.num_rows, dtype=np.int64)
        units = _units(rows, whole=ones, own=ones, limit=rows.max_rows)
        return [rows.order[units.places(part)] for part in split_packed(units.sizes, rows.max_rows)]
    # `whole` is what a row computes where it is the first of a forward, `own` where the row before it is there too.
    whole, limit = rows.lengths[rows.order], rows.budget
    own = whole - rows.shared
    units = _units(rows, whole=whole, own=own, limit=limit)
    together = split_packed(units.sizes, limit)
    fewest = max(1, -(-int(units.sizes.sum()) // limit))
    if len(together) > _WORTH_CUTTING * fewest and len(units.begins) < rows.num_rows:
        cut = _Filling(units, whole, own, limit).run(fewest)
        repeated = sum(int(whole[begin] - own[begin]) for begin in cut.repeats) / int(units.sizes.sum())
        if len(together) / len(cut.bins) - 1 > _GAIN_OVER_LOSS * repeated:
            return [rows.order[np.sort(np.concatenate(bin_))] for bin_ in cut.bins]
    return [rows.order[units.places(part)] for part in together]


def _units(rows: RowFacts, *, whole: Rows, own: Rows, limit: int) -> _Units:
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
    return _Units(begins, rows.num_rows, size(begins, np.append(begins[1:], rows.num_rows)))


class _Filling:
    """Units into as few forwards as their sizes allow: whole where one fits, and what is left in parts, each the largest
    that fits anywhere, in the forward that it fills best."""

    def __init__(self, units: _Units, whole: Rows, own: Rows, limit: int) -> None:
        self._units, self._whole, self._own, self._limit = units, whole, own, limit
        self._after = np.cumsum(own)
        self._rooms: list[tuple[int, int]] = []
        """Room and number of each bin, ascending: the tightest that takes a size is found by bisection."""
        self.bins: list[list[Rows]] = []
        """The places of each forward."""
        self.repeats: list[int] = []
        """Where parts begin that repeat what their unit shares."""

    def run(self, fewest: int) -> _Filling:
        """Opens no more than `fewest` bins for whole units, and others only for what fits nowhere."""
        ends = np.append(self._units.begins[1:], self._units.num_places).tolist()
        begins, sizes = self._units.begins.tolist(), self._units.sizes.tolist()
        to_cut: list[int] = []
        for unit in np.argsort(-self._units.sizes, kind="stable").tolist():
            if (
                (self._rooms and self._rooms[-1][0] >= sizes[unit])
                or len(self.bins) < fewest
                or sizes[unit] > self._limit
            ):
                self._put(begins[unit], ends[unit], sizes[unit])
            else:
                to_cut.append(unit)
        for unit in to_cut:
            self._put_in_parts(begins[unit], ends[unit])
        return self

    def _put_in_parts(self, begin: int, end: int) -> None:
        at = begin
        while at < end:
            first, room = int(self._whole[at]), self._rooms[-1][0] if self._rooms else 0
            if first > room:
                room = self._limit
            # The first row is computed whole, those after it add their own tokens.
            reach = int(self._after[at]) - first + room
            stop = max(at + 1, min(end, int(np.searchsorted(self._after, reach, side="right"))))
            self._put(at, stop, first + int(self._after[stop - 1] - self._after[at]))
            if at > begin:
                self.repeats.append(at)
            at = stop

    def _put(self, begin: int, end: int, size: int) -> None:
        """Places `[begin, end)` go where least room is left after them."""
        index = bisect_left(self._rooms, (size, -1))
        if index == len(self._rooms):
            self.bins.append([])
            room, number = max(size, self._limit), len(self.bins) - 1
        else:
            room, number = self._rooms.pop(index)
        self.bins[number].append(np.arange(begin, end))
        insort(self._rooms, (room - size, number))


def _narrowed(rows: RowFacts, forward: Forward) -> list[Forward]:
    """The forward, halved, long rows from short ones, until what losses pad fits beside what the model computes."""
    numbers = np.asarray(forward.rows)
    if forward.layout == "padded" or rows.fits(numbers, forward.layout):
        return [forward]
    longest_first = numbers[np.argsort(-rows.lengths[numbers], kind="stable")]
    halves = longest_first[: len(numbers) // 2], longest_first[len(numbers) // 2 :]
    return [narrow for half in halves for narrow in _narrowed(rows, replace(forward, rows=half))]
