"""Memory in a plan: from a config to what each model's passes hold on one device. Reads configs of models, no weights.

Imports no torch for the families whose memory is counted; others are traced, which takes seconds, and so does a step
that is traced or compiled where `trainer.memory_probe` asks for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from skyrl_train.batch.plan_memory import DeviceMemory, PassMemory
from skyrl_train.config.algorithm import needs_reference
from skyrl_train.config.bundles import Role, takes_turns
from skyrl_train.config.learners import LearnerSettings, learner_settings
from skyrl_train.config.parts import OPTIMIZERS
from skyrl_train.config.schema import Config
from skyrl_train.errors import MemoryLimitError
from skyrl_train.learner.memory import MemoryFacts, MemorySettings, Phase, resident_bytes
from skyrl_train.learner.planned_passes import PlannedPasses, effort_of, planned_passes
from skyrl_train.registry import PartSpec

_CONTEXT_BYTES = 1_000_000_000
"""Of one process on a CUDA device: context, kernels, communication buffers. About what PyTorch with NCCL takes."""


def plan_memory(config: Config) -> DeviceMemory | None:
    """None where `plan.device_memory_gb` asks for nothing. Raises ModelError where a model's config cannot be had."""
    stated = config.trainer.memory_budget_gb * (1 << 30) if config.trainer.sizes_itself else 0.0
    device_bytes = int(config.plan.device_memory_gb * 1e9 or stated)
    if not device_bytes:
        return None
    facts, paths, effort = models_of(config), _paths(config), effort_of(config.trainer)
    in_turns = takes_turns(config.placement, config.generator, config.platform)
    shared = {role: _sharing(config, role, facts) for role in facts}
    margin_bytes = int(device_bytes * config.trainer.memory_margin)
    engine = _engine_share(config)
    at_rest = {role: sum(resident_bytes(each, training=False).values()) for role, each in facts.items()}
    processes = 0 if config.platform.name == "cpu" else 1
    passes: list[PassMemory] = []
    for role, each in facts.items():
        beside = 0 if in_turns else sum(at_rest[other] for other in shared[role] if other != role)
        contexts = processes * _CONTEXT_BYTES * _num_processes(config, len(shared[role]), engine=engine > 0)
        limit = device_bytes - margin_bytes - contexts - beside
        phases: tuple[Phase, ...] = ("scoring",) if role == "reference" else ("training", "scoring")
        others = sum(at_rest[other] for other in shared[role] if other != role)
        planned = planned_passes(
            _learner_at(config, role, paths[role]), config.generator.max_context_length, each, effort
        )
        for phase in phases:
            predicted = _pass(config, role, phase, planned, limit)
            passes.append(_beside_measured(config, predicted, each, planned, 0 if in_turns else others))
    with_engine = [] if in_turns else [role for role in facts if config.placement.backend == "inline"]
    return DeviceMemory(
        device_bytes=device_bytes,
        longest=config.generator.max_context_length,
        margin_bytes=margin_bytes,
        context_bytes=processes * _CONTEXT_BYTES * _num_processes(config, len(facts), engine=engine > 0),
        passes=tuple(passes),
        engine_bytes=int(engine * device_bytes),
        resident_bytes=sum(at_rest[role] for role in with_engine) if engine else 0,
        effort=effort.line() if effort.num_sizes else "",
    )


def _pass(config: Config, role: str, phase: Phase, planned: PlannedPasses, limit_bytes: int) -> PassMemory:
    try:
        budget = planned.token_budget(phase, limit_bytes)
        rows, _ = divmod(budget, config.generator.max_context_length)
    except MemoryLimitError:
        budget, rows = 0, 0
    estimate = planned.estimate(phase, max(1, rows))
    return PassMemory(
        role=role,
        phase=phase,
        budget=budget,
        rows_of_longest=rows,
        moment=estimate.moment,
        kinds=estimate.kinds,
        limit_bytes=limit_bytes,
    )


def _beside_measured(
    config: Config, predicted: PassMemory, facts: MemoryFacts, planned: PlannedPasses, others_bytes: int
) -> PassMemory:
    """With what a run of the same configuration measured, where `output_dir` holds its `memory.json`."""
    try:
        content = json.loads((Path(config.output_dir) / "memory.json").read_text(encoding="utf-8"))
        report = content[predicted.role][0]
        phase = report["training" if predicted.phase == "training" else "forward"]
        same = all(report["facts"][name] == value for name, value in _expected_facts(config, facts).items())
        if not same or not phase["probes"]:
            return predicted
        tokens, limit = int(phase["tokens"]), int(phase["limit_bytes"]) - others_bytes
        phase_name: Phase = "training" if predicted.phase == "training" else "scoring"
        resident = sum(resident_bytes(facts, training=phase_name == "training").values())
        within = resident + int((limit - resident) / (1 + config.trainer.memory_margin))
        return replace(predicted, measured_tokens=tokens, predicted_tokens=planned.token_budget(phase_name, within))
    except (OSError, ValueError, KeyError, TypeError, IndexError, MemoryLimitError):
        return predicted


