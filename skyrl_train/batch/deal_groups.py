"""Groups of rows to ranks: whole where that is level, cut where waiting for the busiest rank would cost more. numpy only.

Rows of a group share computation, so a part of it that goes to another rank computes again what its first row shared.
What counts is the work of the busiest rank, for which all others wait: a group is cut exactly where that lowers it, the
repeated work included.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from skyrl_train.batch.balance import MAX_EXCHANGES, CostModel, best_swap, deal_rows
from skyrl_train.batch.sharing import CommonPrefixes
from skyrl_train.batch.token_budget import DUMMY_ROW_LENGTH, Rows

Costs = NDArray[np.float64]

_LEVEL = 1.005
"""A busiest rank this near the mean is level: nothing more is moved or cut."""
_LEVEL_STEP = 1e-5
"""Share of the mean by which an exchange must lower the busiest rank's work."""
_WORTH_A_CUT = 0.005
"""Share of the mean by which a cut must lower the busiest rank's work."""
_LIGHT_RANKS = 4
"""Partners tried for each exchange: the least busy ranks."""
_CUT_SIZES = 24
"""Sizes of part that are tried for groups that exceed a rank's share, beside single rows."""


@dataclass(frozen=True, kw_only=True)
class DealtGroups:
    """Places of the given order by rank."""

    places: list[Rows]
    """Of each rank, ascending; a rank may have none."""
    loads: Costs
    """`[ranks]`: work of each, with what is computed again."""
    num_cuts: int
    """Parts that groups were cut into, beyond one each."""


def deal(common: CommonPrefixes, num_ranks: int, cost: CostModel) -> tuple[list[Rows], Costs]:
    """Places of each rank, ascending, at least one; those past the last row are dummy rows. And each rank's work.

    Where no rows share computation, each rank gets as many as the others.
    """
    if num_ranks == 1 or not common.shared.any():
        dummies = np.full(-len(common.rows) % num_ranks, DUMMY_ROW_LENGTH, dtype=np.int64)
        costs = cost.of(np.concatenate([common.lengths, dummies]))
        rows = deal_rows(costs, num_ranks)
        return list(rows), costs[rows].sum(axis=1)
    again = cost.of(common.shared)
    dealt = deal_groups(cost.of(common.lengths) - again, again, common.starts, num_ranks)
    places = [np.sort(each) for each in dealt.places]
    for number, rank in enumerate(rank for rank, each in enumerate(places) if len(each) == 0):
        places[rank] = np.array([len(common.rows) + number])
    return places, dealt.loads


def deal_groups(own: Costs, again: Costs, starts: Rows, num_ranks: int) -> DealtGroups:
    """Deals `rows` in groups `[starts[g], starts[g + 1])` of an order.

    `own` `[rows]`: cost of each row where the rows of its group before it are on the same rank. `again` `[rows]`: what
    it costs more where they are not. O(rows + groups log groups).
    """
    groups = _Groups(own, again, starts, num_ranks)
    pieces = groups.deal(starts)
    heaviest = groups.cost.argmax()
    if groups.cost[heaviest] > groups.cost.sum() / num_ranks:
        repeated = again[starts[heaviest] : starts[heaviest + 1]].max()
        sizes = groups.cost[heaviest] / np.geomspace(1.2, 2 * num_ranks, _CUT_SIZES) + repeated
        tried = (groups.deal(groups.cut(size)) for size in [*sizes, 0.0])
        levelest = min(tried, key=lambda each: float(each.loads.max()))
        if levelest.loads.max() < pieces.loads.max() - _WORTH_A_CUT * pieces.loads.mean():
            pieces = levelest
    pieces = _level(groups, pieces)
    runs = [[np.empty(0, dtype=np.int64)] for _ in range(num_ranks)]
    for (start, stop), rank in zip(pairwise(pieces.bounds.tolist()), pieces.owner.tolist()):
        runs[rank].append(np.arange(start, stop))
    return DealtGroups(
        places=[np.concatenate(parts) for parts in runs],
        loads=pieces.loads,
        num_cuts=len(pieces.bounds) - len(starts),
    )


@dataclass(frozen=True)
class _Pieces:
    """Runs of places, who has them, and what they cost there."""

    bounds: Rows
    owner: Rows
    costs: Costs
    loads: Costs


