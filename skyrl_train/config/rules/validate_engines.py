"""Rules of inference engines: vLLM and its own arguments (read from its source, unimported), servers, weight transport."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from skyrl_train.config.environment.agents import AGENT_RULES
from skyrl_train.config.fields.fields import Rule
from skyrl_train.config.models.engines import GeneratorConfig, ships_adapter
from skyrl_train.config.models.models import ModelConfig
from skyrl_train.config.models.placement import PlacementConfig, PlatformConfig
from skyrl_train.errors import Violation
from skyrl_train.registry import did_you_mean

LARGEST_VLLM_RANK = 512
"""The largest rank of an adapter that vLLM applies."""
LARGEST_VLLM_TEMPERATURE = 2.0
_FIELD = "generator.vllm.engine_args"
_WITHOUT_SETTING = (
    "device_ids",
    "disable_log_stats",
    "distributed_executor_backend",
    "logprobs_mode",
    "master_addr",
    "master_port",
    "nnodes",
    "node_rank",
    "prefill_context_parallel_size",
    "weight_transfer_config",
    "worker_extension_cls",
)
SET_BY_TRAINER = {
    **dict.fromkeys(_WITHOUT_SETTING, ""),
    "data_parallel_size": "generator.vllm.num_engines",
    "dtype": "generator.vllm.dtype",
    "enable_lora": "generator.vllm.lora_sync",
    "enable_prefix_caching": "generator.vllm.prefix_caching",
    "enable_return_routed_experts": "trainer.moe_routing_replay",
    "enable_sleep_mode": "placement.offload",
    "enforce_eager": "generator.vllm.enforce_eager",
    "generation_config": "generator.sampling",
    "gpu_memory_utilization": "generator.vllm.gpu_memory_utilization",
    "kv_cache_memory_bytes": "generator.vllm.kv_cache_gib",
    "max_lora_rank": "model.lora.rank",
    "max_loras": "generator.vllm.lora_sync",
    "max_model_len": "generator.max_context_length",
    "max_num_seqs": "generator.vllm.max_num_seqs",
    "model": "model.path",
    "revision": "model.revision",
    "seed": "seed",
    "tensor_parallel_size": "generator.vllm.tensor_parallel_size",
    "tokenizer": "model.tokenizer_path",
    "trust_remote_code": "model.trust_remote_code",
}
"""Arguments of vLLM that are not the user's to pass, and the setting that says the same; empty where there is none."""
_PLAIN: dict[str, type | tuple[type, ...]] = {
    "bool": bool,
    "int": int,
    "float": (int, float),
    "str": str,
    "None": type(None),
}


def _engine_arguments(generator: GeneratorConfig) -> Iterator[Violation]:
    """Names and plain types against the signature of the installed vLLM, which is read and not imported: that takes
    seconds. Where vLLM is not installed here, only what the trainer sets is refused."""
    given = generator.vllm.engine_args
    if not given or generator.backend != "vllm":
        return
    known = engine_args_fields()
    for name, value in given.items():
        field = f"{_FIELD}.{name}"
        if name in SET_BY_TRAINER:
            setting = SET_BY_TRAINER[name]
            remedy = f"set {setting} instead" if setting else f"drop {field}: the trainer depends on its own value"
            yield Violation.of(field, value, "is set by the trainer", remedy)
        elif known and name not in known:
            remedy = did_you_mean(name, list(known)) or "see `vllm.EngineArgs` for what there is"
            yield Violation.of(field, value, "is no argument of the installed vllm.EngineArgs", remedy)
        elif not _fits(value, known.get(name, "")):
            yield Violation.of(field, value, f"must be of type {known[name]}, as vllm.EngineArgs says", f"drop {field}")


def _pipeline(generator: GeneratorConfig, placement: PlacementConfig, platform: PlatformConfig) -> Iterator[Violation]:
    """What excludes engines whose layers lie on several devices."""
    given = generator.vllm.engine_args
    if generator.backend != "vllm":
        return
    if placement.colocate_all and "pipeline_parallel_size" in given:
        rule = "cannot be combined with placement.colocate_all"
        remedy = "set placement.colocate_all=false, or generator.vllm.tensor_parallel_size instead"
        yield Violation.of(f"{_FIELD}.pipeline_parallel_size", given["pipeline_parallel_size"], rule, remedy)
    elif platform.name == "cpu" and given.get("pipeline_parallel_size", 1) != 1:
        rule, remedy = "must be 1 on a CPU", "set generator.vllm.tensor_parallel_size instead"
        yield Violation.of(f"{_FIELD}.pipeline_parallel_size", given["pipeline_parallel_size"], rule, remedy)


