"""Which rank gets which rows, so that each has an equal share of the work. numpy only.

Where no rows share computation, each rank gets the same number of rows. Where they do, rows that share lie in groups, and
a piece of a group that goes to another rank computes again what its first row shared. What counts is the work of the
busiest rank, for which all others wait: groups stay whole, and one is cut exactly where that lowers the busiest rank's
work, the repeated work included.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from skyrl_train.batch.batch_metadata import DUMMY_ROW_LENGTH, Rows
from skyrl_train.batch.layouts.cost import CostModel
from skyrl_train.batch.planner.rows import RowFacts
from skyrl_train.errors import BatchError, counted

Costs = NDArray[np.float64]

_TOLERANCE = 1e-4
"""Rows are exchanged until the busiest rank is this near the mean."""
_MAX_EXCHANGES = 400
"""After so many what is left is left."""
_MAX_PARTNERS = 1024
"""So many partners are tried at most: of hundreds of ranks with few rows each, a light one seldom has a row that fits."""
_LIGHT_RANKS = 4
"""Partners tried first for each exchange: the least busy ranks."""
_MOST_BLOCKS = 1024
"""Blocks of one row per rank that are assigned one after the other. The rows after them are short: all at once."""
_LEVEL = 1.005
"""Groups are level with a busiest rank this near the mean: nothing more is moved or cut."""
_LEVEL_STEP = 1e-5
"""Share of the mean by which an exchange must lower the busiest rank's work."""
_WORTH_A_CUT = 0.005
"""Share of the mean by which a cut must lower the busiest rank's work."""
_CUT_SIZES = 24
"""Sizes of part that are tried for groups that exceed a rank's share, beside single rows."""


def shard_rows(rows: RowFacts, num_ranks: int, cost: CostModel) -> tuple[list[Rows], Costs]:
    """Row numbers of each rank, ascending, at least one; those past the last row are dummy rows. And each rank's work.

    Where no rows share computation, each rank gets as many as the others. Rows without loss are computed by nobody: where
    any share, such a row is a group by itself and counts as one token.
    """
    groups = _groups(rows)
    # Without anything to share, equal numbers of rows are as level as equal work, and micro-batches come out even.
    if num_ranks == 1 or groups is None or not groups.shared.any():
        lengths = rows.lengths if groups is None else np.where(rows.loss_tokens > 0, rows.lengths, 1)
        dummies = np.full(-rows.num_rows % num_ranks, DUMMY_ROW_LENGTH, dtype=np.int64)
        costs = cost.of_rows(np.concatenate([lengths, dummies]))
        assigned = balance_rows(costs, num_ranks)
        return list(assigned), costs[assigned].sum(axis=1)
    in_tree = rows.layout in ("prefix_shared", "auto")
    again = cost.of_rows(groups.shared, in_tree=in_tree)
    own = cost.of_rows(groups.lengths, in_tree=in_tree) - again
    by_rank, loads = balance_groups(own, again, groups.starts, num_ranks)
    # Rows of a rank keep the order of the batch, so that it does not matter in which order groups were assigned.
    shares = [np.sort(groups.rows[places]) for places in by_rank]
    # A rank without rows gets a dummy row, since it has to take part in the collectives of the others.
    for number, rank in enumerate(rank for rank, each in enumerate(shares) if len(each) == 0):
        shares[rank] = np.array([rows.num_rows + number])
    return shares, loads


@dataclass(frozen=True)
class _Grouped:
    """Rows in an order in which those that are computed together are neighbours."""

    rows: Rows
    lengths: Rows
    """Tokens that are computed of each row in this order."""
    shared: Rows
    """First tokens of each row that the row before it in its group computes; 0 for the first of a group."""
    starts: Rows
    """Where groups begin in this order, and the end."""


