"""Rows in an order in which equal prefixes are neighbours, and the tree that they form. numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Segment(NamedTuple):
    """A run of positions without a branch. Its tokens attend to the tokens of the run up to themselves and to all
    tokens of the segments above it; `[stop, subtree_stop)` are the positions below it, which attend to all of it."""

    start: int
    stop: int
    subtree_stop: int


@dataclass(frozen=True)
class PrefixOrder:
    """Rows sorted by their tokens, a prefix before what extends it."""

    rows: list[int]
    lengths: list[int]
    """Of the rows in this order."""
    shared: list[int]
    """How many first tokens each has in common with the row before it in this order; 0 for the first."""

    @property
    def num_distinct(self) -> int:
        """Nodes of the prefix tree: tokens that differ in themselves or in what comes before them."""
        return sum(self.lengths) - sum(self.shared)


def prefix_order(rows: Sequence[NDArray[np.int32]]) -> PrefixOrder:
    """Sorts rows of token ids (at least 0)."""
    # big-endian, so that bytes sort as the numbers do
    keys = [row.astype(">i4").tobytes() for row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    shared = [0] * len(order)
    for place in range(1, len(order)):
        shared[place] = common_prefix(rows[order[place - 1]], rows[order[place]])
    return PrefixOrder(rows=order, lengths=[len(rows[row]) for row in order], shared=shared)


def common_prefix(left: NDArray[np.int32], right: NDArray[np.int32]) -> int:
    """Number of equal first tokens."""
    size = min(len(left), len(right))
    differs = left[:size] != right[:size]
    first = int(differs.argmax()) if size else 0
    return first if size and differs[first] else size


@dataclass
class _Open:
    """A segment on the path to the newest row, whose subtree may still grow."""

    start: int
    depth: int
    """Of its first token."""
    length: int
    has_children: bool = False


def tree_segments(order: PrefixOrder) -> tuple[Segment, ...]:
    """The tree's segments in the order of their positions, which is depth first."""
    closed: list[Segment] = []
    path: list[_Open] = []
    size = 0

    def close(segment: _Open) -> None:
        closed.append(Segment(segment.start, segment.start + segment.length, size))

    for shared, length in zip(order.shared, order.lengths):
        if length == shared:
            continue  # the same row again
        while path and path[-1].depth >= shared:
            close(path.pop())
        top = path[-1] if path else None
        if top is not None and shared < top.depth + top.length:
            # The row leaves the segment within it: what comes after the branch is a child of its own.
            upper = shared - top.depth
            lower = _Open(top.start + upper, shared, top.length - upper)
            close(lower)
            top.length = upper
            top.has_children = True
        if top is not None and not top.has_children:
            top.length += length - shared  # the row goes on where the one before it ended
        else:
            if top is not None:
                top.has_children = True
            path.append(_Open(size, shared, length - shared))
        size += length - shared
    while path:
        close(path.pop())
    return tuple(sorted(closed))
