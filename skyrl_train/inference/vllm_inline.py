"""vLLM without Ray: one engine of this machine as an `InferenceEngine`, and the transport that hands weights to it.

vLLM's core is a process of its own, since vLLM changes classes of transformers for the whole process that it computes in. It
takes buckets from shared memory, or, where it computes on the trainer's GPU, from memory that the trainer lends it there.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from skyrl_train.errors import DeadlineError, EngineError
from skyrl_train.types import GenerationOutput, GenerationRequest
from skyrl_train.weight_sync.buckets import Bucket, Receiver, bucket_groups, pack, pack_bucket, wire_dtype
from skyrl_train.weight_sync.lending import Loan, device_name, require_lenders

if TYPE_CHECKING:
    from skyrl_train.learner.turns import DeviceTurns
    from skyrl_train.weight_sync.transport import SyncRecords

T = TypeVar("T")
Weights = Iterator[tuple[str, Tensor]]

NAME = "the vLLM engine"
"""In messages."""
_LOOK_EVERY_S = 0.5
"""While an answer is owed: how often it is looked whether the core is stopped."""


class LocalEngine(Protocol):
    """An engine whose core is on this machine, e.g. `VLLMEngine`. Calls block until they are done, or raise EngineError."""

    @property
    def suspended(self) -> bool:
        """Whether a process of it is stopped by a signal, so that no answer can come."""
        ...

    def generate(self, request: GenerationRequest) -> Future[GenerationOutput]: ...

    def abort(self, request_id: str) -> None: ...

    def receivers(self) -> list[Receiver]: ...

    def can_borrow(self, bucket: Bucket) -> bool: ...

    def begin_update(self) -> None: ...

    def update(self, bucket: Bucket) -> None: ...

    def finish_update(self, version: int, num_tensors: int) -> int: ...

    def sleep(self) -> None: ...

    def wake_up(self, tag: str) -> None: ...

    def close(self) -> None: ...


class WatchedEngine:
    """An engine that always answers in time: one that dies says so itself, one that is stopped or hangs is given up."""

    def __init__(self, engine: LocalEngine, *, call_timeout_s: float, silence_timeout_s: float) -> None:
        """`silence_timeout_s`: so long a process of it may be stopped while an answer is owed."""
        self.engine = engine
        self._call_timeout_s, self._silence_timeout_s = call_timeout_s, silence_timeout_s
        self._stopped_since: float | None = None

    def wait_ready(self) -> None:
        """At once: it has loaded the model."""

    def sleep(self) -> None:
        """Frees its devices."""
        self.call("sleep", self.engine.sleep)

    def wake_up(self, tag: str) -> None:
        """Takes its devices again, for `weights` or for the `kv_cache`."""
        self.call("wake_up", lambda: self.engine.wake_up(tag))

    def call(self, what: str, function: Callable[[], T]) -> T:
        """What `function`, a call to the engine named `what`, returns or raises. Raises DeadlineError."""
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work, name=f"vllm-{what}", daemon=True).start()
        ends = time.monotonic() + self._call_timeout_s
        while not wait([future], timeout=_LOOK_EVERY_S).done:
            self.require_sign_of_life(what)
            if time.monotonic() > ends:
                remedy = "Raise placement.call_timeout_s if it only needs longer"
                raise DeadlineError(f"{NAME} ({what})", self._call_timeout_s, remedy)
        return future.result()

    async def answer(self, request: GenerationRequest) -> GenerationOutput:
        """Its answer. Raises EngineError, DeadlineError."""
        pending = asyncio.wrap_future(self.engine.generate(request))
        try:
            while not (await asyncio.wait({pending}, timeout=_LOOK_EVERY_S))[0]:
                self.require_sign_of_life("generate")
        except asyncio.CancelledError:
            self.engine.abort(request.request_id)
            raise
        return pending.result()

    def require_sign_of_life(self, what: str) -> None:
        """Raises DeadlineError where a process of the engine has been stopped for too long."""
        now = time.monotonic()
        if not self.engine.suspended:
            self._stopped_since = None
            return
        self._stopped_since = self._stopped_since or now
        if now - self._stopped_since > self._silence_timeout_s:
            raise DeadlineError(
                f"{NAME} ({what}): a process of it is stopped (state T of ps) and", self._silence_timeout_s
            )


class InlineEngine:
    """Implements `InferenceEngine`. `generate` is used from one event loop, everything else from one other thread."""

    def __init__(self, watched: WatchedEngine, turns: DeviceTurns) -> None:
        self._watched, self._turns = watched, turns
        self._version = -1

    @property
    def weight_version(self) -> int:
        """Of the last sync that the engine confirmed."""
        return self._version

    def set_version(self, version: int) -> None:
        """The engine confirmed it."""
        self._version = version

    @contextlib.contextmanager
    def lease(self) -> Iterator[None]:
        """Requests join and leave a running batch, so nothing waits for anybody."""
        yield

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Raises EngineError, EngineDeadError where a process of vLLM's is gone, DeadlineError where one is stopped."""
        if not self._turns.engines_serve:
            await asyncio.to_thread(self._turns.engines)
        return await self._watched.answer(request)

    def ask(self, request: GenerationRequest) -> list[tuple[str, GenerationOutput]]:
        """As a probe of a sync asks."""
        self._turns.engines()
        return [(NAME, self._watched.call("generate", self._watched.engine.generate(request).result))]

    def close(self) -> None:
        """Ends vLLM's processes."""
        self._watched.engine.close()


