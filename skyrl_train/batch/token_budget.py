"""Micro-batches under a hard cap of computed token positions. numpy only.

What a forward computes depends on its layout: rows times the longest row where rows are padded, the sum of lengths
where they are packed. Either way no micro-batch exceeds the cap, except a row that is longer than the cap by itself:
it goes alone, and `rows_over` counts such rows for the plan.

First as few micro-batches as the cap allows, then level ones: with the same number, the largest is made small.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
"""Row numbers, or the rows' lengths."""

DUMMY_ROW_LENGTH = 2
"""Tokens of a dummy row: one of context and one after it, the shortest row that a model can score."""

_LEVEL_ENOUGH = 0.98
"""A packing this full on average is level already."""
_LEVEL_ROUNDS = 4
"""Packings tried under a smaller cap where dealing by length does not fit."""


@dataclass(frozen=True, kw_only=True)
class TokenBudget:
    """A micro-batch strategy: at most so many computed token positions in a micro-batch."""

    tokens_per_train_micro_batch: int
    tokens_per_forward_micro_batch: int
    counts_rows: ClassVar[bool] = False
    padded: bool
    """True: rows times the longest row are computed. False: only the tokens themselves."""

    def split_lengths(self, lengths: Rows, *, training: bool) -> list[Rows]:
        """Row numbers of each micro-batch, from the rows' lengths."""
        return (split_padded if self.padded else split_packed)(lengths, self.cap(training=training))

    def admits(self, num_rows: int, longest: int, num_tokens: int, *, training: bool) -> bool:
        """Whether such rows fit one micro-batch; a single row always does."""
        return num_rows <= 1 or (num_rows * longest if self.padded else num_tokens) <= self.cap(training=training)

    def cap(self, *, training: bool) -> int:
        """The most positions of one micro-batch."""
        return self.tokens_per_train_micro_batch if training else self.tokens_per_forward_micro_batch


def computed_tokens(lengths: Rows, *, padded: bool) -> int:
    """Positions that a forward of these rows computes."""
    if len(lengths) == 0:
        return 0
    return int(len(lengths) * lengths.max() if padded else lengths.sum())


def rows_over(lengths: Rows, max_tokens: int) -> int:
    """Rows that exceed the cap by themselves."""
    return int((lengths > max_tokens).sum())


def split_padded(lengths: Rows, max_tokens: int) -> list[Rows]:
    """Row numbers of each micro-batch so that rows times the longest row is at most `max_tokens`; the longest rows
    first.

    Rows sorted by length are cut greedily, which gives the smallest number of micro-batches; the smallest cap that
    gives this number levels them.
    """
    if len(lengths) == 0:
        return []
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order]
    cuts = _greedy_cuts(descending, max_tokens)
    low, high = int(descending[0]), max(max_tokens, int(descending[0]))
    while low < high:
        middle = (low + high) // 2
        trial = _greedy_cuts(descending, middle)
        if len(trial) <= len(cuts):
            cuts, high = trial, middle
        else:
            low = middle + 1
    return np.split(order, cuts[1:])


def _greedy_cuts(descending: Rows, max_tokens: int) -> list[int]:
    """Where each micro-batch begins when each takes as many of the remaining rows as fit."""
    cuts, position = [], 0
    while position < len(descending):
        cuts.append(position)
        position += max(1, max_tokens // int(descending[position]))
    return cuts


def split_packed(lengths: Rows, max_tokens: int) -> list[Rows]:
    """Row numbers of each micro-batch so that the sum of lengths is at most `max_tokens`; the fullest first.

    First-fit decreasing over counts of equal lengths. Where that leaves room, rows are dealt anew, longest first to the
    emptiest micro-batch; where that would break the cap, packing is repeated under smaller caps.
    """
    if len(lengths) == 0:
        return []
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order]
    num_over = rows_over(lengths, max_tokens)
    alone, rest = list(np.split(order[:num_over], num_over)) if num_over else [], descending[num_over:]
    bins = _level(rest, max_tokens) if len(rest) else []
    bins.sort(key=lambda positions: -int(rest[positions].sum()))
    return alone + [order[num_over + positions] for positions in bins]


def _level(descending: Rows, max_tokens: int) -> list[Rows]:
    """Positions in `descending` (all at most `max_tokens`) of each micro-batch."""
    packed = _first_fit_decreasing(descending, max_tokens)
    mean = descending.sum() / len(packed)
    if mean >= _LEVEL_ENOUGH * max_tokens:
        return packed
    dealt = deal_longest_first(descending, len(packed))
    if max(int(descending[positions].sum()) for positions in dealt) <= max_tokens:
        return dealt
    low, high = max(int(np.ceil(mean)), int(descending[0])), max_tokens
    for _ in range(_LEVEL_ROUNDS):
        middle = (low + high) // 2
        trial = _first_fit_decreasing(descending, middle)
        if len(trial) <= len(packed):
            packed, high = trial, middle
        else:
            low = middle + 1
    return packed


def deal_longest_first(descending: Rows, num_bins: int) -> list[Rows]:
    """Each row to the bin with the fewest tokens so far; positions in `descending` (lengths) of each bin."""
    heap = [(0, index) for index in range(num_bins)]
    bin_of = np.empty(len(descending), dtype=np.int64)
    for position, length in enumerate(descending.tolist()):
        tokens, index = heap[0]
        bin_of[position] = index
        heapq.heapreplace(heap, (tokens + length, index))
    by_bin = np.argsort(bin_of, kind="stable")
    return np.split(by_bin, np.cumsum(np.bincount(bin_of, minlength=num_bins))[:-1])


def _first_fit_decreasing(descending: Rows, max_tokens: int) -> list[Rows]:
    """First-fit decreasing, bin by bin: each takes the longest row that still fits until none does.

    The longest length with rows left is found in a union-find over the distinct lengths, so that the work grows with
    the number of (bin, length) pairs and not with rows times bins.
    """
    ascending, counts_array = np.unique(descending, return_counts=True)
    values, counts = ascending.tolist(), counts_array.tolist()
    next_row = (len(descending) - np.cumsum(counts_array)).tolist()
    present = list(range(len(values) + 1))  # present[i + 1]: the largest length index <= i with rows left, plus one

    def largest_present(index: int) -> int:
        root = index + 1
        while present[root] != root:
            present[root] = present[present[root]]
            root = present[root]
        return root - 1

    starts, takes, sizes = [], [], []
    remaining_rows = len(descending)
    while remaining_rows:
        room, size = max_tokens, 0
        index = largest_present(len(values) - 1)
        while index >= 0:
            take = min(counts[index], room // values[index])
            starts.append(next_row[index])
            takes.append(take)
            next_row[index] += take
            counts[index] -= take
            room -= take * values[index]
            size += take
            if counts[index] == 0:
                present[index + 1] = index
            index = largest_present(min(index, bisect_right(values, room) - 1)) if room else -1
        sizes.append(size)
        remaining_rows -= size
    return np.split(_ranges(np.array(starts), np.array(takes)), np.cumsum(sizes)[:-1])


def _ranges(starts: Rows, sizes: Rows) -> Rows:
    """`starts[0], starts[0] + 1, ...` (`sizes[0]` of them), then the same from `starts[1]`, and so on."""
    ends = np.cumsum(sizes)
    ranges: Rows = np.arange(int(ends[-1])) + np.repeat(starts - (ends - sizes), sizes)
    return ranges
