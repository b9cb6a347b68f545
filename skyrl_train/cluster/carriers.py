"""The ways by which weights get from a learner's ranks to engines. Nothing passes through this process but references.

    shared_memory   rank 0 --object store--> every engine: shared memory within a node, the network between nodes
    broadcast       rank 0 --gloo or NCCL--> every worker of every engine, from device to device
    cuda_ipc        ranks whose device a worker of an engine shares lend it the bucket, which it copies there
    files           rank 0 writes a file, every engine reads it: for whatever nothing else works between

Each carries bucket by bucket; what begins and ends an update is `cluster/transport.py`.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ray

from skyrl_train.cluster.calls import Answer, RemoteActor
from skyrl_train.cluster.workers import WorkerGroup, carried_buckets, meeting_point, watch
from skyrl_train.weight_sync.buckets import Bucket, Receiver
from skyrl_train.weight_sync.lending import require_lenders

if TYPE_CHECKING:
    from skyrl_train.config.schema import Config


class Carrier(Protocol):
    """One of the ways."""

    def prepare(self, group: WorkerGroup, engines: Sequence[RemoteActor], receivers: Sequence[Receiver]) -> None:
        """Before an update begins: whatever must be agreed on with these engines. `receivers`: all their workers."""
        ...

    def carry(self, group: WorkerGroup, buckets: Sequence[Bucket], engines: Sequence[RemoteActor]) -> None:
        """Every engine has taken every bucket. Raises DeadlineError, ActorError, or what an actor raised on purpose."""
        ...


class ThroughObjectStore:
    """`shared_memory`."""

    def __init__(self, config: Config) -> None:
        self._placement = config.placement

    def prepare(self, group: WorkerGroup, engines: Sequence[RemoteActor], receivers: Sequence[Receiver]) -> None:
        """Nothing to agree on."""

    def carry(self, group: WorkerGroup, buckets: Sequence[Bucket], engines: Sequence[RemoteActor]) -> None:
        """While engines load a bucket the ranks gather the next."""
        for ref in carried_buckets(group, buckets):
            watch(self._placement, "sync", "update").wait(engines, _updates(engines, ref))


class ThroughFiles:
    """`files`."""

    def __init__(self, config: Config) -> None:
        self._placement = config.placement
        self._folder = Path(config.output_dir).absolute() / "weights"

    def prepare(
        self,
        group: WorkerGroup,  # noqa: ARG002
        engines: Sequence[RemoteActor],  # noqa: ARG002
        receivers: Sequence[Receiver],  # noqa: ARG002
    ) -> None:
        """The folder must be on a file system that all nodes share."""
        self._folder.mkdir(parents=True, exist_ok=True)

    def carry(self, group: WorkerGroup, buckets: Sequence[Bucket], engines: Sequence[RemoteActor]) -> None:
        """One file at a time, removed once it was read."""
        try:
            for number, bucket in enumerate(buckets):
                path = self._folder / f"{number:04d}.bin"
                refs = group.begin("write", bucket, path)
                group.wait("write", "sync", refs)
                watch(self._placement, "sync", "update").wait(engines, _updates(engines, refs[0]))
                path.unlink()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)


class ByBroadcast:
    """`broadcast`. The group of processes is made anew where the engines are not those that were met."""

    def __init__(self, config: Config, folder: Path) -> None:
        """`folder`: of this machine, for a file to meet at."""
        self._placement = config.placement
        self._folder = folder
        self._met: list[Any] = []

    def prepare(self, group: WorkerGroup, engines: Sequence[RemoteActor], receivers: Sequence[Receiver]) -> None:
        """Rank 0 and all workers of these engines meet; engines have equally many."""
        handles = [group.actors[0].handle, *(engine.handle for engine in engines)]
        if handles == self._met:
            return
        self._met = []
        together = [*group.actors, *engines]
        place = meeting_point(group.actors[0], together, folder=self._folder, timeout_s=self._placement.call_timeout_s)
        num_ranks, workers_per_engine = 1 + len(receivers), len(receivers) // max(1, len(engines))
        refs = [
            *(
                actor.handle.weights.remote("meet", place.rendezvous(0, num_ranks) if rank == 0 else None)
                for rank, actor in enumerate(group.actors)
            ),
            *(
                engine.handle.meet.remote(place.rendezvous(1 + workers_per_engine * index, num_ranks))
                for index, engine in enumerate(engines)
            ),
        ]
        watch(self._placement, "sync", "meet").wait(together, refs)
        self._met = handles

    def carry(self, group: WorkerGroup, buckets: Sequence[Bucket], engines: Sequence[RemoteActor]) -> None:
        """Ranks send while engines receive, so that both are waited for together."""
        for bucket in buckets:
            announced = ray.put(Answer(value=bucket))
            refs = [*group.begin("broadcast", bucket), *_updates(engines, announced)]
            watch(self._placement, "sync", "broadcast").wait([*group.actors, *engines], refs)


class ByLending:
    """`cuda_ipc`."""

    def __init__(self, config: Config) -> None:
        self._placement = config.placement
        self._borrowers: frozenset[str] = frozenset()

    def prepare(
        self,
        group: WorkerGroup,
        engines: Sequence[RemoteActor],  # noqa: ARG002
        receivers: Sequence[Receiver],
    ) -> None:
        """A handle says where the memory is; what must be known is on which devices anybody opens one. Raises EngineError
        where a worker of an engine is on a device of no rank."""
        self._borrowers = frozenset(receiver.device for receiver in receivers)
        require_lenders(self._borrowers, group.wait("device", "sync", group.begin("device")))

    def carry(self, group: WorkerGroup, buckets: Sequence[Bucket], engines: Sequence[RemoteActor]) -> None:
        """Each worker of an engine is told of all loans and takes the one on its device, whole."""
        for bucket in buckets:
            answers: list[Bucket | None] = group.wait("lend", "sync", group.begin("lend", bucket, self._borrowers))
            lent = [part for part in answers if part is not None]
            handles = {device: handle for part in lent for device, handle in part.handles.items()}
            announced = ray.put(Answer(value=replace(lent[0], handles=handles)))
            watch(self._placement, "sync", "update").wait(engines, _updates(engines, announced))
        group.wait("reclaim", "sync", group.begin("reclaim"))


def make_carrier(config: Config, *, folder: Path | None) -> Carrier:
    """The one that `generator.vllm.weight_transport` names. `folder`: the session's, where it is of this machine."""
    name = config.generator.vllm.weight_transport
    if name == "auto":
        shared = "cuda_ipc" if config.placement.colocate_all else "broadcast"
        name = "shared_memory" if config.platform.name == "cpu" else shared  # type: ignore[assignment]
    if name == "broadcast":
        return ByBroadcast(config, folder or Path(tempfile.gettempdir()))
    if name == "cuda_ipc":
        return ByLending(config)
    return ThroughFiles(config) if name == "files" else ThroughObjectStore(config)


def _updates(engines: Sequence[RemoteActor], announced: Any) -> list[Any]:
    return [engine.handle.update.remote(announced) for engine in engines]
