"""What a vLLM engine is started with, and how a request says how to sample: our configuration in vLLM's words."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from skyrl_train.inference.settings import EngineSettings
from skyrl_train.inference.vllm.adapter import adapter_arguments
from skyrl_train.inference.vllm.images import image_arguments
from skyrl_train.inference.vllm.sampler import SEED_KEY
from skyrl_train.model import resolve_model_path
from skyrl_train.telemetry.logs import Answering
from skyrl_train.types import GenerationRequest

_CPU_KV_CACHE_BYTES = 256 * 2**20


def vllm_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Return the arguments of `vllm.EngineArgs`. Raises ModelError where there is no such model, or vLLM cannot read its
    images."""
    gpu, inline, model = settings.platform.name == "gpu", not settings.in_actor, settings.model
    options = settings.generator.vllm
    folder = str(resolve_model_path(model.path, model.revision))
    arguments: dict[str, Any] = {
        "model": folder,
        "tokenizer": folder if model.tokenizer_path is None else str(resolve_model_path(model.tokenizer_path)),
        "dtype": model.dtype if options.dtype == "auto" else options.dtype,
        "seed": settings.seed % 2**31,
        "max_model_len": settings.max_context_length,
        "tensor_parallel_size": options.tensor_parallel_size,
        "enable_prefix_caching": options.prefix_caching,
        "logprobs_mode": logprobs_mode(settings.generator.sampling.temperature),
        "trust_remote_code": model.trust_remote_code,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "use_tqdm_on_load": not inline,
        "worker_extension_cls": "skyrl_train.inference.vllm.worker.WorkerExtension",
    }
    # On a CPU compiling takes longer than it saves; on a GPU vLLM's default captures graphs.
    enforce_eager = options.enforce_eager if options.enforce_eager is not None or gpu else True
    if enforce_eager is not None:
        arguments["enforce_eager"] = enforce_eager
    if options.max_num_seqs is not None:
        arguments["max_num_seqs"] = options.max_num_seqs
    if options.kv_cache_gib or not gpu:
        num_bytes = int(options.kv_cache_gib * 2**30) or _CPU_KV_CACHE_BYTES
        arguments["kv_cache_memory_bytes"] = num_bytes
    if settings.records_routing:
        arguments["enable_return_routed_experts"] = True
    if options.devices_per_engine > 1:
        # Inside a placement group vLLM would take its Ray executor, which refuses a bundle of more than one GPU.
        arguments["distributed_executor_backend"] = "mp"
    if gpu:
        arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
        arguments["enable_sleep_mode"] = settings.leaves_devices
    else:
        # A prompt in one piece rounds the same whatever else is in the batch.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(2048, settings.max_context_length)
    if settings.quantizes_fp8:
        arguments["quantization"] = "fp8_per_channel"  # activations by token, as they come
    arguments |= image_arguments(Path(folder), on_gpu=gpu)
    if settings.adapter is not None:
        arguments |= adapter_arguments(settings.adapter, settings.num_adapters)
    arguments |= options.engine_args
    # Of no meaning to vLLM, but pickled to each process of its own.
    arguments["additional_config"] = {**arguments.get("additional_config", {}), "skyrl_train": Answering("vLLM")}
    return arguments


def vllm_environment(settings: EngineSettings) -> dict[str, str]:
    """Return the variables to be set before vLLM is imported."""
    gpu, inline = settings.platform.name == "gpu", not settings.in_actor
    return {
        # A core in this process starts in seconds; one in a process of its own is what vLLM is made for on a GPU. Beside a
        # trainer it has to be one: vLLM changes classes of transformers for the whole process that it computes in.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1"
        if inline
        else os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1" if gpu else "0"),
        # Processes bear a mark in their environment, by which they are ended with this one (`EngineProcesses`). A forked one
        # would not; and where vLLM gives a process a title, that would be written over its environment.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "SPT_NOENV": "1",
        # Kernels whose result for a request does not depend on what else is in the batch.
        **({"VLLM_BATCH_INVARIANT": "1"} if gpu and settings.deterministic else {}),
        # Else vLLM binds each worker to the cores of a memory node of its own, and there may be but one.
        **(
            {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            if not gpu and settings.generator.vllm.devices_per_engine > 1
            else {}
        ),
        # On Ray warnings go to a log; here they would stand between the lines of the steps.
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR" if inline else "WARNING"),
        "VLLM_NO_USAGE_STATS": "1",
    }


def core_environment(settings: EngineSettings) -> dict[str, str]:
    """Return the environment of the core: where that is a process of its own, nothing else in this one may see it."""
    if settings.platform.name == "gpu" or settings.generator.vllm.enforce_eager is False:
        return {}
    # On a CPU vLLM would compile a helper of its sampler with the machine's C++ compiler: there need not be one, and torch's
    # build command breaks on a path with a space. A trainer's own model may well be compiled.
    return {"TORCHDYNAMO_DISABLE": "1"}


def logprobs_mode(temperature: float) -> str:
    """Which of vLLM's log-probabilities are those of the distribution that was sampled from, before truncation: the raw
    ones at temperature 1 (and for greedy decoding, which is scored at 1), else those after the temperature."""
    return "raw_logprobs" if temperature in (0.0, 1.0) else "processed_logprobs"


def sampling_arguments(
    request: GenerationRequest, stop_token_ids: tuple[int, ...], *, seed: int | None, is_keyed: bool
) -> Any:
    """vLLM's form of how to sample. `stop_token_ids`: what ends a sequence; `seed`: None leaves the noise to the engine;
    `is_keyed`: our sampler reads it."""
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    return VLLMSamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_generate_length,
        seed=None if is_keyed else seed,
        extra_args={SEED_KEY: seed} if is_keyed and seed is not None else None,
        logprobs=0,
        stop=list(sampling.stop) or None,
        include_stop_str_in_output=True,
        stop_token_ids=[*request.stop_token_ids, *(() if request.ignores_eos else stop_token_ids)],
        ignore_eos=request.ignores_eos,
        # Each step says what is new: what it gave so far would make the cost of a response quadratic in its length.
        output_kind=RequestOutputKind.DELTA,
        detokenize=bool(sampling.stop),
    )
