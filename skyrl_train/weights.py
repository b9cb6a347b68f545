"""The weights of a model and their way to an engine: neighbouring parameters as one flat array of bytes, with what it takes
to check it.

    ModelWeights --buckets--> groups of names --WeightSender--> Bucket + bytes --a transport--> unpack --> parameters

The bytes travel in the bucket, in a file, in memory that its owner exports, or through a group of processes; the bucket
says which of it and how to tell that they arrived.

The memory that they are packed into and their checksum are what a sync costs beyond copying. On a core that copies
18 GB a second, writing to fresh memory of torch's makes it 2.5, to fresh memory of NumPy's 12, and a CRC-32 runs at 7
(`scripts/bench/weight_sync.py --in-process` compares).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from skyrl_train.config.models import WEIGHT_BUCKET_BYTES
from skyrl_train.endpoints import Endpoint, LocalEndpoint, Pending, Rendezvous
from skyrl_train.errors import EngineError

_ALIGNMENT = 16
_ROW_BYTES = 1024
"""A bucket is a whole number of these."""


Update = Literal["", "keep", "changes"]
"""What a sync sends: all weights; all, of which receivers keep a copy; or what changed since, which goes into that copy."""


class Piece(NamedTuple):
    """What an entry of a bucket is of its parameter: a box of it."""

    offset: tuple[int, ...]
    whole: tuple[int, ...]
    """Shape of the parameter."""
    num_changed: int = -1
    """How many values of the box are there, behind as many int32 indices into it, flat; -1: all values and no index."""


Box = tuple[int, tuple[int, ...], tuple[int, ...]]
"""What a rank has of a parameter: its place among the names of a bucket, where the box begins in it, and the box's shape."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Some whole parameters. Where none of `data`, `path`, `handles` and `tensors` is given, the bytes come through a
    group of processes."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """Names of torch types, e.g. `float32`."""
    shapes: tuple[tuple[int, ...], ...]
    checksum: int | None = None
    """Checksum of the bytes; None while they are only planned."""
    data: NDArray[np.uint8] | None = None
    """One parameter after the other, each at a multiple of 16 bytes."""
    path: str = ""
    """A file that holds the bytes."""
    handles: Mapping[str, Any] = field(default_factory=dict)
    """Exported memory that holds them, by device (`weight_sync/cuda_ipc.py`)."""
    tensors: tuple[Tensor, ...] = ()
    """The parameters themselves, within one process."""
    pieces: tuple[Piece, ...] = ()
    """Where there are any, each entry is a piece of the parameter whose name it has; else it is whole."""
    parts: tuple[Bucket, ...] = ()
    """What each rank sent of these parameters; they carry the bytes then."""
    rank: int = 0
    """Of who sends the bytes, where they come through a group of processes."""
    update: Update = ""
    tolerance: float = 0.0
    """Of changes: values that are at most so far from those that were sent last are left out."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole bucket, gaps included."""
        return slices_of(self)[1]

    def fields(self) -> dict[str, Any]:
        """Return what passes to another process, as keyword arguments."""
        plain = {
            entry.name: getattr(self, entry.name)
            for entry in fields(self)
            if entry.name not in ("tensors", "parts", "tolerance")
        }
        return plain | {"parts": [part.fields() for part in self.parts]}


def bucket_of(fields: dict[str, Any]) -> Bucket:
    """Return the bucket whose `fields` these are, which may have come as JSON."""
    return Bucket(
        names=tuple(fields["names"]),
        dtypes=tuple(fields["dtypes"]),
        shapes=tuple(tuple(shape) for shape in fields["shapes"]),
        checksum=fields["checksum"],
        data=fields["data"],
        path=fields["path"],
        handles=fields["handles"] or {},
        pieces=tuple(Piece(tuple(offset), tuple(whole), count) for offset, whole, count in fields["pieces"]),
        parts=tuple(bucket_of(part) for part in fields["parts"]),
        rank=fields["rank"],
        update=fields["update"],
    )


