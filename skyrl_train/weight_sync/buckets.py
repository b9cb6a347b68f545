"""Weights on their way to an engine: neighbouring parameters as one flat array of bytes, with what it takes to check it.

parameters --bucket_names--> groups of names --pack_bucket--> Bucket --unpack_bucket--> parameters
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from skyrl_train.errors import EngineError

BUCKET_BYTES = 256 * 2**20
_ALIGNMENT = 16


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Some whole parameters."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """Names of torch types, e.g. `float32`."""
    shapes: tuple[tuple[int, ...], ...]
    data: NDArray[np.uint8]
    """One parameter after the other, each at a multiple of 16 bytes."""
    checksum: int
    """CRC-32 of `data`."""

    def fields(self) -> dict[str, Any]:
        """As keyword arguments."""
        return {name: getattr(self, name) for name in ("names", "dtypes", "shapes", "data", "checksum")}


def pack_bucket(tensors: Iterable[tuple[str, Tensor]]) -> Bucket:
    """Copies tensors, from wherever they are, into one bucket."""
    named = [(name, tensor.detach().to("cpu").contiguous()) for name, tensor in tensors]
    offsets, size = _offsets([tensor.numel() * tensor.element_size() for _, tensor in named])
    data = np.zeros(size, dtype=np.uint8)
    for (_, tensor), offset in zip(named, offsets):
        flat = tensor.reshape(-1).view(torch.uint8).numpy()
        data[offset : offset + len(flat)] = flat
    return Bucket(
        names=tuple(name for name, _ in named),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in named),
        shapes=tuple(tuple(tensor.shape) for _, tensor in named),
        data=data,
        checksum=zlib.crc32(data.data),
    )


def unpack_bucket(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """The parameters, copied out of the bucket. Raises EngineError where its bytes are not those that were packed."""
    if zlib.crc32(bucket.data.data) != bucket.checksum:
        raise EngineError(f"weights from {bucket.names[0]!r} on arrived damaged: their checksum differs")
    dtypes = [getattr(torch, dtype) for dtype in bucket.dtypes]
    counts = [int(np.prod(shape, dtype=np.int64)) for shape in bucket.shapes]
    sizes = [count * torch.empty(0, dtype=dtype).element_size() for count, dtype in zip(counts, dtypes)]
    offsets, size = _offsets(sizes)
    if size != len(bucket.data):
        raise EngineError(f"weights from {bucket.names[0]!r} on are {len(bucket.data)} bytes; their shapes make {size}")
    for name, dtype, shape, offset, num_bytes in zip(bucket.names, dtypes, bucket.shapes, offsets, sizes):
        flat = torch.from_numpy(bucket.data[offset : offset + num_bytes].copy())
        yield name, flat.view(dtype).view(shape)


def bucket_names(sizes: Sequence[tuple[str, int]], limit_bytes: int = BUCKET_BYTES) -> list[tuple[str, ...]]:
    """Neighbours whose sizes add up to at most `limit_bytes`; one that is larger stands alone."""
    buckets: list[list[str]] = []
    total = 0
    for name, num_bytes in sizes:
        if not buckets or total + num_bytes > limit_bytes:
            buckets.append([])
            total = 0
        buckets[-1].append(name)
        total += num_bytes
    return [tuple(bucket) for bucket in buckets]


def in_buckets(weights: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]:
    """All of them, about `BUCKET_BYTES` at a time."""
    total = 0

    def number(entry: tuple[str, Tensor]) -> int:
        nonlocal total
        total += entry[1].numel() * entry[1].element_size()
        return total // BUCKET_BYTES

    for _, group in groupby(weights, key=number):
        yield pack_bucket(group)


def _offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each part begins, and where the last ends."""
    offsets, position = [], 0
    for size in sizes:
        offsets.append(position)
        position += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets, position