class _Groups:
    """What is dealt out."""

    def __init__(self, own: Costs, again: Costs, starts: Rows, num_ranks: int) -> None:
        self.ends = np.concatenate([[0.0], np.cumsum(own)])
        self.again, self.starts, self.num_ranks = again, starts, num_ranks
        self.cost = np.diff(self.ends[starts])

    def deal(self, bounds: Rows) -> _Pieces:
        """Pieces `[bounds[i], bounds[i + 1])`, the costliest first, each to the least busy rank."""
        costs = np.diff(self.ends[bounds]) + self.again[bounds[:-1]]
        heap = [(0.0, rank) for rank in range(self.num_ranks)]
        owner = np.empty(len(costs), dtype=np.int64)
        for piece in np.argsort(-costs, kind="stable").tolist():
            load, rank = heap[0]
            owner[piece] = rank
            heapq.heapreplace(heap, (load + float(costs[piece]), rank))
        return self.pieces(bounds, owner)

    def pieces(self, bounds: Rows, owner: Rows) -> _Pieces:
        """With their costs: of several pieces of a group on one rank, the first alone repeats what they share."""
        repeated = self.again[bounds[:-1]]
        if len(bounds) > len(self.starts):
            group = np.searchsorted(self.starts, bounds[:-1], side="right")
            order = np.lexsort((group, owner))
            follows = (np.diff(group[order]) == 0) & (np.diff(owner[order]) == 0)
            repeated[order[1:][follows]] = 0.0
        costs = np.diff(self.ends[bounds]) + repeated
        loads = np.bincount(owner, weights=costs, minlength=self.num_ranks).astype(np.float64)
        return _Pieces(bounds, owner, costs, loads)

    def cut(self, size: float) -> Rows:
        """Bounds of pieces of about `size` at most; groups within it stay whole."""
        cuts: list[int] = []
        for group in np.flatnonzero(self.cost > size).tolist():
            at, stop = int(self.starts[group]), int(self.starts[group + 1])
            while self.ends[stop] - self.ends[at] + self.again[at] > size:
                reach = int(np.searchsorted(self.ends, self.ends[at] + size - self.again[at], side="right")) - 1
                at = max(reach, at + 1)
                if at >= stop:
                    break
                cuts.append(at)
        return np.sort(np.concatenate([self.starts, np.array(cuts, dtype=np.int64)]))


def _level(groups: _Groups, pieces: _Pieces) -> _Pieces:
    """Exchanges or moves pieces of the busiest rank, and only where none helps cuts one, while that lowers its work."""
    for _ in range(MAX_EXCHANGES):
        busiest = int(pieces.loads.argmax())
        if pieces.loads[busiest] <= _LEVEL * pieces.loads.mean():
            break
        changed = _exchanged(groups, pieces, busiest) or _cut_one(groups, pieces, busiest)
        if changed is None:
            break
        pieces = changed
    return pieces


def _exchanged(groups: _Groups, pieces: _Pieces, busiest: int) -> _Pieces | None:
    """After one piece of the busiest rank went to a light one for a cheaper piece or for nothing; None where no such
    exchange helps."""
    mine = np.flatnonzero(pieces.owner == busiest)
    best, given, taken, partner = pieces.loads[busiest], -1, -1, -1
    for rank in np.argsort(pieces.loads, kind="stable")[:_LIGHT_RANKS].tolist():
        theirs = np.flatnonzero(pieces.owner == rank)
        costs = np.append(pieces.costs[theirs], 0.0)
        after, give, take = best_swap(pieces.costs[mine], costs, pieces.loads[busiest], pieces.loads[rank])
        if rank != busiest and after < best:
            best, given, partner = after, int(mine[give]), rank
            taken = int(theirs[take]) if take < len(theirs) else -1
    if partner < 0:
        return None
    owner = pieces.owner.copy()
    owner[given] = partner
    if taken >= 0:
        owner[taken] = busiest
    return _better(groups.pieces(pieces.bounds, owner), pieces, busiest, _LEVEL_STEP)


def _cut_one(groups: _Groups, pieces: _Pieces, busiest: int) -> _Pieces | None:
    """After the end of one piece of the busiest rank went to the least busy one; None where no such cut helps."""
    lightest = int(pieces.loads.argmin())
    mine = np.flatnonzero(pieces.owner == busiest)
    sizes = np.diff(pieces.bounds)[mine] - 1
    piece = np.repeat(mine, sizes)
    if len(piece) == 0:
        return None
    at = pieces.bounds[piece] + 1 + np.arange(len(piece)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    tail = groups.ends[pieces.bounds[piece + 1]] - groups.ends[at]
    after = np.maximum(pieces.loads[busiest] - tail, pieces.loads[lightest] + tail + groups.again[at])
    best = int(after.argmin())
    bounds = np.insert(pieces.bounds, piece[best] + 1, at[best])
    owner = np.insert(pieces.owner, piece[best] + 1, lightest)
    return _better(groups.pieces(bounds, owner), pieces, busiest, _WORTH_A_CUT)


def _better(changed: _Pieces, pieces: _Pieces, busiest: int, share: float) -> _Pieces | None:
    """`changed` where the two ranks that changed have less than the busiest had, by that share of the mean at least."""
    touched = changed.loads != pieces.loads
    wanted = pieces.loads[busiest] - share * pieces.loads.mean()
    return changed if touched.any() and changed.loads[touched].max() < wanted else None