def _groups(rows: RowFacts) -> _Grouped | None:
    """The rows by what is computed together: prompts, or hosts with what they compute; None where the layout computes
    every row by itself."""
    trained, untrained = np.flatnonzero(rows.loss_tokens > 0), np.flatnonzero(rows.loss_tokens == 0)
    if rows.layout in ("prefix_shared", "auto"):
        places = rows.places_of(trained)
        # Prompts first, then the order: another prompt's rows may lie between two rows of one that is their prefix.
        by_group = np.lexsort((places, rows.prompts[trained]))
        order = trained[by_group]
        group = rows.prompts[order]
        shared = rows.shared_along(places[by_group], group)
    elif (rows.hosts != np.arange(rows.num_rows)).any():
        # All rows of a host are prefixes of it, and so, in the order of their lengths, of one another.
        order = trained[np.lexsort((rows.lengths[trained], rows.hosts[trained]))]
        group = rows.hosts[order]
        follows = np.diff(group, prepend=-1) == 0
        shared = np.where(follows, np.concatenate([[0], rows.lengths[order][:-1]]), 0)
    else:
        return None
    alone = np.ones(len(untrained), dtype=np.int64)
    begins = np.concatenate([np.diff(group, prepend=-1) != 0, alone > 0])
    return _Grouped(
        rows=np.concatenate([order, untrained]),
        lengths=np.concatenate([rows.lengths[order], alone]),
        shared=np.concatenate([shared, alone - 1]),
        starts=np.append(np.flatnonzero(begins), rows.num_rows),
    )


def balance_rows(costs: NDArray[np.float64], num_ranks: int) -> NDArray[np.int64]:
    """Row numbers `[num_ranks, rows / num_ranks]` of each rank, ascending within a rank.

    Sorted rows are assigned in blocks of one row per rank, the costliest of a block to the least busy rank, and after many
    blocks forwards and backwards by turns; then rows of the busiest rank are exchanged with rows of the least busy ones
    until they are level. O(n log n). Raises BatchError where the rows do not divide evenly.
    """
    rows_per_rank, rest = divmod(len(costs), num_ranks)
    if rest:
        raise BatchError(f"{counted(len(costs), 'row')} cannot be shared evenly by {num_ranks} ranks; pad them first")
    order = np.argsort(-costs, kind="stable")
    if num_ranks == 1:
        return np.sort(order)[None, :]
    blocks, block_costs = order.reshape(rows_per_rank, num_ranks), costs[order].reshape(rows_per_rank, num_ranks)
    assigned = np.empty((num_ranks, rows_per_rank), dtype=np.int64)
    by_load, num_blocks = [0.0] * num_ranks, min(rows_per_rank, _MOST_BLOCKS)
    taken_by = []
    # Lists: numpy takes longer to call than to sort so few.
    for of_block in block_costs[:num_blocks].tolist():
        lightest_first = sorted(range(num_ranks), key=by_load.__getitem__)
        for rank, row_cost in zip(lightest_first, of_block):
            by_load[rank] += row_cost
        taken_by.append(lightest_first)
    loads = np.array(by_load)
    assigned[np.array(taken_by, np.int64).reshape(-1, num_ranks).T, np.arange(num_blocks)] = blocks[:num_blocks].T
    if rows_per_rank > _MOST_BLOCKS:
        ranks = np.argsort(loads, kind="stable")
        others, rest_costs = blocks[_MOST_BLOCKS:], block_costs[_MOST_BLOCKS:]
        # What one block gives a rank too much, the next one gives it too little.
        others[1::2], rest_costs[1::2] = others[1::2, ::-1].copy(), rest_costs[1::2, ::-1].copy()
        assigned[ranks, _MOST_BLOCKS:] = others.T
        loads[ranks] += rest_costs.sum(axis=0)
    _exchange(costs, assigned, loads)
    assigned.sort(axis=1)
    return assigned


