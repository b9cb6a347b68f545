"""Weights that no rank puts together: each sends what it has of a bucket, or what changed of that, and receivers join it.

    rank 0   rows 0-3 of q_proj, rows 0-7 of norm, ... ─┐
    rank 1   rows 4-7 of q_proj, ...                   ─┴──> whole parameters, each as soon as its last piece has come

A value is left out of the changes where what would travel is what travelled last, to the same bits, or, with a tolerance,
where it is at most so far from that. It is compared with what the engine has, never with what it was at the last sync, so
that differences do not add up. Sender and receiver keep a copy of that in host memory, in the type in which it travels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from skyrl_train.errors import EngineError
from skyrl_train.weights import (
    Bucket,
    Memory,
    Packing,
    Piece,
    copy_out,
    dtype_name,
    host_bytes,
    index_bytes,
    require_checksum,
    slices_in,
    slices_of,
    tensors_of,
    views_of,
)

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INDEX_BYTES = 4
# Indices travel as int32; a box that they cannot reach the end of is sent whole.
_MAX_INDEX = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A box of a parameter, or what changed of it."""

    name: str
    box: Tensor
    piece: Piece
    dtype: torch.dtype
    """Type that the values travel in, to which those of `box` are rounded on their way."""
    changed: Tensor | None = None
    """Flat indices into the box; None: all of it."""


class SentWeights:
    """What a rank sent last, by which it finds out what changed."""

    def __init__(self) -> None:
        self._sent: dict[str, Tensor] = {}

    def entry(self, name: str, box: Tensor, piece: Piece, *, changes: bool, tolerance: float = 0.0) -> Entry:
        """Return what is to be sent of a box: with `changes`, those of its values alone that are more than `tolerance` from
        the last ones that were sent, where that is less. Keeps a copy."""
        last = self._sent.get(name)
        is_like = last is not None and last.shape == box.shape and last.dtype == box.dtype
        if changes and last is not None and is_like:
            # On the box's device, where comparing is quick; the copy lies in the host.
            changed = _differs(box, last.to(box.device), tolerance).flatten().nonzero().flatten()
            # A change costs its index and its value: of bfloat16 the whole box is fewer bytes where a third has changed.
            is_less = len(changed) * (_INDEX_BYTES + box.element_size()) < box.numel() * box.element_size()
            if is_less and box.numel() <= _MAX_INDEX:
                # Only what is sent: a value that stays behind is compared with what the engine has of it next time, too.
                last.view(-1)[changed.to(last.device)] = box.flatten()[changed].to(last.device)
                piece = piece._replace(num_changed=len(changed))
                return Entry(name=name, box=box, piece=piece, dtype=box.dtype, changed=changed)
        if last is None or not is_like:
            self._sent[name] = last = _empty(tuple(box.shape), box.dtype, torch.device("cpu"))
        last.copy_(box)
        return Entry(name=name, box=box, piece=piece, dtype=box.dtype)


def _differs(box: Tensor, last: Tensor, tolerance: float) -> Tensor:
    """Return where values differ: in any bit, or by more than `tolerance`, which what is no number always does."""
    if tolerance == 0.0:
        # Not as numbers: -0.0 equals 0.0, so that a sign would be lost, and a NaN differs from itself.
        bits = _BITS[box.element_size()]
        return box.view(bits) != last.view(bits)
    # In a type of 16 bits the difference itself would be rounded, across the tolerance even.
    exact = torch.float64 if box.dtype == torch.float64 else torch.float32
    # The negation of <=, since every comparison with a NaN is false.
    return ~((box.to(exact) - last.to(exact)).abs_() <= tolerance)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return fresh memory for a parameter, with anything in it."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return host_bytes(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def pack_part(
    entries: Iterable[Entry], planned: Bucket, device: torch.device, memory: Memory | None = None
) -> tuple[Bucket, Tensor]:
    """Return what a rank sends of `planned`, and its bytes on `device`, in `memory` where that is given. They are rounded
    on their way there."""
    entries = tuple(entries)
    part = Bucket(
        names=tuple(entry.name for entry in entries),
        dtypes=tuple(dtype_name(entry.dtype) for entry in entries),
        shapes=tuple(tuple(entry.box.shape) for entry in entries),
        pieces=tuple(entry.piece for entry in entries),
        update=planned.update,
    )
    slices, size = slices_of(part)
    packing = Packing(size, device, memory)
    for entry, (start, _) in zip(entries, slices):
        if entry.changed is None:
            packing.put(start, entry.box, entry.dtype)
        else:
            packing.put(start, entry.changed, torch.int32)
            # index_bytes leaves a gap behind an odd number: torch views
            # bytes as a type from multiples of its size on alone.
            packing.put(start + index_bytes(len(entry.changed)), entry.box.reshape(-1)[entry.changed], entry.dtype)
    return replace(part, checksum=packing.checksum()), packing.flat


