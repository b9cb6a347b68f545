"""Optimizer steps that close at a number of documents instead of at a number of prompts.

A document is a trajectory with loss, whether it is one row or one row per turn (in supervised training, an example).
Documents are taken in the batch's order and never divided between steps. In rounds, each rank fills one micro-batch
with the next documents; after the round in which the total over ranks reaches the target, the step closes. So a step
has at most one micro-batch per rank too many, and its rows are one `[start, stop)` range of the batch. What was
reached, not the target, is what the closed mini-batch counts and divides by.

Stated rounding: what is left at the end of a batch is a step of its own, however small, and nothing is carried over.
With `exact`, the last micro-batch is cut at the target. numpy only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_train.errors import BatchError

Rows = NDArray[np.int64]
"""Row numbers, or the rows' lengths."""
Admits = Callable[[int, int, int], bool]
"""Whether (rows, longest row, tokens) fit one micro-batch; a single row always does."""


@dataclass(frozen=True, kw_only=True)
class DocumentStep:
    """One optimizer step."""

    start: int
    stop: int
    """Its rows; those between that carry no loss (failed trajectories) are in no micro-batch."""
    micro_batches: tuple[tuple[Rows, ...], ...]
    """By rank, then in order: row numbers. A rank with fewer than `num_rounds` runs dummy micro-batches."""
    num_documents: int
    """Reached over all ranks: the denominator."""
    overshoot: int
    """Documents beyond the target."""
    num_documents_before: int
    """Of the same batch, consumed by earlier steps."""

    @property
    def num_rounds(self) -> int:
        """Micro-batches that every rank runs."""
        return max(len(parts) for parts in self.micro_batches)


@dataclass(frozen=True)
class _Document:
    """Rows `start` to `stop - 1` and what they need."""

    start: int
    stop: int
    longest: int
    num_tokens: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


def document_steps(
    lengths: Rows,
    trajectory_index: NDArray[np.integer[Any]],
    has_loss: NDArray[np.bool_],
    *,
    docs_per_step: int,
    num_ranks: int,
    admits: Admits,
    exact: bool = False,
) -> list[DocumentStep]:
    """The steps of one pass over a batch; none where nothing has loss.

    Args:
        lengths, trajectory_index, has_loss: `[rows]`; the rows of a trajectory lie together.
        admits: as the micro-batch strategy does for training.
    Raises BatchError for a trajectory in two places or a target below 1.
    """
    if docs_per_step < 1:
        raise BatchError(f"docs_per_step must be at least 1 to close a step; got {docs_per_step}")
    documents = _documents(lengths, trajectory_index, has_loss)
    steps: list[DocumentStep] = []
    taken = 0
    while taken < len(documents):
        ranks, count = _fill_step(documents, taken, docs_per_step, num_ranks, admits, exact, lengths)
        last = taken + count == len(documents)
        steps.append(
            DocumentStep(
                start=steps[-1].stop if steps else 0,
                stop=len(lengths) if last else documents[taken + count].start,
                micro_batches=tuple(tuple(parts) for parts in ranks),
                num_documents=count,
                overshoot=max(0, count - docs_per_step),
                num_documents_before=taken,
            )
        )
        taken += count
    return steps


def _fill_step(
    documents: list[_Document], taken: int, target: int, num_ranks: int, admits: Admits, exact: bool, lengths: Rows
) -> tuple[list[list[Rows]], int]:
    """Micro-batches of one step by rank, and how many documents from `taken` on they hold."""
    ranks: list[list[Rows]] = [[] for _ in range(num_ranks)]
    count = finished_rounds = 0
    while taken + count < len(documents):
        rank = min(range(num_ranks), key=lambda index: len(ranks[index]))
        if len(ranks[rank]) > finished_rounds:
            finished_rounds = len(ranks[rank])
            if count >= target:
                break
        most = target - count if exact else len(documents)
        group = _next_group(documents, taken + count, most, admits)
        rows = np.concatenate([np.arange(document.start, document.stop) for document in group])
        ranks[rank] += _cut(rows, lengths, admits)
        count += len(group)
        if exact and count == target:
            break
    return ranks, count


def _next_group(documents: list[_Document], first: int, most: int, admits: Admits) -> list[_Document]:
    """The documents from `first` on that fit one micro-batch together: at least one, at most `most`."""
    num_rows = longest = num_tokens = 0
    for index in range(first, min(first + most, len(documents))):
        document = documents[index]
        num_rows, num_tokens = num_rows + document.num_rows, num_tokens + document.num_tokens
        longest = max(longest, document.longest)
        if index > first and not admits(num_rows, longest, num_tokens):
            return documents[first:index]
    return documents[first : first + most]


def _cut(rows: Rows, lengths: Rows, admits: Admits) -> list[Rows]:
    """One micro-batch, or several where one document alone is too large for it."""
    if admits(len(rows), int(lengths[rows].max()), int(lengths[rows].sum())):
        return [rows]
    parts: list[Rows] = []
    start = 0
    for stop in range(1, len(rows) + 1):
        with_next = lengths[rows[start : stop + 1]]
        if stop == len(rows) or not admits(len(with_next), int(with_next.max()), int(with_next.sum())):
            parts.append(rows[start:stop])
            start = stop
    return parts


def _documents(
    lengths: Rows, trajectory_index: NDArray[np.integer[Any]], has_loss: NDArray[np.bool_]
) -> list[_Document]:
    if len(lengths) == 0:
        return []
    starts = np.flatnonzero(np.diff(trajectory_index, prepend=trajectory_index[0] - 1))
    stops = np.append(starts[1:], len(lengths))
    with_loss = np.logical_or.reduceat(has_loss, starts)
    numbers, counts = np.unique(trajectory_index[starts[with_loss]], return_counts=True)
    if (counts > 1).any():
        number = int(numbers[counts > 1][0])
        raise BatchError(f"the rows of trajectory {number} lie in two places: documents are taken in order")
    longest, num_tokens = np.maximum.reduceat(lengths, starts), np.add.reduceat(lengths, starts)
    columns = (column[with_loss].tolist() for column in (starts, stops, longest, num_tokens))
    return [_Document(*values) for values in zip(*columns)]


@lru_cache(maxsize=1024)
def reduction_schedule(num_micro_batches: int) -> tuple[bool, ...]:
    """For each micro-batch of a step, whether gradients are reduced over ranks after it: after the last one only.

    Built once for each number of micro-batches, since steps that close by documents differ in it.
    """
    if num_micro_batches < 1:
        raise BatchError(f"a step has at least one micro-batch; got {num_micro_batches}")
    return (*[False] * (num_micro_batches - 1), True)
