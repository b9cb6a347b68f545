"""`VLLMEngine`: a vLLM engine on a thread of its own. Token ids in, token ids and log-probabilities out.

One thread owns the engine: it takes commands from a queue and steps while requests run, so that requests join and leave
a running batch at any time (continuous batching). On a CPU the engine's core runs in this process, which starts in
seconds; on a GPU vLLM runs it in a process of its own.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from skyrl_train.inference.vllm_core import VLLMCore
from skyrl_train.inference.vllm_processes import EngineProcesses
from skyrl_train.inference.vllm_settings import EngineSettings
from skyrl_train.types import GenerationOutput, GenerationRequest

if TYPE_CHECKING:
    from skyrl_train.distributed.process_group import Rendezvous
    from skyrl_train.weight_sync.buckets import Bucket, Receiver

T = TypeVar("T")

_CLOSE_TIMEOUT_S = 20.0


class VLLMEngine:
    """One engine. Methods may be called from any thread; `generate` returns a Future."""

    def __init__(self, settings: EngineSettings) -> None:
        """Loads the model and waits for it. Raises EngineError with vLLM's reason."""
        self._commands: queue.SimpleQueue[Callable[[VLLMCore], None] | None] = queue.SimpleQueue()
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._work, args=(settings, started), name="vllm-engine", daemon=True)
        self._core: VLLMCore | None = None
        self._processes = EngineProcesses()
        self._thread.start()
        try:
            started.result()
        except BaseException:  # Ctrl-C among them
            self._processes.close()
            raise

    @property
    def suspended(self) -> bool:
        """Whether a process of vLLM is stopped by a signal, so that no answer can come."""
        return self._processes.suspended

    def generate(self, request: GenerationRequest) -> Future[GenerationOutput]:
        """The answer, in time. EngineError where vLLM refuses; EngineDeadError where it broke or a process of it is gone.
        During a weight update the request waits for the end."""
        future: Future[GenerationOutput] = Future()
        self._commands.put(lambda core: core.add(request, future))
        return future

    def abort(self, request_id: str) -> None:
        """Gives a request up; it ends with nothing, and stop reason `abort`."""
        self._commands.put(lambda core: core.abort(request_id))

    def receivers(self) -> list[Receiver]:
        """Its workers, one per device, by rank. Raises EngineError."""
        return self._call(lambda core: core.receivers())

    def can_borrow(self, bucket: Bucket) -> bool:
        """Whether all its workers can read the memory that the bucket's owner lends. Raises EngineError."""
        return self._call(lambda core: core.can_borrow(bucket))

    def meet(self, rendezvous: Rendezvous) -> None:
        """Joins a trainer that broadcasts its weights. Raises EngineError."""
        self._call(lambda core: core.meet(rendezvous))

    def begin_update(self) -> None:
        """From here on nothing is computed until `finish_update`; new requests wait."""
        self._call(lambda core: core.begin_update())

    def update(self, bucket: Bucket) -> None:
        """Takes some of the weights. After an error the engine answers nothing any more."""
        self._call(lambda core: core.update(bucket))

    def finish_update(self, version: int, num_tensors: int) -> int:
        """Serves with the new weights, under `version`, which it returns. `num_tensors` were sent in all."""
        return self._call(lambda core: core.finish_update(version, num_tensors))

    def sleep(self) -> None:
        """Frees the device for others."""
        self._call(lambda core: core.sleep())

    def wake_up(self, tag: str) -> None:
        """Takes the device again, for `weights` or for the `kv_cache`."""
        self._call(lambda core: core.wake_up(tag))

    def close(self) -> None:
        """Idempotent; what still waits gets an EngineError. A core that hangs does not outlive it."""
        self._commands.put(None)
        self._thread.join(0.0 if self.suspended else _CLOSE_TIMEOUT_S)
        self._processes.close()

    def _call(self, function: Callable[[VLLMCore], T]) -> T:
        """On the engine's thread, between two steps."""
        future: Future[T] = Future()

        def call(core: VLLMCore) -> None:
            try:
                future.set_result(function(core))
            except BaseException as error:
                future.set_exception(error)

        self._commands.put(call)
        return future.result()

    def _work(self, settings: EngineSettings, started: Future[None]) -> None:
        try:
            core = VLLMCore(settings, self._processes)
        except BaseException as error:
            started.set_exception(error)
            return
        self._core = core
        started.set_result(None)
        while True:
            try:
                command = self._commands.get(block=not core.busy)
            except queue.Empty:
                core.step()
                continue
            if command is None:
                core.close()
                return
            command(core)
