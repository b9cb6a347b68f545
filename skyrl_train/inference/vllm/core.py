"""`VLLMCore`: a vLLM engine as its one thread sees it. Requests, weight updates and sleep, in vLLM's own calls.

Nothing here is thread-safe: `inference/vllm/engine.py` owns the thread.
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from skyrl_train.config.models import LoraConfig
from skyrl_train.errors import EngineDeadError, EngineError
from skyrl_train.inference.settings import EngineSettings, stop_token_ids
from skyrl_train.inference.vllm.adapter import NamedAdapters, with_adapter
from skyrl_train.inference.vllm.images import prompt_with_images
from skyrl_train.inference.vllm.processes import CoreClient, EngineProcesses
from skyrl_train.inference.vllm.settings import (
    core_environment,
    sampling_arguments,
    vllm_arguments,
    vllm_environment,
)
from skyrl_train.rollout import Listener
from skyrl_train.types import NO_ROUTING, GenerationOutput, GenerationRequest, StopReason, VersionRun, routing_column
from skyrl_train.weights import Bucket, Update, in_file

T = TypeVar("T")

_SHARED_MEMORY = Path("/dev/shm")
COLLECTS_AFTER = (50_000, 20, 100)
"""Thresholds of the garbage collector in an engine's process. What a step makes for each request lies in no ring; by
Python's own thresholds looking for rings takes half of what is done beside vLLM's core (`bench/engine_front.py`)."""


@dataclass
class Running:
    """A request that vLLM has, and its answer so far."""

    request: GenerationRequest
    future: Future[GenerationOutput]
    listener: Listener | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[VersionRun] = field(default_factory=list)
    """As of `GenerationOutput`; empty before the first token."""
    num_cached_tokens: int | None = None
    """As of `GenerationOutput`; there once the last token is."""
    routed_experts: NDArray[np.int16] = field(default_factory=lambda: NO_ROUTING)
    """As of `GenerationOutput`, of prompt (cached tokens included) and response; there once the last token is."""

    def take(self, completion: Any, version: int) -> None:
        """New tokens, sampled by weights of `version`."""
        if completion.token_ids and (not self.weight_versions or self.weight_versions[-1].version != version):
            self.weight_versions.append(VersionRun(start=len(self.token_ids), version=version))
        self.token_ids += completion.token_ids
        if self.listener is not None and completion.token_ids:
            self.listener(tuple(completion.token_ids))
        self.logprobs += [scores[token].logprob for scores, token in zip(completion.logprobs, completion.token_ids)]
        if completion.routed_experts is not None:
            self.routed_experts = routing_column(completion.routed_experts)


class VLLMCore:
    """One engine. Between `begin_update` and `finish_update` nothing is computed, wherever vLLM's core runs; after an error
    in between, or once a process of vLLM is gone, it answers nothing any more."""

    def __init__(self, settings: EngineSettings, processes: EngineProcesses) -> None:
        """Loads the model and waits for it. What vLLM starts is among `processes`. Raises EngineError with its reason, and
        ModelError as `vllm_arguments`."""
        self._settings, arguments = settings, vllm_arguments(settings)
        self._stop_token_ids = stop_token_ids(settings.model)
        environment, of_core = vllm_environment(settings), core_environment(settings)
        separate_core = environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
        self._separate_workers = separate_core or arguments.get("distributed_executor_backend") == "mp"
        """Whether vLLM computes in processes of its own, which the memory of this one does not reach."""
        self._quantizes = bool(arguments.get("quantization"))
        self._requests: dict[str, Running] = {}
        self._held: list[Running] = []
        self._updating = False
        self._num_received = 0
        self._broken = ""
        self._has_adapter, self._named = False, NamedAdapters()
        self._was_paused = False
        """Whether vLLM scheduled nothing before the update either, as where it sleeps in part."""
        self.weight_version = -1
        os.environ.update(environment)
        if not separate_core:
            os.environ.update(of_core)
        self.processes = processes
        try:
            from vllm import EngineArgs
            from vllm.config import WeightTransferConfig
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.llm_engine import LLMEngine

            from skyrl_train.inference.vllm import worker as vllm_worker

            arguments["weight_transfer_config"] = WeightTransferConfig(backend=vllm_worker.BACKEND)
            with self.processes.starting(of_core if separate_core else {}):
                # By this context vLLM chooses what sizes of its batches are not stated: those of its own class `LLM`, many
                # times what an engine alone gets.
                context = UsageContext.LLM_CLASS
                self._engine: Any = LLMEngine.from_engine_args(EngineArgs(**arguments), usage_context=context)
        except ImportError as error:
            self.processes.close()
            raise EngineError(
                f"vLLM cannot be imported ({error}). Install the extra `cpu` or `vllm`; docs/vllm.md says how"
            ) from error
        except Exception as error:
            self.processes.close()
            raise EngineError(f"vLLM did not start: {type(error).__name__}: {error}") from error

        def died(reason: str) -> None:
            self._broken = f"the engine died: {reason}"
            self._client.give_up(EngineDeadError(self._broken))

        self._seeds_by_request = settings.generator.seeds == "request"
        self._is_keyed = self._seeds_by_request and all(self._engine.collective_rpc("use_keyed_sampler"))
        if settings.rounding != "none":
            self._engine.collective_rpc("round_weights", kwargs={"rounding": settings.rounding})
        self._client = CoreClient(self._engine.engine_core)
        self.processes.watch(self._client.processes, died)
        self._collects_after = gc.get_threshold()
        gc.set_threshold(*COLLECTS_AFTER)

    @property
    def busy(self) -> bool:
        """Whether there is something to compute now."""
        return bool(self._requests) and not self._updating

    def add(
        self, request: GenerationRequest, future: Future[GenerationOutput], listener: Listener | None = None
    ) -> None:
        """`future` gets the answer, or EngineError; `listener` is told tokens as they are sampled. During a weight update
        the request waits for the end; in an engine that awaits its weights it waits for that of the first."""
        if self._broken:
            future.set_exception(EngineDeadError(self._broken))
            return
        if self._updating or (self._settings.awaits_weights and self.weight_version < 0):
            self._held.append(Running(request, future, listener))
            return
        try:
            self._engine.add_request(
                request.request_id,
                self._prompt(request),
                sampling_arguments(
                    request,
                    self._stop_token_ids,
                    seed=request.seed if self._seeds_by_request else None,
                    is_keyed=self._is_keyed,
                ),
                lora_request=self._adapter_of(request),
            )
        except Exception as error:
            text = f"request {request.request_id}: {type(error).__name__}: {error}"
            future.set_exception(EngineDeadError(self._broken) if self._broken else EngineError(text))
            return
        self._requests[request.request_id] = Running(request, future, listener)

    def add_adapter(self, name: str, lora: LoraConfig, tensors: Mapping[str, Tensor]) -> None:
        """Take an adapter beside the others; see `VLLMEngine.load_adapter`. vLLM reads it when a request of it runs, and
        drops the one that has not run for longest: loaded here it could take the place of one that runs."""
        room = self._settings.adapter
        if room is None or lora.rank > room.rank:  # vLLM's core would die of it
            raise EngineError(f"adapter {name!r} has rank {lora.rank}, and the engine room for {room and room.rank}")
        self._named.add(name, lora, tensors)

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter, if it is there."""
        self._named.remove(name)

    def _adapter_of(self, request: GenerationRequest) -> Any:
        if request.adapter:
            return self._named.get(request.adapter)
        return with_adapter() if self._has_adapter else None

    def _prompt(self, request: GenerationRequest) -> dict[str, Any]:
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt_token_ids)}
        if request.images:
            prompt = prompt_with_images(request)
        if self._settings.in_flight_cache == "keep":
            # While requests keep their blocks the prefix cache cannot be reset; under another name nobody finds these.
            prompt["cache_salt"] = f"version {self.weight_version}"
        return prompt

    def step(self) -> None:
        """Takes what was computed next: one token for each request that runs."""
        try:
            outputs = self._engine.step()
        except Exception as error:
            self._broken = str(self._failure(f"the engine broke while it generated: {type(error).__name__}: {error}"))
            self.fail_all(EngineDeadError(self._broken))
            return
        for output in outputs:
            running = self._requests.get(output.request_id)
            if running is None:
                continue
            running.take(output.outputs[0], self.weight_version)
            if output.finished:
                running.num_cached_tokens = output.num_cached_tokens
                del self._requests[output.request_id]
                running.future.set_result(_answer(running, output.outputs[0].finish_reason))

    def abort(self, request_id: str) -> None:
        """Gives a request up; it ends with nothing, and stop reason `abort`."""
        running = self._requests.pop(request_id, None)
        if running is not None:
            if not self._broken:
                self._engine.abort_request([request_id])
            running.future.set_result(_answer(Running(running.request, running.future), "abort"))

    def fail_all(self, error: EngineError) -> None:
        """Give this error to what runs or waits."""
        for waiting in [*self._requests.values(), *self._held]:
            if not waiting.future.done():
                waiting.future.set_exception(error)
        self._requests.clear()
        self._held.clear()

    def ask_workers(self, method: str, **arguments: Any) -> list[Any]:
        """Return what each of vLLM's workers, by rank, answers to a method of it or of `WorkerExtension`.

        Raises EngineError.
        """
        try:
            return list(self._engine.collective_rpc(method, kwargs=arguments))
        except Exception as error:
            raise self._failure(f"vLLM's workers did not do {method}: {type(error).__name__}: {error}") from error

    def begin_update(self) -> None:
        """From here on nothing is computed until `finish_update`. A core that is apart goes on with its requests until it is
        told not to; they keep what they have. What it had answered by then was computed by the old weights, and is taken
        before these change."""

        def begin() -> None:
            self._updating, self._num_received = True, 0
            self._was_paused = self._client.call("is_scheduler_paused")
            self._client.call("pause_scheduler", "keep", False)
            while self._client.has_outputs:
                self.step()
            self._engine.collective_rpc("start_weight_update")

        self._guarded(begin)

    def update(self, bucket: Bucket) -> None:
        """Take some of the weights."""

        def receive() -> None:
            with _for_workers(bucket, separate=self._separate_workers) as sent:
                self._engine.collective_rpc("update_weights", kwargs={"update_info": sent.fields()})
            self._num_received += len(bucket.names)

        self._guarded(receive)

    def receive(self, version: int, update: Update, num_tensors: int) -> None:
        """Take all weights, `num_tensors` of them, from the trainer that the workers met."""

        def receive() -> None:
            info = {"names": (), "dtypes": (), "shapes": (), "version": version, "update": update}
            self._engine.collective_rpc("update_weights", kwargs={"update_info": info})
            self._num_received += num_tensors

        self._guarded(receive)

    def finish_update(self, version: int, num_tensors: int) -> int:
        """Serve with the new weights, under `version`, which is returned. `num_tensors` were sent in all."""

        def finish() -> int:
            if not self._updating:
                raise EngineError("no update was begun")
            if self._num_received != num_tensors:
                raise EngineError(f"{self._num_received} of {num_tensors} parameters arrived")
            self._engine.collective_rpc("finish_weight_update")
            adapter = self._settings.adapter
            if adapter is not None:
                how = {"rank": adapter.rank, "alpha": adapter.alpha}
                if not all(self._engine.collective_rpc("load_adapter", kwargs=how)):
                    raise EngineError("vLLM did not take the adapter")
                self._has_adapter = True
            # Keys and values of older weights would be found again under the same tokens, features under the same images.
            if self._requests and self._settings.in_flight_cache == "keep":
                self._take_back_unanswered()
            elif not self._engine.reset_prefix_cache(reset_running_requests=bool(self._requests)):
                raise EngineError("vLLM did not reset its prefix cache")
            if self._engine.model_config.is_multimodal_model:
                self._engine.reset_encoder_cache()
            self._engine.set_weight_version(str(version))
            self.weight_version = int(self._engine.get_weight_version())
            if not self._was_paused:
                self._client.call("resume_scheduler")
            self._updating = False
            held, self._held = self._held, []
            for waiting in held:
                self.add(waiting.request, waiting.future, waiting.listener)
            return self.weight_version

        return self._guarded(finish)

    def _take_back_unanswered(self) -> None:
        """Hold requests without a token, which begin again with the new weights: they may have found blocks of older ones,
        or would still."""
        names = [name for name, running in self._requests.items() if not running.token_ids]
        if names:
            self._engine.abort_request(names)
        self._held[:0] = [self._requests.pop(name) for name in names]

    def sleep(self, *, keeps_weights: bool = True) -> None:
        """Free the device for others: key-value cache dropped, weights to the host, or dropped where all of them are sent
        before the next request and nothing else is made of them."""
        # Level 2 brings back buffers alone. An adapter stands beside weights that are not sent; kernels of quantized layers
        # have tensors that are neither parameters nor buffers.
        sent_whole = self._settings.adapter is None and not self._quantizes
        self._engine.sleep(level=1 if keeps_weights or not sent_whole else 2)

    def wake_up(self, tag: str) -> None:
        """Take the device again, for `weights` or for the `kv_cache`."""
        self._engine.wake_up([tag])

    def close(self) -> None:
        """End vLLM's processes; what still waits gets an EngineError."""
        self.fail_all(EngineError("the engine was closed"))
        self.processes.expect_end()
        self._client.close()
        self.processes.close()
        self._named.close()
        gc.set_threshold(*self._collects_after)

    def _failure(self, text: str) -> EngineError:
        """Return the error for a failure: what the engine died of where a process of it is gone, else `text`. vLLM says that
        a process is gone without saying which, and before it is known here."""
        if not self._broken and (gone := self.processes.await_end()):
            self._broken = f"the engine died: {gone}"
        return EngineDeadError(self._broken) if self._broken else EngineError(text)

    def _guarded(self, function: Callable[[], T]) -> T:
        if self._broken:
            raise EngineDeadError(self._broken)
        try:
            return function()
        except Exception as error:
            model_type = self._engine.model_config.hf_config.model_type
            text = f"a weight update of this {model_type} model failed half-way, so the engine answers nothing: {error}"
            self._broken = str(self._failure(text))
            self._updating = False
            self.fail_all(EngineDeadError(self._broken))
            raise EngineDeadError(self._broken) from error


@contextlib.contextmanager
def _for_workers(bucket: Bucket, *, separate: bool) -> Iterator[Bucket]:
    """The bucket as vLLM can hand it to its workers: an array does not pass to another process, a file in shared memory
    does."""
    if not separate:
        yield bucket
        return
    with contextlib.ExitStack() as stack:

        def filed(part: Bucket) -> Bucket:
            if part.data is None:
                return part
            place = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
            file = stack.enter_context(tempfile.NamedTemporaryFile(prefix="skyrl-weights-", dir=place))
            return in_file(part, Path(file.name))

        yield replace(bucket, parts=tuple(filed(part) for part in bucket.parts)) if bucket.parts else filed(bucket)


def _answer(running: Running, finish_reason: str) -> GenerationOutput:
    return GenerationOutput(
        token_ids=tuple(running.token_ids),
        logprobs=tuple(running.logprobs),
        stop_reason={"stop": StopReason.STOP, "length": StopReason.LENGTH}.get(finish_reason, StopReason.ABORT),
        weight_versions=tuple(running.weight_versions),
        num_cached_tokens=running.num_cached_tokens,
        routed_experts=running.routed_experts,
    )
