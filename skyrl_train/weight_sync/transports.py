"""The ways by which weights get from the ranks of a model to engines, in this process or in others.

    shared_memory   each rank --its own shards--> every engine: shared memory within a node, on Ray the network between
                    nodes; within one process the tensors themselves
    broadcast       each rank --its own shards, gloo or NCCL--> a worker of each node --> its others, from device to device
    cuda_ipc        ranks whose device a worker of an engine shares export the bucket, which the worker copies there
    files           rank 0 writes a file, every engine reads it: for whatever nothing else works between

Each is a function of both ends and some buckets, called in the middle of an update that `weight_sync/transport.py` begins
and ends; a custom one (`generator.weight_transport`) is the same.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from skyrl_train.endpoints import Endpoint, Pending, meeting_point
from skyrl_train.weight_sync.cuda_ipc import Export, device_name, require_exporters
from skyrl_train.weight_sync.receiver import Receiver, UpdatableEngine
from skyrl_train.weights import Bucket, ModelWeights, StreamPlan, WeightSender, pack


@dataclass(frozen=True, kw_only=True)
class RouteContext:
    """What is known of a way from a model to engines before either is there."""

    files: Path
    """Folder for weights as files, on a file system that trainer and engines share."""
    node_folder: Path
    """Folder of this machine, where processes of one node meet."""
    timeout_s: float
    """Deadline of meeting each other, and of each broadcast."""
    device: str = "cpu"
    """torch device of the trainer."""
    shared_devices: bool = False
    """Whether engines share the trainer's devices."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """Both ends of an update that has begun."""

    weights: ModelWeights
    engines: Endpoint[UpdatableEngine]
    receivers: tuple[Receiver, ...]
    """All workers of these engines, equally many of each."""
    version: int
    """Of the weights that are brought, which engines serve afterwards."""
    settings: RouteContext
    kept: dict[str, Any]
    """What a transport keeps from one sync to the next."""

    @property
    def senders(self) -> Endpoint[WeightSender]:
        """The ranks of the model; all take part in a call that gathers parameters."""
        return self.weights.senders


Transport = Callable[[Route, Sequence[Bucket]], int | None]
"""Brings the parameters that buckets describe to every engine, and returns the bytes that this took to each; None where
these are the buckets'. Raises what a call to an endpoint raises."""


def shared_memory(route: Route, buckets: Sequence[Bucket]) -> int | None:
    """Through shared memory, or Ray's object store; within one process nothing is copied."""
    if route.senders.is_local or route.engines.is_local:
        for pending in route.weights.handed_over(buckets):
            route.engines.call(UpdatableEngine.update, "sync", _given(route, pending))
        return None
    num_bytes = 0
    for planned, pending in zip(buckets, route.weights.handed_over(buckets, in_parts=True)):
        sent = pending.wait()
        num_bytes += sum(part.num_bytes for part in sent)
        # By reference: the bytes are in Ray's object store, where an argument by value would be put once more.
        parts = [pending.passed_on(rank) for rank, part in enumerate(sent) if part.names]
        route.engines.call(UpdatableEngine.update_parts, "sync", planned, *parts)
    return num_bytes


def _given(route: Route, pending: Pending[Bucket]) -> Bucket:
    """What rank 0 answers, as an argument for engines: one of this process cannot read a reference to it."""
    return pending.wait()[0] if route.engines.is_local else pending.passed_on()


def files(route: Route, buckets: Sequence[Bucket]) -> None:
    """One file at a time, removed once it was read."""
    folder = route.settings.files
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for number, bucket in enumerate(buckets):
            path = folder / f"{number:04d}.bin"
            written = route.senders.begin(WeightSender.write, "sync", bucket, path)
            written.wait()
            route.engines.call(UpdatableEngine.update, "sync", _given(route, written))
            path.unlink()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def broadcast(route: Route, buckets: Sequence[Bucket]) -> int | None:
    """Through groups of processes, which are made again where ranks, engines or weights are not those that were met, as all
    ends then have a plan of what comes. Nobody gathers: each rank sends its own shards. Weights of no model are in this
    process alone and travel as `shared_memory`."""
    if route.weights.scores is None:
        return shared_memory(route, buckets)
    update, tolerance = (buckets[0].update, buckets[0].tolerance) if buckets else ("", 0.0)
    # What differs from sync to sync is told with each; the plan is the same for all, and so is not made again.
    planned = tuple(replace(bucket, update="", tolerance=0.0) for bucket in buckets)
    ends = (route.senders.members, route.engines.members, planned)
    met = route.kept.pop("met", None)  # until this sync is over: who was told of one that failed may wait for the rest
    if met != ends:
        _meet(route, planned)
    # Both ends are begun, then waited for together: each waits for the other, and the first error of either ends the wait.
    receiving = route.engines.begin(UpdatableEngine.receive, "sync", route.version, update)
    sent = route.senders.begin(WeightSender.stream, "sync", route.version, update, tolerance).wait(receiving)
    route.kept["met"] = ends
    return sum(sent)


