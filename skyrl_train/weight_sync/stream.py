"""Both ends of weights that are broadcast: what is known of them before, and how their bytes get to every worker.

    once, for those that are there     StreamPlan: buckets, what each rank has of them, who is where
    each sync                          for each bucket and rank: a header (version, checksum, values that changed), its bytes

Every end has the plan, so that a sync hands it a version and nothing else, and a header is as long as the plan says. Both
take the way that `topology.py` says. A worker knows by the header what is to come, and verifies what came by its checksum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import chain
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_train.distributed import backend_in, open_store
from skyrl_train.endpoints import Rendezvous
from skyrl_train.errors import EngineError
from skyrl_train.weight_sync.topology import Group, Stage, Topology
from skyrl_train.weights import Bucket, Memory, StreamPlan, Update, checksum_of

_HEADER = 3
"""Numbers of a header, of 8 bytes each, ahead of one for each box: version, bucket, checksum. One of its own is behind."""


class WeightGroup:
    """One process's end of a group for weights alone.

    The group stands beside whatever groups learner and engine have. Its backend follows the device: gloo between CPUs, NCCL
    between CUDA devices, where a bucket never leaves device memory. Calls block until all have made theirs, or until the
    deadline of the rendezvous.
    """

    def __init__(self, rendezvous: Rendezvous, device: torch.device, *, store: Any = None, name: str = "") -> None:
        """`store` and `name`: of several groups that share one. Raises what torch raises where the others do not come in
        time."""
        self._device, self._rank = device, rendezvous.rank
        self._timeout = timedelta(seconds=rendezvous.timeout_s)
        self._backend: Any = backend_in(store or open_store(rendezvous), rendezvous, device, name=name)
        self.received_bytes = 0
        """Bytes that others have sent to this process through the group."""

    def send(self, flat: Tensor) -> None:
        """Broadcast the bytes of a bucket from this rank to all others; waits for them."""
        self.broadcast(flat, self._rank)

    def receive(self, num_bytes: int, rank: int = 0) -> Tensor:
        """The bytes that `rank` broadcasts."""
        flat = Memory().take(num_bytes, self._device)
        self.broadcast(flat, rank)
        return flat

    def broadcast(self, flat: Tensor, rank: int) -> None:
        """Fill the memory with what `rank` has in its own."""
        # All know the size by the plan, so that all leave it out, and nobody waits.
        if not len(flat):
            return
        self.received_bytes += len(flat) * (rank != self._rank)
        options = dist.BroadcastOptions()
        options.rootRank = rank
        self._backend.broadcast([flat], options).wait(self._timeout)

    def begin_send(self, flat: Tensor, rank: int, tag: int) -> Callable[[], object]:
        """Send bytes to one other, and return what waits until they have left."""
        return partial(self._backend.send([flat], rank, tag).wait, self._timeout)

    def begin_receive(self, flat: Tensor, rank: int, tag: int) -> Callable[[], object]:
        """Fill the memory with what one other sends, and return what waits for that."""
        self.received_bytes += len(flat)
        return partial(self._backend.recv([flat], rank, tag).wait, self._timeout)

    def close(self) -> None:
        """Leaves without waiting for anybody: others may be dead."""
        # Without it NCCL's end would wait for collectives that a dead member never joins.
        abort = getattr(self._backend, "abort", None)
        if self._device.type == "cuda" and abort is not None:
            abort()
        self._backend = None


class StreamEnd:
    """One participant of a plan: a rank that sends, or a worker that receives. Both have met when it is there."""

    def __init__(self, plan: StreamPlan, rendezvous: Rendezvous, device: torch.device) -> None:
        """`rendezvous.rank`: that of the rank, or behind all ranks that of the worker. Raises what torch raises where others
        do not come in time."""
        self.plan, self._device, self._participant = plan, device, rendezvous.rank
        self._topology = Topology.of(plan)
        self._store = open_store(rendezvous)
        """Kept: NCCL makes what two of a group need once they first send."""
        self.groups: dict[Stage, tuple[Group, WeightGroup]] = {}
        for (
            stage,
            groups,
        ) in self._topology.groups.items():  # in the same order everywhere, so that nobody waits in a ring
            for group in groups:
                if self._participant in group.members:
                    rank = group.members.index(self._participant)
                    place = replace(rendezvous, rank=rank, num_ranks=len(group.members))
                    self.groups[stage] = group, WeightGroup(place, device, store=self._store, name=group.name)
        self._headers, self._bytes = Memory(), Memory()
        self._leaving: list[Callable[[], object]] = []

    def close(self) -> None:
        """Leave all groups without waiting for anybody."""
        for _, group in self.groups.values():
            group.close()
        self.groups = {}

    def post(self, index: int, version: int, part: Bucket, flat: Tensor) -> None:
        """Begin to send this rank's part of a bucket, once the bytes of the one before have left.

        Raises EngineError for a part that is not the one that was planned.
        """
        rank = self._participant
        planned = self.plan.part(rank, index, [piece.num_changed for piece in part.pieces])
        if replace(part, rank=rank, checksum=None, update="") != planned:
            raise EngineError(
                f"rank {rank} has other shards of bucket {index} than when it met the engines: its parameters were replaced "
                "without a restart, which is a fault of skyrl_train"
            )
        # So that no more than two buckets of a rank are in memory: the one that leaves, and the one that was just packed.
        self.settle()
        if part.names:
            # To rank 0 of the group, the worker at which this rank's
            # bytes enter. The tags are those of `receive`: two a bucket.
            group, header = self.groups["enter"][1], self._header(index, version, part)
            sent = enumerate((header, flat), 2 * index)
            self._leaving = [group.begin_send(each, 0, tag) for tag, each in sent if len(each)]

    def settle(self) -> None:
        """Wait until what was posted has left."""
        leaving, self._leaving = self._leaving, []
        for wait in leaving:
            wait()

    def receive(self, version: int, update: Update) -> Iterator[tuple[Bucket, Callable[[Bucket], Tensor]]]:
        """Yield each bucket with its parts, and what gives the bytes of a part: on the device, until the next bucket.

        Raises EngineError where another sync's arrive, or what describes them is damaged.
        """
        for index, planned in enumerate(self.plan.buckets):
            # Headers first: how many values changed, and so how many bytes follow, is known to their sender alone.
            lengths = [8 * (_HEADER + len(each[index]) + 1) if each[index] else 0 for each in self.plan.boxes]
            headers = self._pass(lengths, self._headers, 2 * index)
            parts = {
                rank: replace(self._described(rank, index, version, header, update), update=update)
                for rank, header in headers.items()
                if len(header)
            }
            sizes = [parts[rank].num_bytes if rank in parts else 0 for rank in range(len(self.plan.boxes))]
            arrived = self._pass(sizes, self._bytes, 2 * index + 1)
            bucket = replace(planned, update=update, parts=tuple(parts[rank] for rank in sorted(parts)))
            yield bucket, lambda part, arrived=arrived: arrived[part.rank]  # type: ignore[misc]

    def _pass(self, sizes: Sequence[int], memory: Memory, tag: int) -> dict[int, Tensor]:
        """Take `sizes[rank]` bytes of each rank, and pass on what this worker leads. Return them by rank."""
        topology, ends, position = self._topology, dict[int, int](), 0
        for rank in topology.order:
            position += sizes[rank]
            ends[rank] = position
        # One block in the order of `streams`: what a leader took in, and what a lane brought to a
        # node, lie together in it, so that each is one broadcast and nothing is copied in between.
        flat = memory.take(position, self._device)
        views = {rank: flat[end - sizes[rank] : end] for rank, end in ends.items()}

        def block(leaders: Sequence[int]) -> Tensor:
            ranks = list(chain.from_iterable(topology.streams[leader] for leader in leaders))
            return flat[ends[ranks[0]] - sizes[ranks[0]] : ends[ranks[-1]]] if ranks else flat[:0]

        if "enter" in self.groups:
            group, way = self.groups["enter"]
            # All are begun before any is waited for: ranks send when they have packed, in no order.
            waits = [
                way.begin_receive(views[rank], at, tag) for at, rank in enumerate(group.members[1:], 1) if sizes[rank]
            ]
            for wait in waits:
                wait()
        if "across" in self.groups:
            group, way = self.groups["across"]
            # Each leader in turn, and all members know the turns: what one brought into its node is new to the others.
            for at, leader in enumerate(group.members):
                way.broadcast(block([leader]), at)
        if "within" in self.groups:
            group, way = self.groups["within"]
            for lane in topology.lanes:
                # A lane has one leader on each node.
                (leader,) = set(lane) & set(group.members)
                way.broadcast(block(lane), group.members.index(leader))
        return views

    def _header(self, index: int, version: int, part: Bucket) -> Tensor:
        numbers = [version, index, part.checksum or 0, *(piece.num_changed for piece in part.pieces)]
        body = torch.tensor(numbers, dtype=torch.int64)
        # A sum of its own: the header's counts decide how much is received, before any sum of the bytes could be compared.
        guard = torch.tensor([checksum_of(body.view(torch.uint8))])
        return torch.cat([body, guard]).view(torch.uint8).to(self._device)

    def _described(self, rank: int, index: int, version: int, header: Tensor, update: Update) -> Bucket:
        numbers = header.cpu().view(torch.int64)
        if checksum_of(numbers[:-1].contiguous().view(torch.uint8)) != int(numbers[-1]):
            raise EngineError(f"what describes bucket {index} of rank {rank} arrived damaged: its checksum differs")
        found, at, checksum, *changed = numbers[:-1].tolist()
        if (found, at) != (version, index):
            raise EngineError(
                f"rank {rank} sent bucket {at} of version {found}, where bucket {index} of version {version} was to come"
            )
        sizes = [prod(shape) for _, _, shape in self.plan.boxes[rank][index]]
        if any(count > size or (count >= 0 and update != "changes") for count, size in zip(changed, sizes)):
            raise EngineError(
                f"rank {rank} sent more values of bucket {index} than it has, or some where all were to come"
            )
        return replace(self.plan.part(rank, index, changed), checksum=checksum)
