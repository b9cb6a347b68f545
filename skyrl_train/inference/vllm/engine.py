"""`VLLMEngine`: a vLLM engine on a thread of its own. Token ids in, token ids and log-probabilities out.

One thread owns the engine: it takes commands from a queue and steps while requests run, so that requests join and leave
a running batch at any time (continuous batching). On a CPU the engine's core runs in this process, which starts in
seconds; on a GPU vLLM runs it in a process of its own.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from skyrl_train.config.models import LoraConfig
from skyrl_train.errors import DeadlineError, EngineError
from skyrl_train.inference.settings import EngineSettings
from skyrl_train.inference.vllm.core import VLLMCore
from skyrl_train.inference.vllm.processes import EngineProcesses
from skyrl_train.rollout import listener
from skyrl_train.types import GenerationOutput, GenerationRequest
from skyrl_train.weight_sync import Receiver, UpdatableEngine
from skyrl_train.weights import Bucket, StreamPlan, Update, pack_bucket, tensors_of

if TYPE_CHECKING:
    from skyrl_train.endpoints import Rendezvous

T = TypeVar("T")

_CLOSE_TIMEOUT_S = 20.0
_START_TIMEOUT_S = 3600.0
"""On Ray `placement.start_timeout_s` ends earlier."""


class _EngineThread:
    """The thread that owns a `VLLMCore`: it takes commands between two steps."""

    def __init__(self, settings: EngineSettings, processes: EngineProcesses) -> None:
        """Load the model and wait for it. Raises EngineError with vLLM's reason."""
        self._commands: queue.SimpleQueue[Callable[[VLLMCore], None] | None] = queue.SimpleQueue()
        started: Future[VLLMCore] = Future()
        self._thread = threading.Thread(
            target=self._work, args=(settings, processes, started), name="vllm-engine", daemon=True
        )
        self._thread.start()
        try:
            self.core = started.result(_START_TIMEOUT_S)
        except FutureTimeoutError:
            if started.done():
                raise
            what = "vLLM, asked to load the model,"
            raise DeadlineError(what, _START_TIMEOUT_S, "Is the model's disk reachable?") from None

    def post(self, command: Callable[[VLLMCore], None]) -> None:
        """Have the thread do it when it comes to it."""
        self._commands.put(command)

    def call(self, function: Callable[[VLLMCore], T]) -> T:
        """Return what `function` gives, or raise what it raises, on the thread."""
        future: Future[T] = Future()

        def command(core: VLLMCore) -> None:
            try:
                future.set_result(function(core))
            except BaseException as error:
                future.set_exception(error)

        self._commands.put(command)
        return future.result()

    def end(self, timeout_s: float) -> None:
        """Close the core, and wait for that no longer than `timeout_s`. Idempotent."""
        self._commands.put(None)
        self._thread.join(timeout_s)

    def _work(self, settings: EngineSettings, processes: EngineProcesses, started: Future[VLLMCore]) -> None:
        try:
            core = VLLMCore(settings, processes)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(core)
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


class VLLMEngine(UpdatableEngine):
    """Implements `InferenceEngine`. Methods may be called from any thread."""

    def __init__(self, settings: EngineSettings, tokenizer: Any = None) -> None:
        """Load the model and wait for it. Raises EngineError with vLLM's reason.

        `tokenizer` is what every engine is given; vLLM loads its own.
        """
        del tokenizer
        self._plan: StreamPlan | None = None
        self._processes = EngineProcesses()
        try:
            self._thread = _EngineThread(settings, self._processes)
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
        return self._thread.core.weight_version

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
        heard = listener()
        self._thread.post(lambda core: core.add(request, future, heard))
        return future

    def abort(self, request_id: str) -> None:
        """Give a request up; it ends with nothing, and stop reason `abort`."""
        self._thread.post(lambda core: core.abort(request_id))

    def load_adapter(self, name: str, lora: LoraConfig, tensors: Mapping[str, Tensor]) -> None:
        """Take an adapter beside the others; requests name it. It stays as it is until it is unloaded.

        Args:
            name: A new one.
            lora: Its rank, at most that of the settings' model, and the layers that it adapts.
            tensors: Whole, under the names of `model/lora/adapter.py: adapter_tensors`.

        Raises EngineError.
        """
        self._thread.call(lambda core: core.add_adapter(name, lora, tensors))

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter, if it is there, that nobody samples from any more."""
        self._thread.call(lambda core: core.remove_adapter(name))

    def receivers(self) -> list[Receiver]:
        """Return its workers, one per device, by rank. Raises EngineError."""
        found = self._thread.call(lambda core: core.ask_workers("receiver"))
        return [Receiver(device=device, dtype=dtype) for device, dtype in found]

    def can_import(self, bucket: Bucket) -> bool:
        """Return whether all its workers can read the memory that the bucket's owner exports. Raises EngineError."""
        how = {"handles": dict(bucket.handles), "num_bytes": bucket.num_bytes}
        return all(self._thread.call(lambda core: core.ask_workers("can_import", **how)))

    def take_plan(self, plan: StreamPlan) -> None:
        """Keep what the syncs are that follow the next `meet`."""
        self._plan = plan

    def meet(self, rendezvous: Rendezvous) -> None:
        """Join a trainer that broadcasts its weights. Raises EngineError."""
        if self._plan is None:
            raise EngineError("this engine was told to meet a trainer before it was told what that brings")
        how = {"init_info": {**vars(rendezvous), "plan": self._plan.fields()}}
        self._thread.call(lambda core: core.ask_workers("init_weight_transfer_engine", **how))

    def receive(self, version: int, update: Update) -> None:
        """Take all that the plan says. After an error the engine answers nothing any more."""
        num_tensors = sum(len(bucket.names) for bucket in self._plan.buckets) if self._plan else 0
        self._thread.call(lambda core: core.receive(version, update, num_tensors))

    def begin_update(self) -> None:
        """From here on nothing is computed until `finish_update`; new requests wait."""
        self._thread.call(lambda core: core.begin_update())

    def update(self, bucket: Bucket) -> None:
        """Take some of the weights. After an error the engine answers nothing any more."""
        sent = pack_bucket(tensors_of(bucket)) if bucket.tensors else bucket
        self._thread.call(lambda core: core.update(sent))

    def finish_update(self, version: int, num_tensors: int) -> int:
        """Serve with the new weights, under `version`, which it returns. `num_tensors` were sent in all."""
        return self._thread.call(lambda core: core.finish_update(version, num_tensors))

    def sleep(self) -> None:
        """Free the device for others."""
        self._thread.call(lambda core: core.sleep())

    def sleep_without_weights(self) -> None:
        """Free the device for others; all weights are sent before the next request."""
        self._thread.call(lambda core: core.sleep(keeps_weights=False))

    def wake_up(self, tag: str) -> None:
        """Take the device again, for `weights` or for the `kv_cache`."""
        self._thread.call(lambda core: core.wake_up(tag))

    def close(self) -> None:
        """Idempotent; what still waits gets an EngineError. A core that hangs does not outlive it."""
        self._thread.end(0.0 if self.suspended else _CLOSE_TIMEOUT_S)
        self._processes.close()
