"""A batch to ranks and back: flat numpy arrays in the object store, which readers map without copying."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from skyrl_train.batch.minibatch import LossDenominators, MiniBatch
from skyrl_train.batch.training_batch import BatchMetadata, TrainingInputBatch


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """A rank's rows on their way. torch tensors would be copied, numpy arrays are not."""

    token_columns: Mapping[str, NDArray[Any]]
    row_columns: Mapping[str, NDArray[Any]]
    row_offsets: NDArray[np.int64]
    metadata: BatchMetadata
    denominators: LossDenominators | None = None
    """Of the whole mini-batch that these rows are a part of."""


def pack(batch: TrainingInputBatch, denominators: LossDenominators | None = None) -> Shipped:
    """The rows as arrays that share their memory."""
    return Shipped(
        token_columns={name: column.numpy() for name, column in batch.token_columns.items()},
        row_columns={name: column.numpy() for name, column in batch.row_columns.items()},
        row_offsets=batch.row_offsets.numpy(),
        metadata=batch.metadata,
        denominators=denominators,
    )


def unpack(shipped: Shipped) -> TrainingInputBatch:
    """The rows as tensors over the arrays' memory, which is read-only; no operation of a batch writes in place."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return TrainingInputBatch(
            token_columns={name: torch.from_numpy(array) for name, array in shipped.token_columns.items()},
            row_columns={name: torch.from_numpy(array) for name, array in shipped.row_columns.items()},
            row_offsets=torch.from_numpy(shipped.row_offsets),
            metadata=shipped.metadata,
        )


def unpack_mini_batch(shipped: Shipped) -> MiniBatch:
    """A rank's part of a closed mini-batch. Raises ValueError for rows that were shipped without denominators."""
    if shipped.denominators is None:
        raise ValueError("these rows are not part of a closed mini-batch")
    return MiniBatch(batch=unpack(shipped), denominators=shipped.denominators)
