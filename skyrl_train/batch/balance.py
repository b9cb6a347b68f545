"""Rows to ranks, so that each gets the same number of rows and an equal share of the work. numpy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skyrl_train.errors import BatchError

_TOLERANCE = 1e-4
"""Stop exchanging rows once the busiest rank is this near the mean."""
MAX_EXCHANGES = 400
"""After so many what is left is left."""
_LIGHT_RANKS = 4
"""Partners tried first for each exchange: the least busy ranks."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Work of a row: `per_token * length + per_squared_token * length^2`, in any unit.

    Linear layers cost per token, attention per pair of tokens. For a decoder of hidden size h the matrix products of a
    layer are about `24 h^2` per token and causal attention `2 h` per pair, a ratio of `1 / (12 h)`; the default is
    that of h = 2048. A wrong model costs speed, never correctness.
    """

    per_token: float = 1.0
    per_squared_token: float = 1.0 / (12 * 2048)

    def of(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """`[rows]`."""
        exact = lengths.astype(np.float64)
        return self.per_token * exact + self.per_squared_token * exact * exact


def deal_rows(costs: NDArray[np.float64], num_ranks: int) -> NDArray[np.int64]:
    """Row numbers `[num_ranks, rows / num_ranks]` of each rank, ascending within a rank.

    Sorted rows are dealt in blocks of one row per rank, the costliest of a block to the least busy rank; then rows of
    the busiest rank are exchanged with rows of the least busy ones until they are level. O(n log n). Raises
    BatchError where the rows do not divide evenly.
    """
    rows_per_rank, rest = divmod(len(costs), num_ranks)
    if rest:
        raise BatchError(f"{len(costs)} rows cannot be dealt evenly to {num_ranks} ranks; pad them first")
    order = np.argsort(-costs, kind="stable")
    if num_ranks == 1:
        return np.sort(order)[None, :]
    blocks, block_costs = order.reshape(rows_per_rank, num_ranks), costs[order].reshape(rows_per_rank, num_ranks)
    dealt = np.empty((num_ranks, rows_per_rank), dtype=np.int64)
    loads = np.zeros(num_ranks)
    for block in range(rows_per_rank):
        ranks = np.argsort(loads, kind="stable")
        loads[ranks] += block_costs[block]
        dealt[ranks, block] = blocks[block]
    _exchange(costs, dealt, loads)
    dealt.sort(axis=1)
    return dealt


def _exchange(costs: NDArray[np.float64], dealt: NDArray[np.int64], loads: NDArray[np.float64]) -> None:
    """Swaps one row of the busiest rank for a cheaper one of another, as long as that lowers the higher of the two."""
    mean = loads.mean()
    for _ in range(MAX_EXCHANGES):
        busiest = int(loads.argmax())
        if loads[busiest] <= mean * (1 + _TOLERANCE):
            return
        enough = loads[busiest] * (1 - _TOLERANCE / 100)
        by_load = np.argsort(loads, kind="stable")[:-1]
        for partners in (by_load[:_LIGHT_RANKS], by_load[_LIGHT_RANKS:]):
            swaps = []
            for rank in partners.tolist():
                swap = best_swap(costs[dealt[busiest]], costs[dealt[rank]], loads[busiest], loads[rank])
                swaps += [(swap[0], rank, *swap[1:])] if rank != busiest else []
            higher, other, mine, theirs = min(swaps, default=(enough, 0, 0, 0))
            if higher < enough:
                break
        else:
            return
        dealt[busiest, mine], dealt[other, theirs] = dealt[other, theirs], dealt[busiest, mine]
        for rank in (busiest, other):
            loads[rank] = costs[dealt[rank]].sum()


def best_swap(
    mine: NDArray[np.float64], theirs: NDArray[np.float64], my_load: float, their_load: float
) -> tuple[float, int, int]:
    """The swap between a busy rank and another, of these costs, after which the busier of them has the least: (its
    load, index in `mine`, index in `theirs`)."""
    by_cost = np.argsort(theirs, kind="stable")
    wanted = mine - (my_load - their_load) / 2
    above = np.clip(np.searchsorted(theirs[by_cost], wanted), 0, len(theirs) - 1)
    candidates = by_cost[np.stack([above, np.maximum(above - 1, 0)])]
    moved = mine - theirs[candidates]
    after = np.maximum(my_load - moved, their_load + moved)
    which, column = (int(index) for index in np.unravel_index(int(after.argmin()), after.shape))
    return float(after[which, column]), column, int(candidates[which, column])