def _expected_facts(config: Config, facts: MemoryFacts) -> dict[str, str]:
    """What `memory.json` says of a model that is trained as this one is; the names of `sizing._facts`."""
    model, settings = facts.model, facts.settings
    parameters = model.parameters + model.adapter_parameters(settings.lora_rank)
    if settings.head == "values":
        parameters += model.hidden_size + 1 - model.head_parameters
    merges = config.generator.merge_stepwise == "auto"
    return {
        "parameters": str(parameters),
        "type": config.model.dtype,
        "recomputes": str(settings.checkpointing),
        "longest": str(config.generator.max_context_length),
        "layout": f"{config.trainer.layout}{', merged turns' if merges else ''}",
        "margin": str(config.trainer.memory_margin),
    }


def models_of(config: Config) -> Mapping[Role, MemoryFacts]:
    """What a prediction needs of each model that the run holds. A reference that is the policy without its adapter is no
    model of its own."""
    from skyrl_train.learner.memory_trace import facts_at

    placement, paths = config.placement, _paths(config)
    found: dict[Role, MemoryFacts] = {
        "policy": facts_at(
            paths["policy"], _settings(config, placement.policy_num_workers), revision=config.model.revision
        )
    }
    reference = config.reference.model.path
    of_adapter = config.model.lora.rank and reference == "policy" and not config.trainer.algorithm.ref_update_interval
    if needs_reference(config.trainer.algorithm) and not of_adapter:
        settings = _settings(config, placement.ref_num_workers, optimizer="none", lora_rank=0)
        found["reference"] = facts_at(paths["reference"], settings)
    if config.critic.model.path:
        settings = _settings(
            config,
            placement.critic_num_workers,
            optimizer=_optimizer(config.critic.optimizer.name),
            lora_rank=config.critic.model.lora.rank,
            head="values",
        )
        found["critic"] = facts_at(paths["critic"], settings)
    return found


def _learner_at(config: Config, role: Role, path: str) -> LearnerSettings:
    """What the run would build the model from, of the sizes of the one at `path`."""
    settings = learner_settings(config, role)
    return replace(settings, model=replace(settings.model, path=path))


def _paths(config: Config) -> dict[Role, str]:
    """Where each model's config is."""
    policy = config.plan.architecture or config.model.path
    stated: dict[Role, str] = {"reference": config.reference.model.path, "critic": config.critic.model.path}
    return {"policy": policy, **{role: policy if path == "policy" else path for role, path in stated.items()}}


def _settings(config: Config, num_ranks: int, **others: object) -> MemorySettings:
    values: dict[str, object] = {
        "strategy": config.strategy.name,
        "num_ranks": num_ranks,
        "cpu_offload": config.strategy.cpu_offload,
        "gradient_sync": config.strategy.gradient_sync,
        "device_bytes": int(config.plan.device_memory_gb * 1e9),
        "dtype": config.model.dtype,
        "checkpointing": config.model.gradient_checkpointing,
        "eager": config.model.attention == "eager" and config.trainer.layout == "padded",
        "layout": "prefix_shared" if config.trainer.layout == "auto" else config.trainer.layout,
        "optimizer": _optimizer(config.trainer.policy.optimizer.name),
        "lora_rank": config.model.lora.rank,
        "accelerator": config.platform.name != "cpu",
    }
    return MemorySettings(**{**values, **others})  # type: ignore[arg-type]


def _optimizer(spec: PartSpec) -> str:
    """Whose state is predicted: AdamW's for a custom optimizer, of which nothing is known."""
    return "sgd" if OPTIMIZERS.name_of(spec) == "sgd" else "adamw"


def _sharing(config: Config, role: Role, facts: Mapping[Role, MemoryFacts]) -> list[Role]:
    """The models on the same device, `role` among them."""
    if config.placement.backend == "inline" or config.placement.colocate_all:
        return list(facts)
    if config.placement.colocate_policy_ref and role in ("policy", "reference"):
        return [other for other in facts if other in ("policy", "reference")]
    return [role]


def _num_processes(config: Config, num_models: int, *, engine: bool) -> int:
    return 1 + engine if config.placement.backend == "inline" else num_models + engine


def _engine_share(config: Config) -> float:
    """Of the device, where an engine shares it; it sleeps while the models compute."""
    shares = (
        takes_turns(config.placement, config.generator, config.platform)
        and config.generator.backend == "vllm"
        and config.platform.name != "cpu"
    )
    return config.generator.vllm.gpu_memory_utilization if shares else 0.0