class Arrivals:
    """What an engine has of an update that is under way, and of the one before it where changes alone may come."""

    def __init__(self) -> None:
        self._open: dict[str, Tensor] = {}
        self._num_missing: dict[str, int] = {}
        self._kept: dict[str, Tensor] = {}
        self._memory = Memory()

    def begin(self) -> None:
        """Forget what an update that failed has left."""
        self._open, self._num_missing = {}, {}

    def take(self, bucket: Bucket, flat_of: Callable[[Bucket], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters that are whole now, as the bucket has them, in memory of their own. `flat_of` gives the bytes of
        a part, from which they are copied and summed in one pass, so that they may be anybody's.

        Raises EngineError where bytes are damaged or missing, and for changes of what was not kept.
        """
        # What was kept is not what the engine has from here on: changes must not go into it.
        if bucket.update == "":
            self._kept = {}
        if bucket.tensors:
            yield from tensors_of(bucket)
            return
        self._open = {}
        for part in bucket.parts or (bucket,):
            yield from self._take_part(part, flat_of(part), bucket)
        if lacking := [name for name in bucket.names if self._num_missing.get(name)]:
            raise EngineError(f"of {lacking[0]} {self._num_missing[lacking[0]]} values did not arrive")

    def _take_part(self, part: Bucket, flat: Tensor, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        slices = slices_in(part, flat)
        pieces = part.pieces or tuple(Piece((0,) * len(shape), tuple(shape)) for shape in part.shapes)
        places: list[tuple[Tensor, Tensor]] = []
        for name, dtype, shape, piece in zip(part.names, part.dtypes, part.shapes, pieces):
            whole = self._whole(name, piece, getattr(torch, dtype), bucket, flat.device)
            places.append((whole, whole[tuple(slice(low, low + size) for low, size in zip(piece.offset, shape))]))
        # Whole boxes are copied and summed in one pass, so that a damaged one is written before it is found out. It
        # goes no further: no parameter of the part is yielded, and an engine whose update failed never computes again.
        boxes = [(start, box) for (start, _), (_, box), piece in zip(slices, places, pieces) if piece.num_changed < 0]
        require_checksum(part, copy_out(flat, boxes))
        for name, piece, (start, num_bytes), (whole, box) in zip(part.names, pieces, slices, places):
            # Changes wait for the checksum: damaged indices would overwrite other values of the copy.
            if piece.num_changed > 0:
                _put_changes(box, flat[start : start + num_bytes], piece.num_changed)
            # The whole box, even where a few values of it came: the others are in the copy that is kept.
            self._num_missing[name] = self._num_missing.get(name, whole.numel()) - box.numel()
            if not self._num_missing[name]:
                # The memory is taken again once the caller has let go of it, which this reference would prevent.
                self._open.pop(name, None)
                yield name, whole

    def _whole(self, name: str, piece: Piece, dtype: torch.dtype, bucket: Bucket, device: torch.device) -> Tensor:
        """The tensor that the pieces go to: one of this update alone, or that which is kept, in host memory."""
        shape = tuple(piece.whole)
        if bucket.update == "":
            if not self._open:
                # All parameters of the bucket in one block, so that later buckets can take it again.
                planned = replace(bucket, pieces=(), parts=())
                slices, num_bytes = slices_of(planned)
                self._open = dict(zip(bucket.names, views_of(planned, slices, self._memory.take(num_bytes, device))))
            if name not in self._open:
                self._open[name] = _empty(shape, dtype, device)
            return self._open[name]
        kept = self._kept.get(name)
        if kept is None or kept.shape != shape or kept.dtype != dtype:
            if bucket.update == "changes":
                raise EngineError(f"only what changed of {name} arrived, at an engine that does not have the rest")
            kept = self._kept[name] = _empty(shape, dtype, torch.device("cpu"))
        return kept


def _put_changes(box: Tensor, data: Tensor, count: int) -> None:
    """Write so many values of a box, which lie behind their indices."""
    # torch writes by indices of int64 alone.
    indices = data[: _INDEX_BYTES * count].view(torch.int32).long()
    # A view, but a copy of a box that is some columns of its parameter: that has to be written back.
    values = box.flatten()
    values[indices.to(values.device)] = data[index_bytes(count) :].view(box.dtype).to(values.device)
    if not box.is_contiguous():
        box.copy_(values.view(box.shape))
