"""Rows into micro-batches by their lengths alone, under a hard cap. numpy only.

What a forward computes depends on its layout: rows times the longest row where rows are padded, the sum of lengths
where they are packed. Either way no micro-batch exceeds the cap, except a row that is longer than the cap by itself:
it goes alone, and `rows_over` counts such rows for the plan.

First as few micro-batches as the cap allows, then level ones: with the same number, the largest is made small. Work grows
with the number of distinct lengths and of micro-batches; nothing here loops over rows in large numbers.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from skyrl_train.batch.batch_metadata import Rows, ranges

_LEVEL_ENOUGH = 0.98
"""A packing this full on average is level already."""
_LEVEL_ROUNDS = 4
"""Packings tried under a smaller cap where dealing by length does not fit."""
_MOST_ONE_BY_ONE = 4096
"""Rows that are dealt one after the other; more are dealt in rounds."""


def computed_tokens(lengths: Rows, *, padded: bool) -> int:
    """Positions that a forward of these rows computes."""
    if len(lengths) == 0:
        return 0
    return int(len(lengths) * lengths.max() if padded else lengths.sum())


def rows_over(lengths: Rows, max_tokens: int) -> int:
    """Rows that exceed the cap by themselves."""
    return int((lengths > max_tokens).sum())


def split_rows(lengths: Rows, max_rows: int) -> list[Rows]:
    """As few micro-batches of at most `max_rows` rows as there can be, level to within one row, longest rows first."""
    if len(lengths) == 0:
        return []
    order = np.argsort(-lengths, kind="stable")
    return np.array_split(order, -(-len(lengths) // max_rows))


def split_padded(lengths: Rows, max_tokens: int) -> list[Rows]:
    """Row numbers of each micro-batch so that rows times the longest row is at most `max_tokens`; the longest rows
    first.

    Rows sorted by length are cut greedily, which gives the smallest number of micro-batches; the smallest cap that
    gives this number levels them.
    """
    if len(lengths) == 0:
        return []
    order = np.argsort(-lengths, kind="stable")
    ascending = lengths[order[::-1]]
    # A smaller cap never takes fewer micro-batches, so that the
    # smallest one that still takes the fewest is found by bisection.
    fewest = len(_greedy_cuts(ascending, max_tokens))
    low, high = int(ascending[-1]), max_tokens
    while low < high:
        middle = (low + high) // 2
        if len(_greedy_cuts(ascending, middle)) <= fewest:
            high = middle
        else:
            low = middle + 1
    return pieces(order, _greedy_cuts(ascending, high))


def _greedy_cuts(ascending: Rows, max_tokens: int) -> Rows:
    """Where each micro-batch begins, counted from the longest row on, when each takes as many of the remaining rows as
    fit.

    How many fit is the same for all longest rows between two quotients of the cap, of which there are few: what is cut
    between two of them is one range.
    """
    num_rows, begin = len(ascending), 0
    runs: list[Rows] = []
    while begin < num_rows:
        fitting = max(1, max_tokens // int(ascending[num_rows - 1 - begin]))
        # One row more fits from the first row on that is at most this long.
        shorter = max_tokens // (fitting + 1)
        end = num_rows - int(np.searchsorted(ascending, shorter, side="right"))
        runs.append(np.arange(begin, max(end, begin + 1), fitting))
        begin = int(runs[-1][-1]) + fitting
    return np.concatenate(runs)


def split_packed(lengths: Rows, max_tokens: int) -> list[Rows]:
    """Row numbers of each micro-batch so that the sum of lengths is at most `max_tokens`; the fullest first.

    First-fit decreasing over counts of equal lengths. Where that leaves room, rows are dealt again, longest first to
    the emptiest micro-batch; where that would break the cap, packing is repeated under smaller caps.
    """
    if len(lengths) == 0:
        return []
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order]
    num_over = rows_over(lengths, max_tokens)
    alone, rest = pieces(order[:num_over], np.arange(num_over)), descending[num_over:]
    if len(rest) == 0:
        return alone
    packed = _level(rest, max_tokens)
    packed = packed.in_order(np.argsort(-packed.sums(rest), kind="stable"))
    return alone + pieces(order[num_over + packed.positions], packed.begins)


@dataclass(frozen=True)
class _Packed:
    """Positions in the descending lengths, micro-batch after micro-batch."""

    positions: Rows
    begins: Rows
    """Where each micro-batch begins in `positions`."""

    def sums(self, descending: Rows) -> Rows:
        """Return the tokens of each micro-batch, int64 `[micro-batches]`."""
        return np.add.reduceat(descending[self.positions], self.begins)

    def in_order(self, order: Rows) -> _Packed:
        """With the micro-batches in this order."""
        sizes = np.diff(self.begins, append=len(self.positions))[order]
        return _Packed(self.positions[ranges(self.begins[order], sizes)], np.cumsum(sizes) - sizes)


def _level(descending: Rows, max_tokens: int) -> _Packed:
    """As few micro-batches as are found, and level ones (all lengths are at most `max_tokens`)."""
    packed = _first_fit_decreasing(descending, max_tokens)
    count = len(packed.begins)
    mean = descending.sum() / count
    if mean >= _LEVEL_ENOUGH * max_tokens:
        return packed
    dealt = _dealt(descending, count)
    if dealt.sums(descending).max() <= max_tokens:
        return dealt
    # Under the mean so many micro-batches cannot hold the rows, under the longest row none can hold that.
    low, high = max(int(np.ceil(mean)), int(descending[0])), max_tokens
    for _ in range(_LEVEL_ROUNDS):
        middle = (low + high) // 2
        trial = _first_fit_decreasing(descending, middle)
        if len(trial.begins) <= count:
            packed, high = trial, middle
        else:
            low = middle + 1
    return packed


def balance_longest_first(descending: Rows, num_bins: int) -> list[Rows]:
    """Each row to the bin with the fewest tokens so far; positions in `descending` (lengths) of each bin, of which
    there are at most as many as rows."""
    dealt = _dealt(descending, num_bins)
    return pieces(dealt.positions, dealt.begins)


def _dealt(descending: Rows, num_bins: int) -> _Packed:
    bin_of = (_deal_one_by_one if len(descending) <= _MOST_ONE_BY_ONE else _deal_in_rounds)(descending, num_bins)
    counts = np.bincount(bin_of, minlength=num_bins)
    return _Packed(np.argsort(bin_of, kind="stable"), np.cumsum(counts) - counts)


def _deal_one_by_one(descending: Rows, num_bins: int) -> Rows:
    """The bin of each row: a heap knows the emptiest."""
    heap = [(0, index) for index in range(num_bins)]
    bin_of = np.empty(len(descending), dtype=np.int64)
    for position, length in enumerate(descending.tolist()):
        tokens, index = heap[0]
        bin_of[position] = index
        # One sift in place of the two that a pop and a push take.
        heapq.heapreplace(heap, (tokens + length, index))
    return bin_of


def _deal_in_rounds(descending: Rows, num_bins: int) -> Rows:
    """The bin of each row, many at a time: in each round every bin that has room takes as many of the next rows as fit
    below the level to which all bins can be filled, the emptiest bins first."""
    bin_of = np.empty(len(descending), dtype=np.int64)
    bin_of[:num_bins] = np.arange(num_bins)  # the longest rows are apart in any case
    loads, at = descending[:num_bins].copy(), num_bins
    while at < len(descending):
        emptiest = np.argsort(loads, kind="stable")
        level = _water_level(loads[emptiest], int(descending[at:].sum()))
        takes = ((level - loads[emptiest]) // descending[at]).clip(0)
        if takes[0] == 0:
            # No row fits below the level any more: one each, the longest to the emptiest.
            takes = np.ones(num_bins, dtype=np.int64)
        # Rows of a round are alike, so that what a bin takes is near to what was counted.
        alike = int(np.searchsorted(-descending, -descending[at] / 2, side="right")) - at
        ends = np.minimum(np.cumsum(takes), alike)
        owner = np.repeat(emptiest, np.diff(ends, prepend=0))
        bin_of[at : at + len(owner)] = owner
        loads += np.bincount(owner, weights=descending[at : at + len(owner)], minlength=num_bins).astype(np.int64)
        at += len(owner)
    return bin_of


def _water_level(ascending: Rows, tokens: int) -> int:
    """The level at which bins with these loads, filled up to it, hold so many more tokens, rounded up."""
    # What it takes to lift the emptiest 1, 2, ... bins to the level of the last of them.
    lifting = ascending * np.arange(1, len(ascending) + 1) - np.cumsum(ascending)
    lifted = int(np.searchsorted(lifting, tokens, side="right"))
    return -(-(tokens + int(ascending[:lifted].sum())) // lifted)


def _first_fit_decreasing(descending: Rows, max_tokens: int) -> _Packed:
    """First-fit decreasing, bin by bin: each takes the longest row that still fits until none does.

    Equal bins are made at once: what one bin takes, the next takes too, as long as there are rows of each of its
    lengths. So the work grows with the number of distinct lengths, of which one is used up by every turn of the loop,
    and not with rows. The longest length with rows left is found in a union-find over the distinct lengths.
    """
    ascending, counts_array = np.unique(descending, return_counts=True)
    values, counts = ascending.tolist(), counts_array.tolist()
    next_row = (len(descending) - np.cumsum(counts_array)).tolist()
    present = list(range(len(values) + 1))  # present[i + 1]: the largest length index <= i with rows left, plus one

    def largest_present(index: int) -> int:
        root = index + 1
        while present[root] != root:
            # Halves the path on the way, without which chains of lengths that are used up grow with the loop.
            present[root] = present[present[root]]
            root = present[root]
        return root - 1

    starts: list[int] = []
    takes: list[int] = []
    kinds: list[tuple[int, int]] = []  # of each kind of bin, its lengths, and how many such bins there are
    longest = largest_present(len(values) - 1)
    while longest >= 0:
        room, times, index = max_tokens, len(descending), longest
        taken: list[tuple[int, int]] = []
        while index >= 0:
            value, count = values[index], counts[index]
            take = room // value
            # `times` is how many bins can be made like this one: no more than every length
            # in it has rows for. A length that this bin uses up allows no second one.
            if take >= count:
                take, times = count, 1
            elif count < times * take:
                times = count // take
            taken.append((index, take))
            room -= take * value
            # The next shorter length with rows left that fits; lengths are looked up again only where room is short.
            index = index - 1 if room >= value else bisect_right(values, room, 0, index) - 1
            if index >= 0 and present[index + 1] != index + 1:
                index = largest_present(index)
        for index, take in taken:
            starts.append(next_row[index])
            takes.append(take)
            next_row[index] += take * times
            counts[index] -= take * times
            if counts[index] == 0:
                present[index + 1] = index
        kinds.append((len(taken), times))
        longest = largest_present(longest)
    return _bins_of_kinds(np.array(starts), np.array(takes), np.array(kinds))


def _bins_of_kinds(starts: Rows, takes: Rows, kinds: Rows) -> _Packed:
    """Every bin of every kind: the n-th of a kind takes the n-th `takes` rows from `starts` of each of its lengths."""
    num_lengths, times = kinds[:, 0], kinds[:, 1]
    # `[bins]`: the kind of each, and its number among those of the kind.
    kind = np.repeat(np.arange(len(kinds)), times)
    number = np.arange(len(kind)) - np.repeat(np.cumsum(times) - times, times)
    # `[runs]`: for each bin, in order, one run of rows for each of its lengths.
    run = ranges((np.cumsum(num_lengths) - num_lengths)[kind], num_lengths[kind])
    first = starts[run] + takes[run] * np.repeat(number, num_lengths[kind])
    sizes = np.add.reduceat(takes, np.cumsum(num_lengths) - num_lengths)[kind]
    return _Packed(ranges(first, takes[run]), np.cumsum(sizes) - sizes)


def pieces(values: Rows, begins: Rows) -> list[Rows]:
    """`values` in pieces that begin at `begins`, as `np.split` in a fraction of its time."""
    bounds = [*begins.tolist(), len(values)]
    return [values[start:stop] for start, stop in pairwise(bounds)]
