"""Optimizer steps that close at a number of documents instead of at a number of prompts.

A document is a trajectory with loss, whether it is one row or one row per turn (in supervised training, an example).
Documents are taken in the batch's order and never divided between steps. In rounds, each rank counts as one micro-batch
the next documents that fit; after the round in which the total over ranks reaches the target, the step closes. So a step
has at most one micro-batch per rank too many, and its rows are one `[start, stop)` range of the batch. What was
reached, not the target, is what the closed mini-batch counts and divides by. Which rows the micro-batches then hold is
for the planner to say; here they are counted.

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

from skyrl_train.batch.batch_metadata import Rows
from skyrl_train.errors import BatchError

Admits = Callable[[int, int, int], bool]
"""Whether (rows, longest row, tokens) fit one micro-batch; a single row always does, and fewer or shorter rows do too."""


@dataclass(frozen=True, kw_only=True)
class DocumentStep:
    """One optimizer step that documents close: its rows, rounds of micro-batches, and documents."""

    start: int
    stop: int
    """Its rows; those between that carry no loss (failed trajectories) are in no micro-batch."""
    num_rounds: int
    """Micro-batches that every rank runs; a rank with fewer runs dummies."""
    num_documents: int
    """Reached over all ranks: the denominator."""
    overshoot: int
    """Documents beyond the target; 0 also where the batch ended short of it."""


@dataclass(frozen=True)
class _Documents:
    """What is to be counted, `[documents]` each."""

    starts: Rows
    """Where the rows of each begin."""
    longest: Rows
    rows_before: Rows
    """Of all documents before each; one more, for the end."""
    tokens_before: Rows


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
        admits: By the stated caps, as `microbatch.training_limit` says.
    Raises BatchError for a trajectory in two places or a target below 1.
    """
    if docs_per_step < 1:
        raise BatchError(f"docs_per_step must be at least 1 to close a step; got {docs_per_step}")
    documents = _documents(lengths, trajectory_index, has_loss)
    total = len(documents.starts)
    steps: list[DocumentStep] = []
    taken = 0
    while taken < total:
        num_rounds, count = _fill_step(documents, taken, docs_per_step, num_ranks, admits, exact, lengths)
        steps.append(
            DocumentStep(
                # From where the last step ended, so that every row is of
                # a step, those of failed trajectories in between as well.
                start=steps[-1].stop if steps else 0,
                stop=len(lengths) if taken + count == total else int(documents.starts[taken + count]),
                num_rounds=num_rounds,
                num_documents=count,
                overshoot=max(0, count - docs_per_step),
            )
        )
        taken += count
    return steps


def _fill_step(
    documents: _Documents, taken: int, target: int, num_ranks: int, admits: Admits, exact: bool, lengths: Rows
) -> tuple[int, int]:
    """Rounds of one step, and how many documents from `taken` on they hold."""
    micro_batches = [0] * num_ranks
    total = len(documents.starts)
    count = finished_rounds = 0
    while taken + count < total:
        # The rank with the fewest micro-batches is next; once it has one more than all finished rounds, a round is over.
        rank = min(range(num_ranks), key=micro_batches.__getitem__)
        if micro_batches[rank] > finished_rounds:
            finished_rounds = micro_batches[rank]
            if count >= target:
                break
        first = taken + count
        fitting = _count_fitting(documents, first, min(target - count if exact else total, total - first), admits)
        # One document alone may be too large for one micro-batch: its rank then runs several.
        micro_batches[rank] += _count_parts(documents, first, admits, lengths) if fitting == 1 else 1
        count += fitting
        if exact and count == target:
            break
    return max(micro_batches), count


def _count_fitting(documents: _Documents, first: int, most: int, admits: Admits) -> int:
    """How many documents from `first` on fit one micro-batch together: at least one, at most `most`."""

    def fit(count: int) -> bool:
        stop = first + count
        num_rows = int(documents.rows_before[stop] - documents.rows_before[first])
        num_tokens = int(documents.tokens_before[stop] - documents.tokens_before[first])
        return admits(num_rows, int(documents.longest[first:stop].max()), num_tokens)

    # Twice as far with every step, then back in halves: the work grows with the logarithm of what fits.
    fitting, step = 1, 1
    while fitting + step <= most and fit(fitting + step):
        fitting, step = fitting + step, 2 * step
    # What was not admitted with the last step may be with a shorter one.
    while step:
        if fitting + step <= most and fit(fitting + step):
            fitting += step
        step //= 2
    return fitting


def _count_parts(documents: _Documents, document: int, admits: Admits, lengths: Rows) -> int:
    """Micro-batches that the rows of one document take, in order."""
    start = int(documents.starts[document])
    own = lengths[start : start + int(documents.rows_before[document + 1] - documents.rows_before[document])]
    parts, begin = 1, 0
    for stop in range(1, len(own)):
        with_next = own[begin : stop + 1]
        if not admits(len(with_next), int(with_next.max()), int(with_next.sum())):
            parts, begin = parts + 1, stop
    return parts


def _documents(lengths: Rows, trajectory_index: NDArray[np.integer[Any]], has_loss: NDArray[np.bool_]) -> _Documents:
    if len(lengths) == 0:
        none = np.zeros(0, dtype=np.int64)
        return _Documents(none, none, none, none)
    # In front of the first row stands any other number, so that a document begins there.
    starts = np.flatnonzero(np.diff(trajectory_index, prepend=trajectory_index[0] - 1))
    with_loss = np.logical_or.reduceat(has_loss, starts)
    numbers, counts = np.unique(trajectory_index[starts[with_loss]], return_counts=True)
    if (counts > 1).any():
        number = int(numbers[counts > 1][0])
        raise BatchError(f"the rows of trajectory {number} lie in two places: documents are taken in order")
    num_rows, num_tokens = np.diff(starts, append=len(lengths)), np.add.reduceat(lengths, starts)
    return _Documents(
        starts=starts[with_loss],
        longest=np.maximum.reduceat(lengths, starts)[with_loss],
        rows_before=np.concatenate([[0], np.cumsum(num_rows[with_loss])]),
        tokens_before=np.concatenate([[0], np.cumsum(num_tokens[with_loss])]),
    )


@lru_cache(maxsize=1024)
def reduction_schedule(num_micro_batches: int) -> tuple[bool, ...]:
    """For each micro-batch of a step, whether gradients are reduced over ranks after it: after the last one only.

    Built once for each number of micro-batches, since steps that close by documents differ in it.
    """
    if num_micro_batches < 1:
        raise BatchError(f"a step has at least one micro-batch; got {num_micro_batches}")
    return (*[False] * (num_micro_batches - 1), True)
