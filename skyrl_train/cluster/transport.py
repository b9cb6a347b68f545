"""Weights from learners on Ray to engines on Ray, through the object store: shared memory within a node.

    rank 0 packs a bucket (all ranks gather) -> object store -> every engine maps it and loads it

While engines load one bucket the ranks gather the next. Nothing passes through this process but references.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from torch import Tensor

from skyrl_train.cluster.calls import Answer, RemoteActor
from skyrl_train.cluster.engines import EnginePool
from skyrl_train.cluster.learners import WorkerWeights
from skyrl_train.errors import EngineError
from skyrl_train.weight_sync.buckets import in_buckets

Verify = Callable[[int], float]
"""Compares engines with the trainer after a sync to that version: the largest difference found."""


@dataclass(frozen=True, kw_only=True)
class SyncRecord:
    """What one sync did; a line of `weight_sync.jsonl`."""

    version: int
    seconds: float
    num_bytes: int
    num_engines: int
    probe_difference: float | None
    """Largest difference of a probe's log-probabilities; None where `generator.verify_weight_sync` is off."""


class RayTransport:
    """Implements `WeightTransport` for an `EnginePool`."""

    def __init__(self, pool: EnginePool, record_file: Path) -> None:
        self.pool = pool
        self._record_file = record_file
        self._last: tuple[Callable[[], Iterator[Packed]], int] | None = None
        self.verify: Verify | None = None
        """Set where `generator.verify_weight_sync` is on."""
        pool.bring_up_to_date = self.bring_up_to_date

    def sync(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """All engines, or the run ends: raises EngineError, ActorError or DeadlineError naming the engine."""
        self.pool.wait_ready()
        self.pool.wake_up()
        started = time.monotonic()
        if isinstance(weights, WorkerWeights):
            group = weights.group
            source: Callable[[], Iterator[Packed]] = lambda: packed_by_workers(WorkerWeights(group))  # noqa: E731
        else:
            parts = list(packed_here(weights))
            source = lambda: iter(parts)  # noqa: E731
        num_bytes = self._send(source(), version, self.pool.actors)
        self.pool.set_version(version)
        self._last = (source, version)
        seconds = time.monotonic() - started
        difference = self.verify(version) if self.verify is not None else None
        self._record(
            SyncRecord(
                version=version,
                seconds=seconds,
                num_bytes=num_bytes,
                num_engines=len(self.pool.actors),
                probe_difference=difference,
            )
        )

    def bring_up_to_date(self, actor: RemoteActor) -> None:
        """The weights of the last sync for an engine that was started anew; the policy has not stepped since."""
        if self._last is None:
            raise EngineError(f"{actor} cannot get the current weights: nothing was synced yet")
        source, version = self._last
        self._send(source(), version, [actor])

    def _send(self, parts: Iterator[Packed], version: int, actors: Sequence[RemoteActor]) -> int:
        """Begin, buckets, finish; returns the bytes sent."""
        self.pool.call("begin_update", "sync", actors=actors)
        num_tensors = num_bytes = 0
        for part in parts:
            self.pool.call("update", "sync", part.ref, actors=actors)
            num_tensors += part.num_tensors
            num_bytes += part.num_bytes
        versions = self.pool.call("finish_update", "sync", version, num_tensors, actors=actors)
        for actor, found in zip(actors, versions):
            if found != version:
                raise EngineError(f"{actor} serves weights of version {found} after a sync to version {version}")
        return num_bytes

    def _record(self, record: SyncRecord) -> None:
        with self._record_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(vars(record)) + "\n")


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A bucket in the object store."""

    ref: Any
    num_tensors: int
    num_bytes: int


def packed_by_workers(weights: WorkerWeights) -> Iterator[Packed]:
    """Each bucket as rank 0 packed it; the next one is gathered while the caller uses this one."""
    buckets = weights.buckets()
    pending = weights.begin_bucket(buckets[0][0])
    for index, (names, num_bytes) in enumerate(buckets):
        ref = weights.finish_bucket(pending)
        if index + 1 < len(buckets):
            pending = weights.begin_bucket(buckets[index + 1][0])
        yield Packed(ref=ref, num_tensors=len(names), num_bytes=num_bytes)


def packed_here(weights: Iterator[tuple[str, Tensor]]) -> Iterator[Packed]:
    """Buckets of weights that this process holds, e.g. of a checkpoint."""
    for bucket in in_buckets(weights):
        yield Packed(ref=ray.put(Answer(value=bucket)), num_tensors=len(bucket.names), num_bytes=len(bucket.data))