def _meet(route: Route, planned: tuple[Bucket, ...]) -> None:
    """Have all ranks and all workers of the engines plan what is to come, and join each other."""
    senders, engines = route.senders, route.engines
    # Workers of an engine are on its node, and all engines have as many.
    workers_per_engine = len(route.receivers) // len(engines.nodes)
    plan = StreamPlan(
        sender_nodes=senders.nodes,
        receiver_nodes=tuple(node for node in engines.nodes for _ in range(workers_per_engine)),
        buckets=planned,
        boxes=tuple(senders.call(WeightSender.boxes, "sync", planned)),
    )
    # The plan ahead of the meeting: by it each end knows which groups it makes, in which order.
    telling = engines.begin(UpdatableEngine.take_plan, "sync", plan)
    senders.begin(WeightSender.take_plan, "sync", plan).wait(telling)
    place = meeting_point(
        [*senders.nodes, *engines.nodes],
        folder=route.settings.node_folder,
        port_of_first=lambda: senders.call(WeightSender.free_port, "sync")[0],
        timeout_s=route.settings.timeout_s,
    )
    num_senders, num_participants = len(senders.nodes), len(senders.nodes) + len(route.receivers)
    # An engine is told the number of its first worker; the others count on from it.
    firsts = range(num_senders, num_participants, workers_per_engine)
    joining = engines.begin_each(
        UpdatableEngine.meet, "sync", [place.rendezvous(first, num_participants) for first in firsts]
    )
    places = [place.rendezvous(rank, num_participants) for rank in range(num_senders)]
    senders.begin_each(WeightSender.meet, "sync", places).wait(joining)


def cuda_ipc(route: Route, buckets: Sequence[Bucket]) -> int | None:
    """Through exported memory. A handle says where the memory is; each worker of an engine is told of all of them and
    copies what is on its device, whole. Weights of no model are on no device and travel as `shared_memory`."""
    if route.weights.scores is None:
        return shared_memory(route, buckets)
    importers = frozenset(receiver.device for receiver in route.receivers)
    require_exporters(importers, route.senders.call(WeightSender.device, "sync"))
    exporting = [route.senders.begin(WeightSender.export, "sync", bucket, importers) for bucket in buckets[:1]]
    for following in (*buckets[1:], None):
        pending = exporting.pop()
        exported = [answer for answer in pending.wait() if answer.handles]
        handles = {device: handle for answer in exported for device, handle in answer.handles.items()}
        if following is not None:  # which ranks gather while engines copy this one
            exporting.append(route.senders.begin(WeightSender.export, "sync", following, importers))
        # One description does for all devices: ranks packed the same
        # bytes, gaps included, so that the checksum is the same.
        route.engines.call(UpdatableEngine.update, "sync", replace(exported[0], handles=handles))
    route.senders.call(WeightSender.close_export, "sync")
    return None


def auto(route: Route, buckets: Sequence[Bucket]) -> int | None:
    """By the way that suits the engine: files to a server, shared_memory within a process and on a CPU, and between GPUs
    cuda_ipc where engines share the trainer's and can open exported memory, else broadcast."""
    if "auto" not in route.kept:
        route.kept["auto"] = _choose(route)
    transport: Transport = route.kept["auto"]
    return transport(route, buckets)


def _choose(route: Route) -> Transport:
    settings = route.settings
    if any(receiver.reads_files for receiver in route.receivers):
        return files
    if settings.device == "cpu" or any(receiver.device in ("", "cpu") for receiver in route.receivers):
        return shared_memory
    # Within one process the tensors themselves are handed over; there is nobody to meet.
    if not settings.shared_devices:
        return broadcast if not route.senders.is_local else shared_memory
    if not route.senders.is_local:
        return cuda_ipc
    here = torch.device(settings.device)
    if {receiver.device for receiver in route.receivers} != {device_name(here)}:
        return shared_memory
    # Drivers and containers may forbid it: it is tried once.
    bucket, flat = pack([("probe", torch.zeros(1, device=here))], here)
    export = Export(flat)
    try:
        can_import = route.engines.call(UpdatableEngine.can_import, "sync", replace(bucket, handles=export.handles))
    finally:
        export.close()
    return cuda_ipc if all(can_import) else shared_memory
