"""Weights on their way to an engine: neighbouring parameters as one flat array of bytes, with what it takes to check it.

    parameters --bucket_names--> groups of names --pack--> Bucket + bytes --whatever carries them--> unpack --> parameters

The bytes travel in the bucket, in a file, in memory that its owner lends, or through a group of processes; the bucket
says which of it and how to tell that they arrived.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from skyrl_train.errors import EngineError

BUCKET_BYTES = 256 * 2**20
_ALIGNMENT = 16
_ROW_BYTES = 1024
"""A bucket is a whole number of these."""
_COLUMN_FACTOR = 0x9E3779B2
"""Even, so that every factor in the sum below is odd and no change of a single word can vanish modulo 2^64."""
_SUMMED_BYTES = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Some whole parameters. Where none of `data`, `path` and `handles` is given, the bytes come through a group."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """Names of torch types, e.g. `float32`."""
    shapes: tuple[tuple[int, ...], ...]
    checksum: int | None = None
    """Of the bytes; None where it comes behind them."""
    data: NDArray[np.uint8] | None = None
    """One parameter after the other, each at a multiple of 16 bytes."""
    path: str = ""
    """A file that holds the bytes."""
    handles: Mapping[str, Any] = field(default_factory=dict)
    """Memory that holds them, by device (`weight_sync/lending.py`)."""

    @property
    def num_bytes(self) -> int:
        """Of the whole bucket, gaps included."""
        return _slices(self.dtypes, self.shapes)[1]

    def fields(self) -> dict[str, Any]:
        """As keyword arguments."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}


@dataclass(frozen=True, kw_only=True)
class Receiver:
    """One worker of an engine, as far as weights on their way to it are concerned."""

    device: str
    """Where it computes (`device_name` of `weight_sync/lending.py`)."""
    dtype: str
    """Type of all its matrices, e.g. `bfloat16`; empty where they differ, as where some are quantized."""


def wire_dtype(receivers: Iterable[Receiver]) -> str:
    """The type that matrices travel in: `bfloat16` or `float16` where all receivers keep theirs in it, which would
    round them on arrival just the same; else empty, for that of each parameter."""
    found = {receiver.dtype for receiver in receivers}
    return found.pop() if found in ({"bfloat16"}, {"float16"}) else ""


def pack(tensors: Iterable[tuple[str, Tensor]], device: torch.device) -> tuple[Bucket, Tensor]:
    """Copies tensors, from wherever they are, into one flat uint8 tensor on `device`; the bucket describes it."""
    named = [(name, tensor.detach()) for name, tensor in tensors]
    bucket = Bucket(
        names=tuple(name for name, _ in named),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in named),
        shapes=tuple(tuple(tensor.shape) for _, tensor in named),
    )
    slices, size = _slices(bucket.dtypes, bucket.shapes)
    flat = torch.zeros(size, dtype=torch.uint8, device=device)
    for (_, tensor), (start, num_bytes) in zip(named, slices):
        flat[start : start + num_bytes].view(tensor.dtype).copy_(tensor.reshape(-1))
    return replace(bucket, checksum=checksum_of(flat)), flat


def unpack(bucket: Bucket, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The parameters, as views of `flat`. Raises EngineError where its bytes are not those that were packed."""
    slices, size = _slices(bucket.dtypes, bucket.shapes)
    if size != len(flat):
        raise EngineError(f"weights from {bucket.names[0]!r} on are {len(flat)} bytes; their shapes make {size}")
    if checksum_of(flat) != bucket.checksum:
        raise EngineError(f"weights from {bucket.names[0]!r} on arrived damaged: their checksum differs")
    for name, dtype, shape, (start, num_bytes) in zip(bucket.names, bucket.dtypes, bucket.shapes, slices):
        yield name, flat[start : start + num_bytes].view(getattr(torch, dtype)).view(shape)


def pack_bucket(tensors: Iterable[tuple[str, Tensor]]) -> Bucket:
    """A bucket that carries its bytes."""
    bucket, flat = pack(tensors, torch.device("cpu"))
    return replace(bucket, data=flat.numpy())


def unpack_bucket(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """The parameters, copied out of a bucket that carries its bytes. Raises EngineError as `unpack` does."""
    yield from unpack(bucket, copied(bucket))


def copied(bucket: Bucket) -> Tensor:
    """The bytes that a bucket carries, or that are in its file, on the CPU and in memory of their own."""
    if bucket.data is not None:
        return torch.from_numpy(bucket.data.copy())
    return torch.from_numpy(np.fromfile(bucket.path, dtype=np.uint8))


def in_file(bucket: Bucket, path: Path) -> Bucket:
    """The same bucket, the bytes that it carries moved to a file. Raises OSError."""
    if bucket.data is None:
        raise ValueError("the bucket does not carry its bytes")
    bucket.data.tofile(path)
    return replace(bucket, data=None, path=str(path.absolute()))


def checksum_of(flat: Tensor) -> int:
    """CRC-32 on a CPU; on another device, where the bytes are to stay, a weighted sum of their words modulo 2^64, which
    notices every change of one word. Sender and receiver hold a bucket on devices of one kind."""
    return zlib.crc32(flat.numpy().data) if flat.device.type == "cpu" else weighted_sum(flat)


def weighted_sum(flat: Tensor) -> int:
    """Sum over rows r and columns c of `word * (2r + 1 + factor * (2c + 1))` modulo 2^64; 256 words of 32 bits a row."""
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    columns = (2 * torch.arange(_ROW_BYTES // 4, device=flat.device) + 1) * _COLUMN_FACTOR
    row = 0
    for start in range(0, len(flat), _SUMMED_BYTES):
        part = flat[start : start + _SUMMED_BYTES]
        words = part.view(torch.int32).view(-1, _ROW_BYTES // 4).to(torch.int64)
        rows = 2 * torch.arange(row, row + len(words), device=flat.device) + 1
        total += (words.sum(dim=1) * rows).sum() + (words.sum(dim=0) * columns).sum()
        row += len(words)
    return int(total)


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
    """All of them, in buckets that carry their bytes."""
    return map(pack_bucket, bucket_groups(weights))


def bucket_groups(weights: Iterable[tuple[str, Tensor]]) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """All of them, about `BUCKET_BYTES` at a time. Each group must be used up before the next."""
    total = 0

    def number(entry: tuple[str, Tensor]) -> int:
        nonlocal total
        total += entry[1].numel() * entry[1].element_size()
        return total // BUCKET_BYTES

    for _, group in groupby(weights, key=number):
        yield group


def size_of(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of one parameter."""
    return int(np.prod(shape, dtype=np.int64)) * torch.empty(0, dtype=getattr(torch, dtype)).element_size()


def _slices(dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> tuple[list[tuple[int, int]], int]:
    """(start, bytes) of each parameter, and the size of the bucket."""
    slices, position = [], 0
    for dtype, shape in zip(dtypes, shapes):
        num_bytes = size_of(dtype, shape)
        slices.append((position, num_bytes))
        position += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    return slices, -(-position // _ROW_BYTES) * _ROW_BYTES
