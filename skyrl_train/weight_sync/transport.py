"""A weight sync: what begins an update of engines, what ends it, and what is recorded of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from skyrl_train.endpoints import Endpoint
from skyrl_train.errors import EngineError
from skyrl_train.weight_sync.device_sharing import DeviceSharing
from skyrl_train.weight_sync.receiver import Receiver, UpdatableEngine, wire_dtype
from skyrl_train.weight_sync.transports import Route, RouteContext, Transport, shared_memory
from skyrl_train.weights import Bucket, ModelWeights, Update

PROBED_SYNCS = 10
"""The first so many, then every `PROBED_EVERY`th."""
PROBED_EVERY = 50


@dataclass(frozen=True, kw_only=True)
class Probed:
    """What a sync's probe measured, in nats; None where none was sent."""

    probe_difference: float | None = None
    """Largest difference of a log-probability between an engine and the trainer."""
    probe_moved: float | None = None
    """Change of the trainer's, a mean over tokens, since an engine's last answer that was seen to be right."""
    probe_noise: float | None = None
    """What rounding makes of that mean."""
    probe_unseen: int | None = None
    """Probes in a row whose movement was too small to be told from rounding."""


Verify = Callable[[ModelWeights, int], Probed | None]
"""Compares engines with the trainer after a sync of these weights to that version, or with -1 before the first; None where
there is nothing to compare with. Raises EngineError."""


@dataclass(frozen=True, kw_only=True)
class SyncRecord(Probed):
    """What one sync did; a line of `weight_sync.jsonl`."""

    version: int
    seconds: float
    num_bytes: int
    num_engines: int
    probe_seconds: float | None
    """What the probe took; not in `seconds`."""


class SyncRecords:
    """Has syncs verified, since an engine that does not take the weights says nothing itself, and writes a line for each."""

    def __init__(self, file: Path | None, verify: Verify | None = None, *, verify_each: bool | None = True) -> None:
        """`file`: None writes nothing. `verify_each`: `generator.verify_weight_sync`."""
        self._file, self._verify, self._verify_each = file, verify, verify_each
        self._count = 0

    def begin(self, weights: ModelWeights) -> None:
        """A sync comes. Before the first one engines are asked as they were loaded, where no tolerance is given."""
        if self._verify is not None and self._count == 0 and self._verify_each is None:
            with suppress(EngineError):  # of an engine that cannot answer yet
                self._verify(weights, -1)

    def add(self, weights: ModelWeights, version: int, *, started: float, num_bytes: int, num_engines: int) -> None:
        """A sync that began at `started`, of `time.monotonic()`, and is over. Raises EngineError where it is refused."""
        synced = time.monotonic()
        often = self._verify_each is None and (self._count < PROBED_SYNCS or self._count % PROBED_EVERY == 0)
        wanted = self._verify_each or often or self._count == 0
        found = self._verify(weights, version) if self._verify is not None and wanted else None
        self._count += 1
        record = SyncRecord(
            version=version,
            seconds=synced - started,
            num_bytes=num_bytes,
            num_engines=num_engines,
            probe_seconds=None if found is None else time.monotonic() - synced,
            **vars(found or Probed()),
        )
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(vars(record)) + "\n")


