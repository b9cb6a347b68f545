"""What forwards compute and cost, and rows that share prefixes cut into micro-batches. numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from skyrl_train.batch.prefix_tree import PrefixOrder
from skyrl_train.batch.token_budget import Rows, split_packed
from skyrl_train.config.rules import LayoutName

LAYOUT_CHOICES: tuple[LayoutName, ...] = ("padded", "packed", "prefix_shared")
"""What `auto` chooses from; the earlier where costs are equal."""


class Planner(Protocol):
    """As `microbatch.LengthPlanner`, with its cap."""

    @property
    def counts_rows(self) -> bool:
        """True: the cap is a number of rows. False: of computed positions."""
        ...

    def cap(self, *, training: bool) -> int:
        """The most that one micro-batch holds."""
        ...

    def split_lengths(self, lengths: Rows, *, training: bool) -> list[Rows]:
        """Row numbers of each micro-batch, from the rows' lengths."""
        ...


@dataclass(frozen=True)
class Forward:
    """The rows of one micro-batch, and what computing them takes."""

    rows: Rows
    positions: int
    """Token positions that are computed, padding included."""
    pairs: float
    """Tokens that attend to one another."""
    calls: int
    """Separate attention kernels in a layer."""


@dataclass(frozen=True, kw_only=True)
class ForwardCost:
    """Predicted cost of a forward, in positions: `positions + pairs * per_pair + calls * per_call`.

    For hidden size h, the products of a layer are about `24 h^2` per position and attention `4 h` per pair, a ratio of
    `1 / (6 h)`; the default is that of h = 1024. `per_call` is what starting a kernel costs, in positions of a small
    model; a large one hides it. A wrong model costs speed, never correctness.
    """

    per_pair: float = 1.0 / (6 * 1024)
    per_call: float = 2.0

    def of(self, forwards: Sequence[Forward]) -> float:
        """The sum over the micro-batches of a pass."""
        return float(sum(f.positions + f.pairs * self.per_pair + f.calls * self.per_call for f in forwards))


def forward_of_rows(rows: Rows, lengths: Rows, *, padded: bool) -> Forward:
    """`lengths` of the rows that are computed, which may be fewer than `rows`."""
    longest, exact = int(lengths.max()), lengths.astype(np.float64)
    if padded:
        return Forward(rows, longest * len(lengths), len(lengths) * longest * (longest + 1) / 2, 1)
    return Forward(rows, int(lengths.sum()), float((exact * (exact + 1) / 2).sum()), len(lengths))


def split_tree(order: PrefixOrder, prompts: NDArray[np.int32], planner: Planner, *, training: bool) -> list[Forward]:
    """Whole prompts together where the cap allows it. `prompts`: of each row in the order.

    The cap counts distinct tokens of each group (or rows); prefixes that groups share with one another are extra.
    """
    cap = planner.cap(training=training)
    chunks = _chunks(order, prompts, cap, counts_rows=planner.counts_rows)
    sizes = np.array([_size(order, chunk, counts_rows=planner.counts_rows) for chunk in chunks], dtype=np.int64)
    parts = split_packed(sizes, cap)
    return [forward_of_tree(order, [chunks[index] for index in sorted(part.tolist())]) for part in parts]


def _chunks(order: PrefixOrder, prompts: NDArray[np.int32], cap: int, *, counts_rows: bool) -> list[range]:
    """Runs of places in the order: of one prompt, and within the cap unless a single row exceeds it."""
    chunks: list[range] = []
    start, size = 0, 0
    for place, (length, shared) in enumerate(zip(order.lengths, order.shared)):
        added = 1 if counts_rows else length - shared
        if place and (prompts[place] != prompts[place - 1] or size + added > cap):
            chunks.append(range(start, place))
            start, size = place, 0
            added = 1 if counts_rows else length
        size = added if place == start else size + added
    chunks.append(range(start, len(order.rows)))
    return chunks


def _size(order: PrefixOrder, chunk: range, *, counts_rows: bool) -> int:
    if counts_rows:
        return len(chunk)
    return order.shared[chunk.start] + sum(order.lengths[place] - order.shared[place] for place in chunk)


def forward_of_tree(order: PrefixOrder, chunks: Sequence[range]) -> Forward:
    """Chunks in order; neighbours share what they have in common, others what lies between them shares."""
    positions, pairs, calls, last = 0, 0.0, 0, -1
    rows: list[int] = []
    for chunk in chunks:
        for place in chunk:
            shared = min(order.shared[last + 1 : place + 1], default=0) if last >= 0 else 0
            length = order.lengths[place]
            positions += length - shared
            pairs += (length * (length + 1) - shared * (shared + 1)) / 2
            calls += 2 if shared else 1
            rows.append(order.rows[place])
            last = place
    return Forward(np.array(rows, dtype=np.int64), positions, pairs, calls)