def _exchange(costs: NDArray[np.float64], assigned: NDArray[np.int64], loads: NDArray[np.float64]) -> None:
    """Swap one row of the busiest rank for a cheaper one of another, as long as that lowers the higher of the two."""
    mean, num_tried = loads.mean(), 0
    for _ in range(_MAX_EXCHANGES):
        busiest = int(loads.argmax())
        if loads[busiest] <= mean * (1 + _TOLERANCE) or num_tried >= _MAX_PARTNERS:
            return
        enough = loads[busiest] * (1 - _TOLERANCE / 100)  # a swap that gains less could go on for ever by rounding
        # Without the busiest itself.
        by_load = np.argsort(loads, kind="stable")[:-1]
        # A light rank has most to take over, and nearly always a row that fits: the others are asked only then.
        for partners in (by_load[:_LIGHT_RANKS], by_load[_LIGHT_RANKS:]):
            swaps = []
            num_tried += len(partners)
            for rank in partners.tolist():
                swap = best_swap(costs[assigned[busiest]], costs[assigned[rank]], loads[busiest], loads[rank])
                swaps += [(swap[0], rank, *swap[1:])] if rank != busiest else []
            higher, other, mine, theirs = min(swaps, default=(enough, 0, 0, 0))
            if higher < enough:
                break
        else:
            return
        assigned[busiest, mine], assigned[other, theirs] = assigned[other, theirs], assigned[busiest, mine]
        for rank in (busiest, other):
            # Summed anew: what exchanges add and subtract would pile up its rounding.
            loads[rank] = costs[assigned[rank]].sum()


def best_swap(
    mine: NDArray[np.float64], theirs: NDArray[np.float64], my_load: float, their_load: float
) -> tuple[float, int, int]:
    """Return the swap between a busy rank and another, of these costs, after which the busier of them has the least: (its
    load, index in `mine`, index in `theirs`)."""
    by_cost = np.argsort(theirs, kind="stable")
    # Both are level where a row goes for one that is cheaper by half the difference: the nearest ones to that are tried.
    wanted = mine - (my_load - their_load) / 2
    above = np.clip(np.searchsorted(theirs[by_cost], wanted), 0, len(theirs) - 1)
    candidates = by_cost[np.stack([above, np.maximum(above - 1, 0)])]
    moved = mine - theirs[candidates]
    after = np.maximum(my_load - moved, their_load + moved)
    which, column = (int(index) for index in np.unravel_index(int(after.argmin()), after.shape))
    return float(after[which, column]), column, int(candidates[which, column])


def balance_groups(own: Costs, again: Costs, starts: Rows, num_ranks: int) -> tuple[list[Rows], Costs]:
    """Assign rows in groups `[starts[g], starts[g + 1])` of an order.

    Returns the indices into that order that each rank has, ascending and perhaps none, and `[ranks]` the work of each, with
    what is computed again.

    `own` `[rows]`: cost of each row where the rows of its group before it are on the same rank. `again` `[rows]`: what
    it costs more where they are not. O(rows + groups log groups).
    """
    groups = _Groups(own, again, starts, num_ranks)
    pieces = groups.assign(starts)
    heaviest = groups.cost.argmax()
    if groups.cost[heaviest] > groups.cost.sum() / num_ranks:
        # Whole, the heaviest group alone would be more than a rank's share. How finely to cut is not known beforehand,
        # since every cut repeats work: some sizes are tried, from a little under the group to single rows.
        repeated = again[starts[heaviest] : starts[heaviest + 1]].max()
        sizes = groups.cost[heaviest] / np.geomspace(1.2, 2 * num_ranks, _CUT_SIZES) + repeated
        tried = (groups.assign(groups.cut(size)) for size in [*sizes, 0.0])
        levelest = min(tried, key=lambda each: float(each.loads.max()))
        if levelest.loads.max() < pieces.loads.max() - _WORTH_A_CUT * pieces.loads.mean():
            pieces = levelest
    pieces = _level(groups, pieces)
    runs = [[np.empty(0, dtype=np.int64)] for _ in range(num_ranks)]
    for (start, stop), rank in zip(pairwise(pieces.bounds.tolist()), pieces.owner.tolist()):
        runs[rank].append(np.arange(start, stop))
    return [np.concatenate(parts) for parts in runs], pieces.loads


@dataclass(frozen=True)
class _Pieces:
    """Runs of rows in the order, the rank of each, and what they cost there."""

    bounds: Rows
    owner: Rows
    costs: Costs
    loads: Costs