def pack(
    tensors: Iterable[tuple[str, Tensor]], device: torch.device, memory: Memory | None = None
) -> tuple[Bucket, Tensor]:
    """Copies tensors, from wherever they are, into one flat uint8 tensor on `device`; the bucket describes it. `memory`: of
    those before; None takes fresh memory."""
    named = [(name, tensor.detach()) for name, tensor in tensors]
    bucket = Bucket(
        names=tuple(name for name, _ in named),
        dtypes=tuple(dtype_name(tensor.dtype) for _, tensor in named),
        shapes=tuple(tuple(tensor.shape) for _, tensor in named),
    )
    slices, size = slices_of(bucket)
    packing = Packing(size, device, memory)
    for (_, tensor), (start, _) in zip(named, slices):
        packing.put(start, tensor, tensor.dtype)
    return replace(bucket, checksum=packing.checksum()), packing.flat


def unpack(bucket: Bucket, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The parameters, as views of `flat`. Raises EngineError where its bytes are not those that were packed."""
    slices = slices_in(bucket, flat)
    require_checksum(bucket, checksum_of(flat))
    yield from zip(bucket.names, views_of(bucket, slices, flat))


def slices_in(bucket: Bucket, flat: Tensor) -> list[tuple[int, int]]:
    """Return where each entry begins in `flat`, and its bytes. Raises EngineError where it has another size."""
    slices, size = slices_of(bucket)
    if size != len(flat):
        raise EngineError(f"weights from {_first(bucket)!r} on are {len(flat)} bytes; their shapes make {size}")
    return slices


def views_of(bucket: Bucket, slices: Sequence[tuple[int, int]], flat: Tensor) -> list[Tensor]:
    """Return the parameters of a bucket of whole ones as views of `flat`."""
    return [
        flat[start : start + num_bytes].view(getattr(torch, dtype)).view(shape)
        for dtype, shape, (start, num_bytes) in zip(bucket.dtypes, bucket.shapes, slices)
    ]


def require_checksum(bucket: Bucket, found: int) -> None:
    """Raise EngineError where bytes whose checksum was found are not those that were packed."""
    if found != bucket.checksum:
        raise EngineError(f"weights from {_first(bucket)!r} on arrived damaged: their checksum differs")


def _first(bucket: Bucket) -> str:
    return bucket.names[0] if bucket.names else ""


def pack_bucket(tensors: Iterable[tuple[str, Tensor]], memory: Memory | None = None) -> Bucket:
    """Return a bucket that carries its bytes, in `memory` where that is given."""
    bucket, flat = pack(tensors, torch.device("cpu"), memory)
    return replace(bucket, data=flat.numpy())


def unpack_bucket(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """The parameters, copied out of a bucket that carries its bytes. Raises EngineError as `unpack` does."""
    flat = carried_bytes(bucket)
    slices = slices_in(bucket, flat)
    own = views_of(bucket, slices, host_bytes(len(flat)))
    require_checksum(bucket, copy_out(flat, [(start, tensor) for (start, _), tensor in zip(slices, own)]))
    yield from zip(bucket.names, own)


def carried_bytes(bucket: Bucket) -> Tensor:
    """Return the bytes that a bucket carries, or that are in its file, on the CPU and where they are: to be read alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        if bucket.data is not None:
            return torch.from_numpy(bucket.data)
        is_empty = not Path(bucket.path).stat().st_size  # which cannot be mapped
        return torch.from_numpy(np.empty(0, np.uint8) if is_empty else np.memmap(bucket.path, np.uint8, mode="r"))


def in_file(bucket: Bucket, path: Path) -> Bucket:
    """Return the same bucket, the bytes that it carries moved to a file. Raises OSError."""
    if bucket.data is None:
        raise ValueError("the bucket does not carry its bytes")
    bucket.data.tofile(path)
    return replace(bucket, data=None, path=str(path.absolute()))


def bucket_names(sizes: Sequence[tuple[str, int]], limit_bytes: int = WEIGHT_BUCKET_BYTES) -> list[tuple[str, ...]]:
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


def dtype_name(dtype: torch.dtype) -> str:
    """Return a type as buckets name it, e.g. `float32`."""
    return str(dtype).removeprefix("torch.")


def size_of(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of one parameter."""
    return int(np.prod(shape, dtype=np.int64)) * torch.empty(0, dtype=getattr(torch, dtype)).element_size()


def slices_of(bucket: Bucket) -> tuple[list[tuple[int, int]], int]:
    """Return (start, bytes) of each entry, and the size of the bucket."""
    slices, position = [], 0
    for index, (dtype, shape) in enumerate(zip(bucket.dtypes, bucket.shapes)):
        count = bucket.pieces[index].num_changed if bucket.pieces else -1
        num_bytes = size_of(dtype, shape) if count < 0 else index_bytes(count) + size_of(dtype, (count,))
        slices.append((position, num_bytes))
        position += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    return slices, -(-position // _ROW_BYTES) * _ROW_BYTES


def index_bytes(count: int) -> int:
    """Return the bytes of so many indices ahead of their values, which begin at a multiple of 8."""
    return 4 * (count + count % 2)


@dataclass(frozen=True, kw_only=True)
class StreamPlan:
    """What a sync of the same ranks to the same workers brings, each time."""

    sender_nodes: tuple[str, ...]
    """Node of each rank."""
    receiver_nodes: tuple[str, ...]
    """Node of each worker of an engine, those of the first engine first."""
    buckets: tuple[Bucket, ...]
    boxes: tuple[tuple[tuple[Box, ...], ...], ...]
    """What each rank has of each bucket, by rank and bucket."""

    def part(self, rank: int, index: int, changed: Sequence[int] = ()) -> Bucket:
        """Return what a rank sends of the bucket of this index: `changed` of each box, all of it where nothing is given."""
        planned, boxes = self.buckets[index], self.boxes[rank][index]
        counts = changed or (-1,) * len(boxes)
        return Bucket(
            names=tuple(planned.names[place] for place, _, _ in boxes),
            dtypes=tuple(planned.dtypes[place] for place, _, _ in boxes),
            shapes=tuple(shape for _, _, shape in boxes),
            pieces=tuple(
                Piece(offset, planned.shapes[place], count) for (place, offset, _), count in zip(boxes, counts)
            ),
            rank=rank,
        )

    def fields(self) -> dict[str, Any]:
        """Return what passes to another process, in plain types."""
        return {**vars(self), "buckets": [bucket.fields() for bucket in self.buckets]}


def plan_of(fields: Mapping[str, Any]) -> StreamPlan:
    """Return the plan whose `fields` these are, which may have come as JSON."""
    boxes = tuple(
        tuple(tuple((place, tuple(offset), tuple(shape)) for place, offset, shape in bucket) for bucket in rank)
        for rank in fields["boxes"]
    )
    return StreamPlan(
        sender_nodes=tuple(fields["sender_nodes"]),
        receiver_nodes=tuple(fields["receiver_nodes"]),
        buckets=tuple(map(bucket_of, fields["buckets"])),
        boxes=boxes,
    )


Scores = Callable[[Any], Tensor]
"""Log-probabilities of a `TrainingInputBatch`, as `Learner.forward` gives them."""


@dataclass(frozen=True, kw_only=True)
class ParameterFact:
    """What can be known of a parameter without gathering it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Whole, however it is sharded."""


def facts_of(parameters: Mapping[str, Tensor]) -> tuple[ParameterFact, ...]:
    """Return a fact for each tensor, in order."""
    return tuple(
        ParameterFact(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape))
        for name, tensor in parameters.items()
    )


class WeightSender:
    """The weights of one rank's model. Methods that gather are called by all ranks, in step and with the same names.

    `RankSender` of `weight_sync/sender.py` does all of it.
    """

    def describe(self) -> tuple[ParameterFact, ...]:
        """Return a fact for every parameter, tied ones once, in the model's order; an adapter is part of what it adapts."""
        raise NotImplementedError

    def describe_adapter(self) -> tuple[ParameterFact, ...]:
        """Return the facts of the adapter by itself, under names of its own; none where there is no adapter."""
        raise NotImplementedError

    def share(self, planned: Bucket) -> Bucket:
        """Return the parameters of `planned` themselves, whole on every rank, for who reads them in this process before they
        change."""
        raise NotImplementedError

    def carry(self, planned: Bucket) -> Bucket:
        """Return the bytes of the parameters of `planned`, in its types, on rank 0; `planned` itself on other ranks."""
        raise NotImplementedError

    def carry_part(self, planned: Bucket) -> Bucket:
        """Return the bytes of what this rank has of the parameters of `planned`: among all ranks, each value once. Where
        `planned.update` asks for changes, of those values alone that changed since this was called last."""
        raise NotImplementedError

    def write(self, planned: Bucket, path: Path) -> Bucket:
        """Have rank 0 write them to a file. Raises OSError where the disk refuses."""
        raise NotImplementedError

    def free_port(self) -> int:
        """Return a port of this node that nobody listens on at this moment."""
        raise NotImplementedError

    def boxes(self, planned: Sequence[Bucket]) -> tuple[tuple[Box, ...], ...]:
        """Return what `carry_part` would hand over of each bucket."""
        raise NotImplementedError

    def take_plan(self, plan: StreamPlan) -> None:
        """Keep what the syncs are that follow the next `meet`."""
        raise NotImplementedError

    def meet(self, rendezvous: Rendezvous) -> None:
        """Join the other ranks and the engines' workers by the plan, in place of any whom this rank had met."""
        raise NotImplementedError

    def stream(self, version: int, update: Update, tolerance: float) -> int:
        """Send this rank's parts of all buckets to those whom `meet` met, who must be waiting, and return their bytes."""
        raise NotImplementedError

    def device(self) -> str:
        """Return the name of the device on which this rank computes, the same in every process that uses it."""
        raise NotImplementedError

    def export(self, planned: Bucket, devices: Collection[str]) -> Bucket:
        """Export the memory of these parameters until the next `export` or `close_export`, on a rank whose device is among
        `devices`; the others return `planned`, since nobody would ever open their copy."""
        raise NotImplementedError

    def close_export(self) -> None:
        """Take the exported memory back, which nobody reads any more. Idempotent."""
        raise NotImplementedError


class ModelWeights:
    """The weights that a model has when they are read, whether it is in this process or spread over ranks in others.

    Iterating gives whole tensors under their Hugging Face names, tied ones once, in the model's order. Whoever can do with
    less asks for buckets, which need not pass through this process.
    """

    def __init__(self, senders: Endpoint[WeightSender], *, role: str = "policy", scores: Scores | None = None) -> None:
        """
        Args:
            senders: One for each rank.
            role: Model that the weights are of, for who shares its devices.
            scores: Scores rows with these weights; None for weights that belong to no model, as those of a checkpoint.
        """
        self.senders, self.role, self.scores = senders, role, scores

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for pending in self.handed_over(self.buckets()):
            yield from tensors_of(pending.wait()[0])

    def buckets(
        self, *, adapter_only: bool = False, dtype: str = "", update: Update = "", tolerance: float = 0.0
    ) -> list[Bucket]:
        """Return all weights, or those of the adapter, in buckets that say what they will hold: `update` and `tolerance` of
        which values.

        `dtype` is what float32 matrices are rounded to on their way; empty leaves them. Vectors travel as they are: they
        are few bytes, and engines keep some of them in float32 whatever their matrices are in.
        """
        describe = WeightSender.describe_adapter if adapter_only else WeightSender.describe
        facts = {fact.name: fact for fact in self.senders.call(describe, "sync")[0]}
        types = {
            name: dtype
            if dtype and not adapter_only and fact.dtype == "float32" and len(fact.shape) > 1
            else fact.dtype
            for name, fact in facts.items()
        }
        sizes = [(name, size_of(types[name], fact.shape)) for name, fact in facts.items()]
        return [
            Bucket(
                names=names,
                dtypes=tuple(types[name] for name in names),
                shapes=tuple(facts[name].shape for name in names),
                update=update,
                tolerance=tolerance,
            )
            for names in bucket_names(sizes)
        ]

    def handed_over(self, buckets: Sequence[Bucket], *, in_parts: bool = False) -> Iterator[Pending[Bucket]]:
        """Have rank 0 hand over one bucket after the other: the tensors themselves within this process, else a copy of
        their bytes; `in_parts`, each rank what it has of them. While the caller uses one the ranks prepare the next."""
        whole = WeightSender.share if self.senders.is_local else WeightSender.carry
        method = WeightSender.carry_part if in_parts else whole
        pending = [self.senders.begin(method, "sync", bucket) for bucket in buckets[:1]]
        for index in range(len(buckets)):
            current = pending.pop()
            current.wait()
            pending += [self.senders.begin(method, "sync", bucket) for bucket in buckets[index + 1 : index + 2]]
            yield current


def stored_weights(tensors: Mapping[str, Tensor]) -> ModelWeights:
    """Return weights that belong to no model of this run, such as those of a checkpoint."""
    return ModelWeights(LocalEndpoint[WeightSender](_StoredSender(tensors)))


def tensors_of(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a bucket that carries them or their bytes. Raises EngineError for damaged bytes."""
    yield from zip(bucket.names, bucket.tensors) if bucket.tensors else unpack_bucket(bucket)


class _StoredSender(WeightSender):
    """Tensors of this process in place of a model, which are sent as they are."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def describe(self) -> tuple[ParameterFact, ...]:
        """Return a fact for each tensor."""
        return facts_of(self._tensors)

    def describe_adapter(self) -> tuple[ParameterFact, ...]:
        """Return the same: where engines take adapters the tensors are one."""
        return facts_of(self._tensors)

    def share(self, planned: Bucket) -> Bucket:
        """Return the bucket with the tensors themselves, which are not copied."""
        return replace(planned, tensors=tuple(tensor for _, tensor in self._chosen(planned)))

    def carry(self, planned: Bucket) -> Bucket:
        """Return the bucket with its tensors as bytes, one behind the other."""
        return pack_bucket(self._chosen(planned))

    def carry_part(self, planned: Bucket) -> Bucket:
        """Return their bytes: they are all here."""
        return self.carry(planned)

    def write(self, planned: Bucket, path: Path) -> Bucket:
        """Write them to a file. Raises OSError where the disk refuses."""
        return in_file(self.carry(planned), path)

    def _chosen(self, planned: Bucket) -> Iterator[tuple[str, Tensor]]:
        for name, dtype in zip(planned.names, planned.dtypes):
            yield name, self._tensors[name].detach().to(getattr(torch, dtype))


_LANES = 2**17
"""Words that are summed side by side: half a megabyte, which a core's second cache keeps between one row and the next."""
_LANE_FACTOR = 0x9E3779BD - 2**32
"""Odd, so that no change of a word can vanish modulo 2^32; 5 modulo 8, so that its powers repeat after 2^30 rows only."""


class Memory:
    """Memory that bytes lie in for as long as anything refers to them. In the host a block is then taken again, since
    writing to fresh pages costs several times what copying does; the two that were taken last are kept for that."""

    def __init__(self) -> None:
        self._blocks: list[tuple[NDArray[np.uint8], weakref.ref[NDArray[np.uint8]]]] = []
        """Each with what tensors in it keep alive: torch refers to the array that they were made from."""

    def take(self, num_bytes: int, device: torch.device) -> Tensor:
        """Return so many bytes `[num_bytes]` on `device`, with anything in them."""
        if device.type != "cpu":
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
        fitting = [block for block, used in self._blocks if used() is None and len(block) >= num_bytes]
        if not fitting:  # what is free goes before more is taken
            self._blocks = [(block, used) for block, used in self._blocks if used() is not None]
        block = fitting[-1] if fitting else np.empty(max(1, num_bytes), dtype=np.uint8)
        lent = block[:num_bytes]
        others = [each for each in self._blocks if each[0] is not block]
        self._blocks = [*others, (block, weakref.ref(lent))][-2:]
        return torch.from_numpy(lent)


def host_bytes(num_bytes: int) -> Tensor:
    """Return fresh bytes of the host, with anything in them. NumPy asks for huge pages for them, torch does not."""
    return torch.from_numpy(np.empty(max(1, num_bytes), dtype=np.uint8))[:num_bytes]


class Checksum:
    """Checksum of bytes, the same on every device: words of 32 bits in `_LANES` lanes, each a polynomial modulo 2^32,

        lane = lane * factor + word          one multiplication and one addition a word, in vectors
        sum of lane * (2 * index + 1)        modulo 2^64

    It notices whatever happens to a single word, and other damage with a probability of 1 - 2^-32 or more. It is read
    about as fast as memory is copied, where a CRC-32 takes three times as long.
    """

    def __init__(self, flat: Tensor) -> None:
        self._words = (flat if len(flat) else flat.new_empty(0)).view(
            torch.int32
        )  # NumPy's empty arrays have no stride
        self._lanes = torch.zeros(min(len(self._words), _LANES), dtype=torch.int32, device=flat.device)
        self._num_words = 0

    def advance(self, num_bytes: int) -> None:
        """Take in the whole rows of the first `num_bytes`, which will not change any more."""
        while self._num_words < len(self._words):
            end = min(self._num_words + _LANES, len(self._words))
            if 4 * end > num_bytes:
                return
            row = self._words[self._num_words : end]
            lanes = self._lanes[: len(row)]
            torch.add(row, lanes, alpha=_LANE_FACTOR, out=lanes)
            self._num_words = end

    def value(self) -> int:
        """Return it, of all bytes."""
        self.advance(4 * len(self._words))
        return int((self._lanes.long() * (2 * torch.arange(len(self._lanes), device=self._lanes.device) + 1)).sum())


def checksum_of(flat: Tensor) -> int:
    """Return the checksum of bytes that are there."""
    return Checksum(flat).value()


class Packing:
    """Bytes that are put together from the first to the last and summed while a core's cache has them, so that they pass
    through memory once. Between what is put there are zeros, so that equal weights are equal bytes on every rank."""

    def __init__(self, num_bytes: int, device: torch.device, memory: Memory | None) -> None:
        """`memory`: of those before; None takes fresh memory."""
        self.flat = (memory or Memory()).take(num_bytes, device)
        self._checksum = Checksum(self.flat)
        self._end = 0

    def put(self, start: int, values: Tensor, dtype: torch.dtype) -> None:
        """Copy values from wherever they are, in `dtype`, to the bytes from `start` on."""
        values = values.reshape(-1)
        size = dtype.itemsize
        self.flat[self._end : start].zero_()
        self._end = start + size * len(values)
        target = self.flat[start : self._end].view(dtype)
        step = 4 * _LANES // size if self.flat.device.type == values.device.type == "cpu" else max(1, len(values))
        for low in range(0, len(values), step):
            target[low : low + step].copy_(values[low : low + step])
            self._checksum.advance(start + size * min(low + step, len(values)))

    def checksum(self) -> int:
        """Return the checksum, now that all is there."""
        self.flat[self._end :].zero_()
        return self._checksum.value()


def copy_out(flat: Tensor, places: Iterable[tuple[int, Tensor]]) -> int:
    """Copy what lies from each start of packed bytes on into a tensor of as many values, wherever that is, and return the
    checksum of all bytes, which are summed while a core's cache has them: they pass through memory once."""
    checksum = Checksum(flat)
    for start, target in places:
        size, lines = target.element_size(), target
        values = flat[start : start + size * target.numel()].view(target.dtype)
        if target.is_contiguous():
            lines = target.view(-1)
        else:
            values = values.view(target.shape)
        line_bytes = size * lines[:1].numel()
        step = max(1, 4 * _LANES // max(1, line_bytes)) if flat.device.type == "cpu" else max(1, len(lines))
        for low in range(0, len(lines), step):
            checksum.advance(start + line_bytes * min(low + step, len(lines)))
            lines[low : low + step].copy_(values[low : low + step])
    return checksum.value()