class BucketTransport:
    """Implements `WeightTransport` for an `InlineEngine`."""

    def __init__(
        self,
        engine: InlineEngine,
        watched: WatchedEngine,
        turns: DeviceTurns,
        records: SyncRecords,
        *,
        way: str,
        device: torch.device,
        adapter_of: Callable[[Weights], Weights] | None = None,
    ) -> None:
        """`way`: `auto`, `shared_memory` or `cuda_ipc` (`generator.vllm.weight_transport`). `device`: of the trainer.
        `adapter_of`: where the engine applies an adapter beside its own weights, what it gets in place of a policy's."""
        self._engine, self._watched, self._turns, self._records = engine, watched, turns, records
        self._way, self._device, self._adapter_of = way, device, adapter_of
        self._lends: bool | None = None
        """Known from the first sync on."""

    def sync(self, weights: Weights, version: int) -> None:
        """Raises EngineError, or DeadlineError; the engine answers nothing any more then."""
        started = time.monotonic()
        local, call = self._watched.engine, self._watched.call
        num_tensors = num_bytes = 0
        with self._turns.syncing():
            receivers = call("receivers", local.receivers)
            if self._lends is None:
                self._lends = self._decide(receivers)
            call("begin_update", local.begin_update)
            chosen = self._adapter_of(weights) if self._adapter_of else in_wire_dtype(weights, wire_dtype(receivers))
            for group in bucket_groups(chosen):
                with self._handed_over(group) as bucket:
                    call("update", lambda: local.update(bucket))  # called before the next
                num_tensors += len(bucket.names)
                num_bytes += bucket.num_bytes
            found = call("finish_update", lambda: local.finish_update(version, num_tensors))
        if found != version:
            raise EngineError(f"{NAME} serves weights of version {found} after a sync to version {version}")
        self._engine.set_version(version)
        self._records.add(version, started=started, num_bytes=num_bytes, num_engines=1)

    def _decide(self, receivers: list[Receiver]) -> bool:
        """Whether buckets are lent. Raises EngineError where they are to be and nobody could borrow them."""
        borrowers, here = {receiver.device for receiver in receivers}, device_name(self._device)
        if self._way == "cuda_ipc":
            require_lenders(borrowers, [here])
            return True
        if self._way == "shared_memory" or self._device.type == "cpu" or borrowers != {here}:
            return False
        with self._lent([("probe", torch.zeros(1, device=self._device))]) as bucket:
            return self._watched.call("can_borrow", lambda: self._watched.engine.can_borrow(bucket))

    @contextlib.contextmanager
    def _handed_over(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]:
        if not self._lends:
            yield pack_bucket(weights)
            return
        with self._lent(weights) as bucket:
            yield bucket

    @contextlib.contextmanager
    def _lent(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]:
        """A bucket whose bytes the engine's workers copy on their device, where they are until this ends."""
        bucket, flat = pack(weights, self._device)
        loan = Loan(flat)
        try:
            yield replace(bucket, handles=loan.handles)
        finally:
            loan.close()


def in_wire_dtype(weights: Weights, dtype: str) -> Weights:
    """float32 matrices in `dtype`, everything else as it is; empty leaves all."""
    for name, tensor in weights:
        rounds = bool(dtype) and tensor.dtype == torch.float32 and tensor.ndim > 1
        yield name, tensor.to(getattr(torch, dtype)) if rounds else tensor
