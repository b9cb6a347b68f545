"""Examples to the closed mini-batch of one optimizer step.

`DefaultCollator` gives each example a row of its own, which the learner pads where it computes. `PackedDataCollator`
puts several examples in a row, as many as a micro-batch takes. Loss weights are set before anything is packed, so both
have the same loss and the same gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from skyrl_train.batch import BatchMetadata, TrainingInputBatch, offsets_of
from skyrl_train.batch.steps import MiniBatch, close_mini_batch
from skyrl_train.data.sft.packing import align_rows, pack, plan_packing
from skyrl_train.data.sft.token_store import ExampleSet, Ints

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
        row_offsets=offsets_of(torch.from_numpy(flat.lengths)),
        metadata=BatchMetadata(
            uids=_uids(examples, indices),
            global_step=step,
            weight_version=step - 1,
            images=images if any(images) else (),
        ),
    )


def _uids(examples: ExampleSet, indices: Ints) -> tuple[str, ...]:
    return tuple(examples.name(index) for index in np.asarray(indices).tolist())