class WeightSync:
    """Implements `WeightTransport` for engines in this process or in others."""

    def __init__(
        self,
        engines: Callable[[], Endpoint[UpdatableEngine]],
        transport: Transport,
        settings: RouteContext,
        sharing: DeviceSharing,
        records: SyncRecords,
        *,
        full_sync_every: int = 1,
        weight_change_tolerance: float = 0.0,
        adapter_only: bool = False,
        quiet: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """
        Args:
            engines: Gives those that are to take the next weights.
            transport: Brings weights to them.
            settings: What the transport is told of the way.
            sharing: Who has the devices when.
            records: Where syncs are verified and written down.
            full_sync_every: Of so many syncs one sends all weights, the others what changed since.
            weight_change_tolerance: By how much a weight may differ from what an engine has of it and not be sent.
            adapter_only: Engines get the adapter alone, which they apply beside weights of their own.
            quiet: Entered for a sync: keeps requests from engines whose weights must not change while one runs.
        """
        self._engines, self._transport, self._settings = engines, transport, settings
        self._sharing, self._records, self._adapter_only = sharing, records, adapter_only
        self._full_sync_every, self._tolerance, self._quiet = full_sync_every, weight_change_tolerance, quiet
        self._kept: dict[str, object] = {}
        self._last: ModelWeights | None = None
        """Weights of the last sync."""
        self._version = -1
        self._planned: tuple[object, tuple[Receiver, ...], Sequence[Bucket]] | None = None
        """Who took part in the last update, and what was asked of them."""
        self._met: object = None
        """Who took part in the last sync, where what changed since can be sent."""
        self._num_since_full = 0
        # Engines may drop their weights only where a sync brings all of them: what
        # changed goes into what they kept, and an adapter is applied beside it.
        if full_sync_every == 1 and not adapter_only:
            sharing.resends(self._resend)

    @property
    def version(self) -> int:
        """Newest version that an engine may answer with, and oldest for what it is asked from now on: that of the last sync,
        or of one that engines are about to confirm; -1 before the first."""
        return self._version

    def sync(self, weights: ModelWeights, version: int) -> None:
        """Bring weights to all engines. Raises EngineError, ActorError or DeadlineError naming the engine: an engine to
        which anything happens between begin and finish never computes again."""
        self._sharing.wait_ready()
        self._records.begin(weights)
        started = time.monotonic()
        with self._quiet(), self._sharing.syncing():
            # Asked only now: while requests were waited for, engines may have been given up, or come back.
            engines = self._engines()
            ends = (weights.senders.members, engines.members)
            update = self._next_update(ends)
            num_bytes = self._update(weights, engines, self._transport, version, update)
            self._last, self._met = weights, ends
        # Outside: the probe is answered by engines that are wholly awake, beside which the policy has no room.
        self._records.add(weights, version, started=started, num_bytes=num_bytes, num_engines=len(engines.members))

    def _resend(self) -> None:
        """Bring the weights of the last sync to engines that have none. Raises EngineError where the policy has trained."""
        if self._last is None or self._sharing.weights_moved:
            raise EngineError(
                "engines were asked between an update and its weight sync, while they have no weights: this is a fault of "
                "skyrl_train; placement.offload=false avoids it where there is room"
            )
        with self._sharing.syncing():
            self._update(self._last, self._engines(), self._transport, self._version)

    def catch_up(self, engine: Endpoint[UpdatableEngine], then: Callable[[bool], None]) -> None:
        """Bring the weights of the last sync to an engine that was started again, unless the policy has trained since.

        `then` is told whether the engine has them, before another sync can begin.
        """
        with self._sharing.catching_up(engine) as possible:
            last = self._last if possible else None
            if last is not None:
                # Whatever the transport of all: this one takes them beside others, which go on serving.
                self._met = None
                self._update(last, engine, shared_memory, self._version)
            then(last is not None)

    def _next_update(self, ends: object) -> Update:
        """What to send: all to engines that were not there at the last sync, from ranks that were not, or where that one
        failed; otherwise what changed, `full_sync_every` - 1 times in a row."""
        every = self._full_sync_every
        if every == 1:
            return ""
        # Both ends have to have the same copy, which changes are counted from.
        is_full = self._met != ends or self._num_since_full + 1 >= every
        self._num_since_full = 0 if is_full else self._num_since_full + 1
        self._met = None  # until this one is over
        return "keep" if is_full else "changes"

    def _plan(
        self, weights: ModelWeights, engines: Endpoint[UpdatableEngine]
    ) -> tuple[tuple[Receiver, ...], Sequence[Bucket]]:
        """Return the engines' workers and what all weights are, of which ends are asked where they are not those of the last
        time."""
        ends = (weights.senders.members, engines.members)
        if self._planned is None or self._planned[0] != ends:
            workers = engines.call(UpdatableEngine.receivers, "sync")
            receivers = tuple(receiver for each in workers for receiver in each)
            # Kept for later syncs: shapes and types do not change, and all ends are asked for them.
            buckets = weights.buckets(adapter_only=self._adapter_only, dtype=wire_dtype(receivers))
            self._planned = ends, receivers, buckets
        return self._planned[1:]

    def _update(
        self,
        weights: ModelWeights,
        engines: Endpoint[UpdatableEngine],
        transport: Transport,
        version: int,
        update: Update = "",
    ) -> int:
        """Return the bytes that travelled to each engine."""
        receivers, planned = self._plan(weights, engines)
        buckets = [replace(bucket, update=update, tolerance=self._tolerance) for bucket in planned]
        route = Route(
            weights=weights,
            engines=engines,
            receivers=receivers,
            version=version,
            settings=self._settings,
            kept=self._kept,
        )
        engines.call(UpdatableEngine.begin_update, "sync")
        num_bytes = transport(route, buckets)
        num_tensors = sum(len(bucket.names) for bucket in buckets)
        # All wait now. The first to go on may answer with the new weights before the last has confirmed them.
        self._version = version
        versions = engines.call(UpdatableEngine.finish_update, "sync", version, num_tensors)
        for name, found in zip(engines.names, versions):
            # Its answers would be taken for those of a policy that did not sample them.
            if found != version:
                raise EngineError(f"{name} serves weights of version {found} after a sync to version {version}")
        return sum(bucket.num_bytes for bucket in buckets) if num_bytes is None else num_bytes


class NoTransport:
    """Implements `WeightTransport` where nothing answers with the weights: replay has no engine."""

    def sync(self, weights: ModelWeights, version: int) -> None:
        """Leave the weights where they are."""
