"""Rules of `generator.vllm.engine_args` and `generator.seeds`: what vLLM's own source takes, and what the trainer sets."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from skyrl_train.config.schema import Config
from skyrl_train.errors import Violation
from skyrl_train.registry import did_you_mean, part_name

_FIELD = "generator.vllm.engine_args"
_NONE = ""
SET_BY_TRAINER = {
    "data_parallel_size": "generator.vllm.num_engines",
    "device_ids": _NONE,
    "disable_log_stats": _NONE,
    "distributed_executor_backend": _NONE,
    "dtype": "generator.vllm.dtype",
    "enable_lora": "generator.vllm.lora_sync",
    "enable_prefix_caching": "generator.vllm.prefix_caching",
    "enable_sleep_mode": "placement.colocate_all",
    "enforce_eager": "generator.vllm.enforce_eager",
    "generation_config": "generator.sampling",
    "gpu_memory_utilization": "generator.vllm.gpu_memory_utilization",
    "kv_cache_memory_bytes": "generator.vllm.kv_cache_gib",
    "logprobs_mode": _NONE,
    "master_addr": _NONE,
    "master_port": _NONE,
    "max_lora_rank": "model.lora.rank",
    "max_loras": "generator.vllm.lora_sync",
    "max_model_len": "generator.max_context_length",
    "max_num_seqs": "generator.vllm.max_num_seqs",
    "model": "model.path",
    "nnodes": _NONE,
    "node_rank": _NONE,
    "prefill_context_parallel_size": _NONE,
    "revision": "model.revision",
    "seed": "seed",
    "tensor_parallel_size": "generator.vllm.tensor_parallel_size",
    "tokenizer": "model.tokenizer_path",
    "trust_remote_code": "model.trust_remote_code",
    "weight_transfer_config": _NONE,
    "worker_extension_cls": _NONE,
}
"""Arguments of vLLM that are not the user's to pass, and the setting that says the same; empty where there is none."""
_PLAIN: dict[str, type | tuple[type, ...]] = {
    "bool": bool,
    "int": int,
    "float": (int, float),
    "str": str,
    "None": type(None),
}


def engine_argument_violations(config: Config) -> Iterator[Violation]:
    """Names and plain types against the signature of the installed vLLM, which is read and not imported: that takes
    seconds. Where vLLM is not installed here, only what the trainer sets is refused."""
    given = config.generator.vllm.engine_args
    if given and config.generator.backend != "vllm":
        yield _violation(
            _FIELD,
            given,
            f"does nothing with generator.backend={part_name(config.generator.backend)}",
            "add generator=vllm",
        )
        return
    known = engine_args_fields() if given else {}
    for name, value in given.items():
        field = f"{_FIELD}.{name}"
        if name in SET_BY_TRAINER:
            setting = SET_BY_TRAINER[name]
            remedy = f"set {setting} instead" if setting else f"drop {field}: the trainer depends on its own value"
            yield _violation(field, value, "is set by the trainer", remedy)
        elif known and name not in known:
            remedy = did_you_mean(name, list(known)) or "see `vllm.EngineArgs` for what there is"
            yield _violation(field, value, "is no argument of the installed vllm.EngineArgs", remedy)
        elif not _fits(value, known.get(name, "")):
            yield _violation(field, value, f"must be of type {known[name]}, as vllm.EngineArgs says", f"drop {field}")


def _pipeline_violations(config: Config) -> Iterator[Violation]:
    """Of engines whose layers lie on several devices."""
    given = config.generator.vllm.engine_args
    if config.generator.backend != "vllm":
        return
    if config.placement.colocate_all and "pipeline_parallel_size" in given:
        yield _violation(
            f"{_FIELD}.pipeline_parallel_size",
            given["pipeline_parallel_size"],
            "cannot be combined with placement.colocate_all",
            "set placement.colocate_all=false, or generator.vllm.tensor_parallel_size instead",
        )
    elif config.platform.name == "cpu" and given.get("pipeline_parallel_size", 1) != 1:
        yield _violation(
            f"{_FIELD}.pipeline_parallel_size",
            given["pipeline_parallel_size"],
            "must be 1 on a CPU",
            "set generator.vllm.tensor_parallel_size instead",
        )


def seeds_violations(config: Config) -> Iterator[Violation]:
    """Engines that have no seed of their own to fall back on."""
    backend = config.generator.backend
    if config.generator.seeds == "engine" and backend not in ("vllm", "http"):
        yield _violation(
            "generator.seeds",
            "engine",
            f"does nothing with generator.backend={part_name(backend)}",
            "drop generator.seeds",
        )


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


def _violation(field: str, value: object, rule: str, remedy: str) -> Violation:
    return Violation(field=field, rule=rule, value=repr(value), remedy=remedy)


ENGINE_ARGUMENT_RULES = (engine_argument_violations, _pipeline_violations, seeds_violations)
"""Every rule of this file."""
