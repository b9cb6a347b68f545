"""A rank's part in a weight sync: what it hands over of its model, and how."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from skyrl_train.distributed import own_box, reshard
from skyrl_train.endpoints import Rendezvous, free_port
from skyrl_train.model.lora import adapter_tensors, merged_weights, weights_by_name
from skyrl_train.weight_sync.cuda_ipc import Export, device_name
from skyrl_train.weight_sync.parts import Entry, SentWeights, pack_part
from skyrl_train.weight_sync.stream import StreamEnd
from skyrl_train.weights import (
    Box,
    Bucket,
    Memory,
    ParameterFact,
    Piece,
    StreamPlan,
    Update,
    WeightSender,
    facts_of,
    in_file,
    pack,
    pack_bucket,
)

if TYPE_CHECKING:
    from torch import nn

    from skyrl_train.distributed import ModelStrategy


class RankSender(WeightSender):
    """The weights of a model in this process, or of this process's part of it."""

    def __init__(
        self,
        model: nn.Module,
        strategy: ModelStrategy,
        device: torch.device,
        *,
        require_there: Callable[[], None] = lambda: None,
    ) -> None:
        """`device` computes; parameters may be elsewhere. `require_there` raises where they cannot be read now."""
        self._model, self._strategy, self._device = model, strategy, device
        self._require_there = require_there
        self._plan: StreamPlan | None = None
        self._stream: StreamEnd | None = None
        self._exports: list[Export] = []
        self._sent = SentWeights()
        self._memory = Memory()
        """Of the bucket that was handed over last, and of one that still leaves."""

    def describe(self) -> tuple[ParameterFact, ...]:
        """Every parameter, tied ones once, in the model's order; an adapter is part of what it adapts."""
        return facts_of({name: weight.like for name, weight in weights_by_name(self._model).items()})

    def describe_adapter(self) -> tuple[ParameterFact, ...]:
        """The parameters of the adapter by themselves, under names of their own; none where there is no adapter."""
        return facts_of(adapter_tensors(self._model))

    def device(self) -> str:
        """Name of the device on which this rank computes."""
        return device_name(self._device)

    def share(self, planned: Bucket) -> Bucket:
        """Return the parameters of `planned` themselves, whole on every rank, for who reads them in this process before
        they change."""
        return replace(planned, tensors=tuple(tensor for _, tensor in self._whole(planned)))

    def carry(self, planned: Bucket) -> Bucket:
        """Return the bytes of the parameters of `planned`, in its types, on rank 0, until the next bucket is asked for;
        `planned` itself on other ranks."""
        # One rank is enough, as every rank has the gathered parameters whole.
        hands_over = self._takes_part(planned, self._strategy.rank == 0)
        return pack_bucket(self._whole(planned), self._memory) if hands_over else planned

    def carry_part(self, planned: Bucket) -> Bucket:
        """Return the bytes of this rank's own shards, which nobody gathers, and of what has to be gathered after all (what
        an adapter is added to) those of every so manieth parameter; until the next bucket is asked for."""
        bucket, flat = pack_part(self._own_entries(planned), planned, torch.device("cpu"), self._memory)
        return replace(bucket, data=flat.numpy())

    def write(self, planned: Bucket, path: Path) -> Bucket:
        """Have rank 0 write them to a file. Raises OSError where the disk refuses."""
        bucket = self.carry(planned)
        return bucket if bucket.data is None else in_file(bucket, path)

    def free_port(self) -> int:
        """Return a port of this node that nobody listens on at this moment."""
        return free_port()

    def boxes(self, planned: Sequence[Bucket]) -> tuple[tuple[Box, ...], ...]:
        """Return what `carry_part` would hand over of each bucket."""

        def box(bucket: Bucket, entry: Entry) -> Box:
            return bucket.names.index(entry.name), entry.piece.offset, tuple(entry.box.shape)

        return tuple(tuple(box(bucket, entry) for entry in self._own_entries(bucket)) for bucket in planned)

    def take_plan(self, plan: StreamPlan) -> None:
        """Keep what the syncs are that follow the next `meet`."""
        self._plan = plan

    def meet(self, rendezvous: Rendezvous) -> None:
        """Join the other ranks and the engines' workers by the plan, in place of any whom this rank had met."""
        # Left before others are met: a group whose members died is of no use, and leaving it waits for nobody.
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        if self._plan is None:
            raise RuntimeError("this rank was told to meet engines before it was told of what")
        self._stream = StreamEnd(self._plan, rendezvous, self._device)

    def stream(self, version: int, update: Update, tolerance: float) -> int:
        """Send this rank's parts of all buckets to those whom `meet` met, and return their bytes. While one leaves the next
        is packed."""
        if self._stream is None:
            raise RuntimeError("this rank was not told to meet the engines")
        num_bytes = 0
        for index, bucket in enumerate(self._stream.plan.buckets):
            planned = replace(bucket, update=update, tolerance=tolerance)
            part, flat = pack_part(self._own_entries(planned), planned, self._device, self._memory)
            self._stream.post(index, version, part, flat)
            num_bytes += part.num_bytes
        self._stream.settle()
        return num_bytes

    def export(self, planned: Bucket, devices: Collection[str]) -> Bucket:
        """Export the memory of these parameters until the `export` after the next or `close_export`, on a rank whose device
        is among `devices`; the others return `planned`, since nobody would ever open their copy."""
        # The last one may be read yet: the driver asks for a bucket
        # while engines copy the one before. Older ones have been copied.
        for export in self._exports[:-1]:
            export.close()
        self._exports = self._exports[-1:]
        if not self._takes_part(planned, self.device() in devices):
            return planned
        bucket, flat = pack(self._whole(planned), self._device)
        self._exports.append(Export(flat))
        return replace(bucket, handles=self._exports[-1].handles)

    def close_export(self) -> None:
        """Take the exported memory back, which nobody reads any more. Idempotent."""
        for export in self._exports:
            export.close()
        self._exports = []

    def _takes_part(self, planned: Bucket, hands_over: bool) -> bool:
        """`hands_over`; a rank that does not takes part in the gathering and is done."""
        # Gathering is a collective: a rank that left it out would have the others wait.
        if not hands_over:
            for _ in self._whole(planned):
                pass
        return hands_over

    def _whole(self, planned: Bucket) -> Iterator[tuple[str, Tensor]]:
        self._require_there()
        types = {name: getattr(torch, dtype) for name, dtype in zip(planned.names, planned.dtypes)}
        yield from merged_weights(self._model, self._strategy.gather, types)

    def _own_entries(self, planned: Bucket) -> Iterator[Entry]:
        """What this rank hands over of these parameters. Ranks gather those together that are no boxes."""
        self._require_there()
        reshard(self._model)  # a forward without a backward leaves some whole, which are shards in every other sync
        weights, adapter = weights_by_name(self._model), adapter_tensors(self._model)
        rank, num_ranks = self._strategy.rank, self._strategy.num_ranks
        boxes: dict[str, tuple[Tensor, tuple[int, ...]]] = {}
        types = {name: getattr(torch, dtype) for name, dtype in zip(planned.names, planned.dtypes)}
        gathered: dict[str, torch.dtype | None] = {}
        for index, name in enumerate(planned.names):
            weight = weights.get(name)
            plain = adapter[name] if weight is None else weight.plain
            # A parameter that every rank has whole is handed over by one of them:
            # another one for each index, so that all send about as many bytes.
            found = None if plain is None else own_box(plain, share=index + rank, num_shares=num_ranks)
            if found is None:
                gathered[name] = types[name]
            else:
                boxes[name] = found
        whole = merged_weights(self._model, self._strategy.gather, gathered)
        # All ranks take all that is gathered from the generator,
        # since each step of it is a collective, and keep their share.
        boxes |= {
            name: (tensor, (0,) * tensor.ndim)
            for index, (name, tensor) in enumerate(whole)
            if index % num_ranks == rank
        }
        for name, shape in zip(planned.names, planned.shapes):
            # Others have what is empty here. But for a parameter without
            # values, which the receiver counts as one that arrives.
            if name not in boxes or not (boxes[name][0].numel() or 0 in shape):
                continue
            box, offset = boxes[name]
            piece = Piece(offset, shape)
            if planned.update:
                # Rounded ahead of the comparison: what the engine has is
                # rounded, and a change that rounding hides need not travel.
                box, changes = box.to(types[name]), planned.update == "changes"
                yield self._sent.entry(name, box, piece, changes=changes, tolerance=planned.tolerance)
            else:
                yield Entry(name=name, box=box, piece=piece, dtype=types[name])
