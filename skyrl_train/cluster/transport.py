"""Weights from learners on Ray to engines on Ray: what begins an update, what ends it, and what is recorded of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

import ray
from torch import Tensor

from skyrl_train.cluster.calls import Answer, RemoteActor
from skyrl_train.cluster.carriers import Carrier
from skyrl_train.cluster.engines import EnginePool
from skyrl_train.cluster.workers import WorkerGroup, WorkerWeights, carried_buckets, planned_buckets
from skyrl_train.errors import EngineError
from skyrl_train.learner.turns import DeviceTurns
from skyrl_train.weight_sync.buckets import Bucket, Receiver, in_buckets, wire_dtype
from skyrl_train.weight_sync.transport import SyncRecords

logger = logging.getLogger(__name__)

Send = Callable[[Sequence[RemoteActor]], list[Bucket]]
"""Brings all weights to these engines, whose update has begun; the buckets that they were."""


class RayTransport:
    """Implements `WeightTransport` for an `EnginePool`."""

    def __init__(
        self,
        pool: EnginePool,
        carrier: Carrier,
        turns: DeviceTurns,
        records: SyncRecords,
        *,
        adapter_only: bool = False,
    ) -> None:
        """`adapter_only`: of a learner's weights engines get the adapter, which they apply beside their own."""
        self.pool = pool
        self._adapter_only = adapter_only
        self._carrier, self._turns = carrier, turns
        self._records = records
        self._again: Send | None = None
        """Sends the weights of the last sync."""
        self._late: dict[int, RemoteActor] = {}
        """Engines that were started anew and have no weights yet, by index."""
        pool.bring_up_to_date = self.bring_up_to_date

    def sync(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """All engines, or the run ends: raises EngineError, ActorError or DeadlineError naming the engine."""
        fleet = self.pool.fleet
        fleet.wait_ready()
        started = time.monotonic()
        with self._turns.syncing():
            for index, engine in self._late.items():
                fleet.admit(index, engine)
            self._late.clear()
            engines = fleet.living
            if isinstance(weights, WorkerWeights):
                group, receivers = weights.group, self._receivers(engines)
                dtype = wire_dtype(receivers)
                self._carrier.prepare(group, engines, receivers)
                self._again = lambda chosen: self._through_object_store(group, chosen, dtype)
                buckets = self._update(engines, version, lambda chosen: self._carried(group, chosen, dtype))
            else:
                held = list(in_buckets(weights))
                self._again = lambda chosen: self._sent(held, chosen)
                buckets = self._update(engines, version, self._again)
        self.pool.set_version(version)
        num_bytes = sum(bucket.num_bytes for bucket in buckets)
        self._records.add(version, started=started, num_bytes=num_bytes, num_engines=len(engines))

    def bring_up_to_date(self, index: int, engine: RemoteActor) -> None:
        """An engine that was started anew gets the weights of the last sync and serves, or waits for the next sync where
        the policy has trained since."""
        with self._turns.catching_up(self.pool.fleet.alone(engine)) as possible:
            if not possible or self._again is None:
                self._late[index] = engine
                logger.warning("%s was started anew and waits for the next weights", engine)
                return
            version = self.pool.weight_version
            self._update([engine], version, self._again)
            self.pool.fleet.admit(index, engine)
            logger.warning("%s serves again, with weights of version %d", engine, version)

    def _update(self, engines: Sequence[RemoteActor], version: int, send: Send) -> list[Bucket]:
        """Between begin and finish engines compute nothing; one to which anything happens there never computes again."""
        fleet = self.pool.fleet
        fleet.call("begin_update", "sync", engines=engines)
        buckets = send(engines)
        num_tensors = sum(len(bucket.names) for bucket in buckets)
        versions = fleet.call("finish_update", "sync", version, num_tensors, engines=engines)
        for engine, found in zip(engines, versions):
            if found != version:
                raise EngineError(f"{engine} serves weights of version {found} after a sync to version {version}")
        return buckets

    def _receivers(self, engines: Sequence[RemoteActor]) -> list[Receiver]:
        """The workers of these engines."""
        return [
            receiver for workers in self.pool.fleet.call("receivers", "sync", engines=engines) for receiver in workers
        ]

    def _carried(self, group: WorkerGroup, engines: Sequence[RemoteActor], dtype: str) -> list[Bucket]:
        buckets = planned_buckets(group, adapter_only=self._adapter_only, dtype=dtype)
        self._carrier.carry(group, buckets, engines)
        return buckets

    def _through_object_store(self, group: WorkerGroup, engines: Sequence[RemoteActor], dtype: str) -> list[Bucket]:
        """Whatever the carrier: for one engine, beside others that go on serving."""
        buckets = planned_buckets(group, adapter_only=self._adapter_only, dtype=dtype)
        for ref in carried_buckets(group, buckets):
            self.pool.fleet.call("update", "sync", ref, engines=engines)
        return buckets

    def _sent(self, buckets: list[Bucket], engines: Sequence[RemoteActor]) -> list[Bucket]:
        """Weights that this process holds, e.g. of a checkpoint."""
        for bucket in buckets:
            self.pool.fleet.call("update", "sync", ray.put(Answer(value=bucket)), engines=engines)
        return buckets
