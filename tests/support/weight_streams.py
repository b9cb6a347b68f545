"""Ranks that stream a model's weights to workers over gloo, each on a thread or in a process, on nodes of any name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from skyrl_train.endpoints import Rendezvous
from skyrl_train.weight_sync import Arrivals, Entry, SentWeights, StreamEnd, pack_part
from skyrl_train.weight_sync.topology import Stage, Topology
from skyrl_train.weights import Box, Bucket, Piece, StreamPlan, Update, bucket_names, dtype_name, size_of

CPU = torch.device("cpu")
Weights = dict[str, Tensor]


def model(seed: int, *, num_matrices: int = 3) -> Weights:
    """Weights of several types and shapes, of which no number of ranks cuts all evenly."""
    torch.manual_seed(seed)
    matrices = {f"layers.{index}.matrix": torch.randn(65, 34).bfloat16() for index in range(num_matrices)}
    return {
        **matrices,
        "norm": torch.randn(7),
        "single": torch.randn(1),
        "scalar": torch.randn(()),
        "experts": torch.randn(4, 3, 6).double(),
        "nothing": torch.zeros(0, 4),
    }


def buckets_of(weights: Weights, limit_bytes: int) -> tuple[Bucket, ...]:
    """Return them in buckets of so many bytes."""
    types = {name: dtype_name(tensor.dtype) for name, tensor in weights.items()}
    sizes = [(name, size_of(types[name], tuple(tensor.shape))) for name, tensor in weights.items()]
    return tuple(
        Bucket(
            names=names,
            dtypes=tuple(types[name] for name in names),
            shapes=tuple(tuple(weights[name].shape) for name in names),
        )
        for names in bucket_names(sizes, limit_bytes)
    )


def boxes_of(bucket: Bucket, rank: int, num_ranks: int) -> tuple[Box, ...]:
    """Return what a rank has of a bucket where rows are divided as FSDP2 does; what has no rows is the last one's."""
    found: list[Box] = []
    for place, shape in enumerate(bucket.shapes):
        if 0 in shape or not shape:
            if rank == num_ranks - 1:
                found.append((place, (0,) * len(shape), shape))
            continue
        rows = -(-shape[0] // num_ranks)
        low, high = min(rank * rows, shape[0]), min((rank + 1) * rows, shape[0])
        if high > low:
            found.append((place, (low, *(0 for _ in shape[1:])), (high - low, *shape[1:])))
    return tuple(found)


def make_plan(
    weights: Weights,
    sender_nodes: Sequence[str],
    receiver_nodes: Sequence[str],
    *,
    limit_bytes: int = 6000,
    num_sending: int | None = None,
) -> StreamPlan:
    """Return the plan of ranks of which the first `num_sending` divide all weights, and the others are replicas."""
    buckets, sending = buckets_of(weights, limit_bytes), num_sending or len(sender_nodes)
    boxes = [
        tuple(boxes_of(bucket, rank, sending) if rank < sending else () for bucket in buckets)
        for rank in range(len(sender_nodes))
    ]
    return StreamPlan(
        sender_nodes=tuple(sender_nodes), receiver_nodes=tuple(receiver_nodes), buckets=buckets, boxes=tuple(boxes)
    )


def send(end: StreamEnd, rank: int, weights: Weights, version: int, update: Update, sent: SentWeights) -> int:
    """Send what a rank has of the weights, as `RankSender.stream` does, and return its bytes."""
    num_bytes = 0
    for index, bucket in enumerate(end.plan.buckets):
        entries = []
        for place, offset, shape in end.plan.boxes[rank][index]:
            name, whole = bucket.names[place], weights[bucket.names[place]]
            box = whole[tuple(slice(low, low + size) for low, size in zip(offset, shape))]
            piece = Piece(offset, tuple(whole.shape))
            if update:
                entries.append(sent.entry(name, box, piece, changes=update == "changes"))
            else:
                entries.append(Entry(name=name, box=box, piece=piece, dtype=box.dtype))
        part, flat = pack_part(entries, replace(bucket, update=update), CPU)
        end.post(index, version, part, flat)
        num_bytes += part.num_bytes
    end.settle()
    return num_bytes


def receive(end: StreamEnd, arrivals: Arrivals, version: int, update: Update) -> Weights:
    """Return what a worker has after a sync."""
    arrivals.begin()
    found: Weights = {}
    for bucket, bytes_of in end.receive(version, update):
        found |= {name: tensor.clone() for name, tensor in arrivals.take(bucket, bytes_of)}
    return found


def sizes_of(plan: StreamPlan, *, headers: bool = False) -> list[int]:
    """Return the bytes that each rank sends where it sends all of its weights, with what describes them or without."""
    described = [sum(8 * (4 + len(boxes)) for boxes in buckets if boxes) * headers for buckets in plan.boxes]
    numbers = range(len(plan.buckets))
    return [more + sum(plan.part(rank, index).num_bytes for index in numbers) for rank, more in enumerate(described)]


class Hop(NamedTuple):
    """Bytes that one participant sends to another."""

    stage: Stage
    source: int
    target: int
    num_bytes: int


def hops(topology: Topology, sizes: Sequence[int]) -> Iterator[Hop]:
    """Yield what travels where each rank sends `sizes[rank]` bytes. A broadcast is a chain, from its root on."""
    for leader, ranks in topology.streams.items():
        yield from (Hop("enter", rank, leader, sizes[rank]) for rank in ranks)
    for stage, members, begun in topology.rings(sizes):
        for at, num_bytes in enumerate(begun):
            turned = (*members[at:], *members[:at])
            yield from (Hop(stage, source, target, num_bytes) for source, target in pairwise(turned) if num_bytes)


def place_of(meeting: str, participant: int, plan: StreamPlan, timeout_s: float = 60.0) -> Rendezvous:
    """Return where a participant meets the others, in a file."""
    num_participants = len(plan.sender_nodes) + len(plan.receiver_nodes)
    return Rendezvous(
        rank=participant, num_ranks=num_participants, init_method=f"file://{meeting}", timeout_s=timeout_s
    )


def bits(weights: Weights) -> dict[str, bytes]:
    """Return them as bytes, which are equal where the weights are, NaN and zeros included."""
    return {
        name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if math.prod(tensor.shape) else b""
        for name, tensor in weights.items()
    }
