"""Several sequences in one row: no padding between them, no attention across them.

Where a sequence begins, its position ids begin again at 0, which keeps attention within it (`model/causal_lm.py`). A
batch is packed after its mini-batch was closed: the loss weights are those of the sequences, so that packing changes
neither the loss nor the gradient.

Example: `[7, 8, 9]` and `[5, 6]` become the row `[7, 8, 9, 5, 6]` with position ids `[0, 1, 2, 0, 1]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from skyrl_train.batch import Rows, TrainingInputBatch, offsets_of
from skyrl_train.batch.planner import balance_longest_first, split_packed
from skyrl_train.batch.steps import MiniBatch
from skyrl_train.errors import BatchError, counted
from skyrl_train.images import ImageSpans


def plan_packing(lengths: Rows, *, max_tokens: int, align: int = 1, num_ranks: int = 1) -> list[Rows]:
    """Return the row numbers of each bin, by first-fit decreasing; the tokens of a bin, rounded up to `align`, fit
    `max_tokens`.

    The number of bins is a multiple of `num_ranks` where there are rows enough, so that ranks have equal numbers.
    Raises BatchError for a row that does not fit a bin by itself.
    """
    capacity = max_tokens // align * align
    longest = int(lengths.max(initial=0))
    if longest > capacity:
        row = int(lengths.argmax())
        raise BatchError(
            f"row {row} has {counted(longest, 'token')}: more than a packed micro-batch of {max_tokens} tokens takes"
            + (f" in multiples of {align}" if align > 1 else "")
            + ". Raise trainer.max_tokens_per_microbatch or lower data.max_length"
        )
    # Capacity is in whole multiples of `align`, since the filled-up bin must not exceed `max_tokens` either.
    bins = split_packed(lengths, capacity)
    num_bins = min(len(lengths), -(-len(bins) // num_ranks) * num_ranks)
    if num_bins == len(bins):
        return bins
    # More bins are needed than fit tightest: dealing the rows over all of them evens out their tokens, which a rank waits
    # for; only where that overfills one are the tight bins kept and the fullest of them cut.
    order = np.argsort(-lengths, kind="stable")
    dealt = [order[positions] for positions in balance_longest_first(lengths[order], num_bins)]
    fits = max(int(lengths[rows].sum()) for rows in dealt) <= capacity
    return dealt if fits else _cut_fullest(bins, lengths, num_bins)


def _cut_fullest(bins: list[Rows], lengths: Rows, num_bins: int) -> list[Rows]:
    """Return more bins without another packing: those with most tokens, of several rows, are cut in two."""
    bins = list(bins)
    while len(bins) < num_bins:
        index = max(range(len(bins)), key=lambda number: (len(bins[number]) > 1, int(lengths[bins[number]].sum())))
        # Every other row, since rows of a bin come by falling length: halves of about the same number of tokens.
        rows = bins.pop(index)
        bins += [rows[0::2], rows[1::2]]
    return bins


def pack(mini_batch: MiniBatch, bins: Sequence[Rows], *, align: int = 1) -> MiniBatch:
    """Return the closed mini-batch with one row for each bin: its rows one after the other, then padding up to `align`.

    The denominators stay: they count sequences. A packed row has the uid and the numbers of its first sequence.
    Raises BatchError for a batch that is not closed, or bins that do not hold every row once.
    """
    batch = mini_batch.batch
    if "loss_weights" not in batch:
        raise BatchError("only a closed mini-batch can be packed: its loss weights are fixed before")
    order = np.concatenate(bins) if len(bins) else np.empty(0, dtype=np.int64)
    if not np.array_equal(np.sort(order), np.arange(batch.num_rows)):
        raise BatchError(
            f"{counted(len(order), 'row')} in bins for a batch of {batch.num_rows}: every row belongs in one of them"
        )
    rows = batch.take(torch.from_numpy(order))
    if bool(rows["loss_mask"][rows.row_offsets[:-1]].any()):
        raise BatchError("a row has loss on its first token, which the row packed before it would predict")
    positions = torch.arange(rows.num_tokens) - torch.repeat_interleave(rows.row_offsets[:-1], rows.lengths)
    rows = rows.with_columns(position_ids=positions.int())
    first = torch.from_numpy(np.cumsum([0, *[len(part) for part in bins]]))
    packed = TrainingInputBatch(
        token_columns=rows.token_columns,
        row_columns={name: column[first[:-1]] for name, column in rows.row_columns.items()},
        row_offsets=rows.row_offsets[first],
        metadata=rows.metadata.of_rows(
            (rows.metadata.uids[index] for index in first[:-1].tolist()), _packed_images(rows, first.tolist())
        ),
    )
    return replace(mini_batch, batch=align_rows(packed, align))


def _packed_images(rows: TrainingInputBatch, first: Sequence[int]) -> Iterator[ImageSpans]:
    """Yield the images of each packed row, whose first row is `first[i]` of `rows`."""
    offsets = rows.row_offsets.tolist()
    for start, stop in pairwise(first) if rows.metadata.images else ():
        yield tuple(
            span.moved(offsets[row] - offsets[start])
            for row in range(start, stop)
            for span in rows.metadata.images[row]
        )


def align_rows(batch: TrainingInputBatch, align: int) -> TrainingInputBatch:
    """Return every row filled up with padding to a multiple of `align` tokens: in a packed row, a sequence of its own."""
    missing = -batch.lengths % align
    if not int(missing.sum()):
        return batch
    offsets = offsets_of(batch.lengths + missing)
    target = torch.arange(batch.num_tokens)
    target += torch.repeat_interleave(offsets[:-1] - batch.row_offsets[:-1], batch.lengths)
    columns = {}
    for name, column in batch.token_columns.items():
        filled = column.new_zeros(int(offsets[-1]))  # what the schema pads every token column with
        if name == "position_ids":
            filled += torch.arange(len(filled)) - torch.repeat_interleave(offsets[1:] - missing, offsets.diff())
        filled[target] = column
        columns[name] = filled
    return replace(batch, token_columns=columns, row_offsets=offsets)
