"""`VLLMEngine`: a vLLM engine on a thread of its own. Token ids in, token ids and log-probabilities out.

One thread owns the engine: it takes commands from a queue and steps while requests run, so that requests join and leave
a running batch at any time (continuous batching). On a CPU the engine's core runs in this process, which starts in
seconds; on a GPU vLLM runs it in a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from skyrl_train.inference.settings import EngineSettings
from skyrl_train.inference.vllm_core import VLLMCore
from skyrl_train.inference.vllm_processes import EngineProcesses
from skyrl_train.inference.vllm_settings import VLLMSettings, vllm_settings
from skyrl_train.types import GenerationOutput, GenerationRequest
from skyrl_train.weight_sync.receiver import Receiver, UpdatableEngine
from skyrl_train.weights import Bucket, pack_bucket, tensors_of

if TYPE_CHECKING:
    from skyrl_train.endpoints import Rendezvous

T = TypeVar("T")

_CLOSE_TIMEOUT_S = 20.0


class VLLMEngine(UpdatableEngine):
    """Implements `InferenceEngine`. Methods may be called from any thread."""

    def __init__(self, settings: EngineSettings, tokenizer: Any = None) -> None:
        """Load the model and wait for it. Raises EngineError with vLLM's reason.

        `tokenizer` is what every engine is given; vLLM loads its own.
        """
        del tokenizer
        chosen = vllm_settings(settings)
        self._version = -1
        self._commands: queue.SimpleQueue[Callable[[VLLMCore], None] | None] = queue.SimpleQueue()
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._work, args=(chosen, started), name="vllm-engine", daemon=True)
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

    @property
    def weight_version(self) -> int:
        """Version of the last update that vLLM confirmed; -1 before it."""
        return self._version

    @contextlib.contextmanager
    def lease(self) -> Iterator[None]:
        """Requests join and leave a running batch, so nothing waits for anybody."""
        yield

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Return the answer; a request that is cancelled is given up. Raises EngineError where vLLM refuses, and
        EngineDeadError where it broke or a process of it is gone."""
        try:
            return await asyncio.wrap_future(self.submit(request))
        except asyncio.CancelledError:
            self.abort(request.request_id)
            raise

    def submit(self, request: GenerationRequest) -> Future[GenerationOutput]:
        """Return what will have the answer. During a weight update the request waits for the end."""
        future: Future[GenerationOutput] = Future()
        self._commands.put(lambda core: core.add(request, future))
        return future

    def abort(self, request_id: str) -> None:
        """Gives a request up; it ends with nothing, and stop reason `abort`."""
        self._commands.put(lambda core: core.abort(request_id))

    def receivers(self) -> list[Receiver]:
        """Its workers, one per device, by rank. Raises EngineError."""
        found = self._call(lambda core: core.ask_workers("receiver"))
        return [Receiver(device=device, dtype=dtype) for device, dtype in found]

    def can_import(self, bucket: Bucket) -> bool:
        """Return whether all its workers can read the memory that the bucket's owner exports. Raises EngineError."""
        how = {"handles": dict(bucket.handles), "num_bytes": bucket.num_bytes}
        return all(self._call(lambda core: core.ask_workers("can_import", **how)))

    def meet(self, rendezvous: Rendezvous) -> None:
        """Joins a trainer that broadcasts its weights. Raises EngineError."""
        how = {"init_info": vars(rendezvous)}
        self._call(lambda core: core.ask_workers("init_weight_transfer_engine", **how))

    def begin_update(self) -> None:
        """From here on nothing is computed until `finish_update`; new requests wait."""
        self._call(lambda core: core.begin_update())

    def update(self, bucket: Bucket) -> None:
        """Takes some of the weights. After an error the engine answers nothing any more."""
        sent = pack_bucket(tensors_of(bucket)) if bucket.tensors else bucket
        self._call(lambda core: core.update(sent))

    def finish_update(self, version: int, num_tensors: int) -> int:
        """Serves with the new weights, under `version`, which it returns. `num_tensors` were sent in all."""
        self._version = self._call(lambda core: core.finish_update(version, num_tensors))
        return self._version

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

    def _work(self, settings: VLLMSettings, started: Future[None]) -> None:
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