def _quantization(generator: GeneratorConfig) -> Iterator[Violation]:
    """What excludes engines whose weights are rounded at each sync."""
    rules = {
        "is known to generator=hf and generator=vllm alone": (
            generator.backend not in ("hf", "vllm"),
            "set generator.quantization=none; a server's own is set there, and "
            "trainer.algorithm.off_policy.weight=token here",
        ),
        "cannot be combined with generator.vllm.lora_sync=adapter, which sends no matrices to be rounded": (
            ships_adapter(generator),
            "set generator.vllm.lora_sync=merged",
        ),
        "cannot be combined with generator.vllm.engine_args.quantization: one of them says how": (
            "quantization" in generator.vllm.engine_args,
            "drop one of the two",
        ),
    }
    for rule, (broken, remedy) in rules.items():
        if broken and generator.quantization != "none":
            yield Violation.of("generator.quantization", generator.quantization, rule, remedy)


@cache
def engine_args_fields() -> dict[str, str]:
    """Arguments of the installed `vllm.EngineArgs` and their types as written there; none where vLLM is not installed."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return {}
    source = Path(found.origin).parent / "engine" / "arg_utils.py"
    tree = ast.parse(source.read_text(encoding="utf-8"))
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    return {
        statement.target.id: ast.unparse(statement.annotation)
        for body in classes
        for statement in body.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


def _fits(value: Any, annotation: str) -> bool:
    """Whether a value is of one of the plain types of an annotation; what is not plain is vLLM's to check."""
    names = annotation.split(" | ")
    if not all(name in _PLAIN for name in names):
        return True
    return any(isinstance(value, _PLAIN[name]) for name in names) and (not isinstance(value, bool) or "bool" in names)


def _temperature(generator: GeneratorConfig, name: str) -> Iterator[Violation]:
    """The temperature of `generator.sampling` or `generator.eval_sampling` is one that vLLM accepts."""
    if generator.backend not in ("vllm", "http"):
        return
    temperature = getattr(generator, name).temperature
    if temperature > LARGEST_VLLM_TEMPERATURE:
        rule = (
            f"must be at most {LARGEST_VLLM_TEMPERATURE:g} with generator.backend={generator.backend}: "
            "vLLM refuses a request with more"
        )
        remedy = f"try generator.{name}.temperature={LARGEST_VLLM_TEMPERATURE:g}, or generator=hf"
        yield Violation.of(f"generator.{name}.temperature", temperature, rule, remedy)


def _lora_sync(generator: GeneratorConfig, model: ModelConfig) -> Iterator[Violation]:
    if generator.vllm.lora_sync == "adapter" and (rank := model.lora.rank) > LARGEST_VLLM_RANK:
        rule = f"must be at most {LARGEST_VLLM_RANK} with generator.vllm.lora_sync=adapter"
        remedy = "set generator.vllm.lora_sync=merged, which knows no limit"
        yield Violation.of("model.lora.rank", rank, rule, remedy)


def _vllm(generator: GeneratorConfig) -> Iterator[Violation]:
    if generator.backend != "vllm":
        return
    sampling = generator.sampling
    truncated = sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0
    if truncated and sampling.temperature not in (0.0, 1.0):
        rule = (
            "must be 1 where top_p, top_k or min_p truncate: vLLM reports log-probabilities either before the "
            "temperature or after truncation, and training needs those in between"
        )
        remedy = "try generator.sampling.temperature=1.0, or top_p=1.0 top_k=-1 min_p=0.0"
        yield Violation.of("generator.sampling.temperature", sampling.temperature, rule, remedy)


def _http(generator: GeneratorConfig) -> Iterator[Violation]:
    url = generator.http.url
    if generator.backend == "http" and not url.startswith(("http://", "https://")):
        rule = "must begin with http:// or https://"
        yield Violation.of("generator.http.url", url, rule, f"try generator.http.url=http://{url or '127.0.0.1:8000'}")


ENGINE_RULES: tuple[Rule, ...] = (
    *AGENT_RULES,
    _vllm,
    _http,
    *(partial(_temperature, name=name) for name in ("sampling", "eval_sampling")),
    _lora_sync,
    _engine_arguments,
    _pipeline,
    _quantization,
)