class _Groups:
    """The groups to be assigned, by what their rows cost."""

    def __init__(self, own: Costs, again: Costs, starts: Rows, num_ranks: int) -> None:
        # Running totals, so that any piece costs one subtraction.
        self.ends = np.concatenate([[0.0], np.cumsum(own)])
        self.again, self.starts, self.num_ranks = again, starts, num_ranks
        self.cost = np.diff(self.ends[starts])

    def assign(self, bounds: Rows) -> _Pieces:
        """Give pieces `[bounds[i], bounds[i + 1])`, the costliest first, each to the least busy rank."""
        costs = np.diff(self.ends[bounds]) + self.again[bounds[:-1]]
        heap = [(0.0, rank) for rank in range(self.num_ranks)]
        owner = np.empty(len(costs), dtype=np.int64)
        for piece in np.argsort(-costs, kind="stable").tolist():
            load, rank = heap[0]
            owner[piece] = rank
            heapq.heapreplace(heap, (load + float(costs[piece]), rank))
        return self.pieces(bounds, owner)

    def pieces(self, bounds: Rows, owner: Rows) -> _Pieces:
        """The pieces with their costs: of several of a group on one rank, the first alone repeats what they share."""
        repeated = self.again[bounds[:-1]]
        if len(bounds) > len(self.starts):
            # Pieces by rank and group: behind another of its group on the same rank a piece finds what it shares computed.
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
                at = max(reach, at + 1)  # a row that exceeds the size by itself is a piece, too
                if at >= stop:
                    break
                cuts.append(at)
        return np.sort(np.concatenate([self.starts, np.array(cuts, dtype=np.int64)]))


def _level(groups: _Groups, pieces: _Pieces) -> _Pieces:
    """Exchange or move pieces of the busiest rank, and only where none helps cut one, while that lowers its work."""
    for _ in range(_MAX_EXCHANGES):
        busiest = int(pieces.loads.argmax())
        if pieces.loads[busiest] <= _LEVEL * pieces.loads.mean():
            break
        changed = _exchanged(groups, pieces, busiest) or _cut_one(groups, pieces, busiest)
        if changed is None:
            break
        pieces = changed
    return pieces


def _exchanged(groups: _Groups, pieces: _Pieces, busiest: int) -> _Pieces | None:
    """Return the pieces after one of the busiest rank went to a light one for a cheaper piece or for nothing; None where
    no such exchange helps."""
    mine = np.flatnonzero(pieces.owner == busiest)
    best, given, taken, partner = pieces.loads[busiest], -1, -1, -1
    for rank in np.argsort(pieces.loads, kind="stable")[:_LIGHT_RANKS].tolist():
        theirs = np.flatnonzero(pieces.owner == rank)
        costs = np.append(pieces.costs[theirs], 0.0)  # for nothing: the piece moves
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
    """Return the pieces after the end of one of the busiest rank went to the least busy one; None where no such cut
    helps."""
    lightest = int(pieces.loads.argmin())
    mine = np.flatnonzero(pieces.owner == busiest)
    sizes = np.diff(pieces.bounds)[mine] - 1
    piece = np.repeat(mine, sizes)
    if len(piece) == 0:
        return None
    # Every place between two rows of every piece of the busiest rank.
    at = pieces.bounds[piece] + 1 + np.arange(len(piece)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    tail = groups.ends[pieces.bounds[piece + 1]] - groups.ends[at]
    after = np.maximum(pieces.loads[busiest] - tail, pieces.loads[lightest] + tail + groups.again[at])
    best = int(after.argmin())
    bounds = np.insert(pieces.bounds, piece[best] + 1, at[best])
    owner = np.insert(pieces.owner, piece[best] + 1, lightest)
    return _better(groups.pieces(bounds, owner), pieces, busiest, _WORTH_A_CUT)


def _better(changed: _Pieces, pieces: _Pieces, busiest: int, share: float) -> _Pieces | None:
    """Return `changed` where the two ranks that changed have less than the busiest had, by that share of the mean at
    least."""
    touched = changed.loads != pieces.loads
    wanted = pieces.loads[busiest] - share * pieces.loads.mean()
    return changed if touched.any() and changed.loads[touched].max() < wanted else None
