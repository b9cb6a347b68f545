"""Examples to the closed mini-batch of one optimizer step.

`DefaultCollator` gives each example a row of its own, which the learner pads where it computes. `PackedDataCollator`
puts several examples in a row, as many as a micro-batch takes: no padding between them, no attention across them. Where
one begins, its position ids begin again at 0, which keeps attention within it (`model/causal_lm.py`). A batch is packed
after its mini-batch was closed: the loss weights are those of the examples, so that packing changes neither the loss nor
the gradient.

Example: `[7, 8, 9]` and `[5, 6]` become the row `[7, 8, 9, 5, 6]` with position ids `[0, 1, 2, 0, 1]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from skyrl_train.batch import BatchMetadata, Rows, TrainingInputBatch, offsets_of
from skyrl_train.batch.planner import balance_longest_first, split_packed
from skyrl_train.batch.steps import MiniBatch, close_mini_batch
from skyrl_train.data.sft.token_store import ExampleSet, Ints
from skyrl_train.errors import BatchError, counted
from skyrl_train.images import ImageSpans

LOSS_REDUCTION = "token_mean"
"""Every trained token of the step weighs the same, on whatever rank and in whatever row it is computed."""


Collator = Callable[[Ints, int], MiniBatch]
"""`(indices of examples, step) -> their mini-batch`: a pure function of both, so that any thread may call it."""


class DefaultCollator:
    """One row for each example, in the order given."""

    def __init__(self, examples: ExampleSet, *, align: int = 1) -> None:
        """`align`: rows are filled up with padding to a multiple of so many tokens."""
        self._examples = examples
        self._align = align

    def __call__(self, indices: Ints, step: int) -> MiniBatch:
        """Return the closed mini-batch of the examples `indices`."""
        closed = close_examples(self._examples, indices, step=step)
        return MiniBatch(batch=align_rows(closed.batch, self._align), denominators=closed.denominators)


class PackedDataCollator:
    """Rows of several examples, packed by first-fit decreasing."""

    def __init__(self, examples: ExampleSet, *, max_tokens_per_row: int, align: int = 1, num_ranks: int = 1) -> None:
        """
        Args:
            max_tokens_per_row: Never exceeded, padding included.
            align: Rows are filled up with padding to a multiple of so many tokens.
            num_ranks: The number of rows is a multiple of it where there are examples enough.
        """
        self._examples = examples
        self._max_tokens_per_row = max_tokens_per_row
        self._align = align
        self._num_ranks = num_ranks

    def __call__(self, indices: Ints, step: int) -> MiniBatch:
        """Return the closed mini-batch of the examples `indices`. Raises BatchError for one that does not fit a row."""
        closed = close_examples(self._examples, indices, step=step)
        bins = plan_packing(
            self._examples.lengths[indices],
            max_tokens=self._max_tokens_per_row,
            align=self._align,
            num_ranks=self._num_ranks,
        )
        return pack(closed, bins, align=self._align)


def close_examples(examples: ExampleSet, indices: Ints, *, step: int) -> MiniBatch:
    """Return one row for each example, with the loss weights and denominators of the step."""
    return close_mini_batch(
        example_batch(examples, indices, step=step), loss_reduction=LOSS_REDUCTION, max_sequence_length_for_norm=1
    )


def example_batch(examples: ExampleSet, indices: Ints, *, step: int) -> TrainingInputBatch:
    """Return one row for each example: each is a prompt, and a trajectory, of its own."""
    flat, images = examples.gather(indices), examples.images(indices)
    num_rows = len(indices)
    numbers = torch.arange(num_rows, dtype=torch.int32)
    return TrainingInputBatch(
        token_columns={
            "input_ids": torch.from_numpy(flat.input_ids),
            "loss_mask": torch.from_numpy(flat.loss_mask),
            "rewards": torch.zeros(len(flat.input_ids)),
        },
        row_columns={
            "prompt_index": numbers,
            "trajectory_index": numbers,
            "step_index": torch.zeros(num_rows, dtype=torch.int32),
            "is_last_step": torch.ones(num_rows, dtype=torch.bool),
            "is_padding": torch.zeros(num_rows, dtype=torch.bool),
        },
        row_offsets=torch.from_numpy(flat.offsets),
        metadata=BatchMetadata(
            uids=tuple(map(examples.name, indices.tolist())),
            global_step=step,
            weight_version=step - 1,
            images=images if any(images) else (),
        ),
    )


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
    # More bins are needed than fit tightest: balancing the rows over all of them evens out their tokens, which a rank waits
    # for; only where that overfills one are the tight bins kept and the fullest of them cut.
    order = np.argsort(-lengths, kind="stable")
    balanced = [order[positions] for positions in balance_longest_first(lengths[order], num_bins)]
    fits = max(int(lengths[rows].sum()) for rows in balanced) <= capacity
    return balanced if fits else _cut_fullest(bins, lengths, num_bins)


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
