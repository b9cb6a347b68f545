"""From a configuration to everything that a dry run shows: batch plan, devices, and what each model's passes hold on one.

Reads configs of models, no weights.

Imports no torch for the families whose memory is counted; others are traced, which takes seconds, and so does a step
that is traced or compiled where `trainer.memory_probe` asks for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from skyrl_train.batch.cost import CostModel
from skyrl_train.config.algorithm import needs_reference
from skyrl_train.config.bundles import Layout, Role, count_engines, shares_devices
from skyrl_train.config.learners import LearnerSettings, gpus_needed, layout_of, learner_settings
from skyrl_train.config.parts import OPTIMIZERS
from skyrl_train.config.platform import Devices
from skyrl_train.config.schema import Config
from skyrl_train.config.validate_batch import sizes_of, validate_batch_sizes
from skyrl_train.errors import ConfigError, MemoryLimitError, ModelError, Violation
from skyrl_train.learner.architectures import read_config
from skyrl_train.learner.memory import MemoryFacts, MemorySettings, Phase, resident_bytes
from skyrl_train.learner.planned_passes import PlannedPasses, effort_of, planned_passes
from skyrl_train.plan.batch_plan import BatchPlan, make_batch_plan
from skyrl_train.plan.device_report import BundleGroup, DeviceMemory, PassMemory, PlacementReport
from skyrl_train.plan.estimate import PassEstimate, RowLengths, assumed_lengths, estimate_passes
from skyrl_train.plan.notes import estimate_notes, plan_notes
from skyrl_train.plan.report import PlanReport, micro_batching_text, rate_points, storage_items
from skyrl_train.registry import PartSpec, part_name

_CONTEXT_BYTES = 1_000_000_000
"""What one process holds on a CUDA device: context, kernels, communication buffers. About what PyTorch with NCCL takes."""


def plan_batches(config: Config, *, num_train_prompts: int) -> BatchPlan:
    """The plan of a run over `num_train_prompts` prompts. Raises ConfigError with every violation."""
    if violations := validate_batch_sizes(config, num_train_prompts=num_train_prompts):
        raise ConfigError(violations)
    return make_batch_plan(config.trainer, config.generator, sizes_of(config), num_train_prompts=num_train_prompts)


def make_plan_report(
    config: Config,
    *,
    num_train_prompts: int,
    lengths: RowLengths | None = None,
    num_parameters: int | None = None,
    violations: Sequence[Violation] = (),
    memory: DeviceMemory | None = None,
    placement: PlacementReport | None = None,
) -> PlanReport:
    """The report of a run over `num_train_prompts` prompts; never raises for sizes that do not fit together.

    Args:
        lengths: recorded row lengths; without them a long-tailed guess is used and said to be one.
        num_parameters: of the policy, where known: adds the sizes of weights and optimizer state.
        violations: of other rules, to be shown with those of the batch sizes.
        memory: what passes hold on a device, where that is asked for.
        placement: which devices the run reserves, where that is known.
    """
    found = [*violations]
    known = {(violation.field, violation.rule) for violation in violations}
    sizes = validate_batch_sizes(config, num_train_prompts=num_train_prompts)
    found += [violation for violation in sizes if (violation.field, violation.rule) not in known]
    if found:
        return PlanReport(
            plan=None,
            num_train_prompts=num_train_prompts,
            micro_batching=micro_batching_text(config.trainer),
            lengths_source="",
            estimates=(),
            learning_rates=(),
            storage=(),
            violations=tuple(found),
            notes=(),
            memory=memory,
            placement=placement,
        )
    plan = plan_batches(config, num_train_prompts=num_train_prompts)
    lengths = lengths or assumed_lengths(
        config.generator, seed=config.seed, max_prompt_length=config.data.max_prompt_length
    )
    estimates = _estimates(config, plan, lengths)
    return PlanReport(
        plan=plan,
        num_train_prompts=num_train_prompts,
        micro_batching=micro_batching_text(config.trainer),
        lengths_source=lengths.source,
        estimates=tuple(estimates),
        learning_rates=(
            *rate_points("policy", config.trainer.policy.optimizer, plan.schedule_steps),
            *rate_points("critic", config.critic.optimizer, plan.critic_schedule_steps),
        ),
        storage=tuple(
            storage_items(
                config.trainer,
                plan,
                lengths,
                num_parameters=num_parameters,
                bytes_per_weight=2 if config.model.dtype == "bfloat16" else 4,
                shards_policy=config.strategy.kind == "fsdp2",
            )
        ),
        violations=(),
        notes=(
            *plan_notes(
                plan,
                trainer=config.trainer,
                generator=config.generator,
                critic_optimizer=config.critic.optimizer,
                num_train_prompts=num_train_prompts,
            ),
            *estimate_notes(estimates),
        ),
        memory=memory,
        placement=placement,
    )


def _estimates(config: Config, plan: BatchPlan, lengths: RowLengths) -> list[PassEstimate]:
    return estimate_passes(
        plan,
        lengths,
        trainer=config.trainer,
        generator=config.generator,
        seed=config.seed,
        costs=planned_costs(config),
    )


def planned_costs(config: Config) -> dict[str, CostModel]:
    """What rows cost on each model whose config is on this machine, by its sizes and the stated rates of its device."""
    costs: dict[str, CostModel] = {}
    device = "cpu" if config.platform.name == "cpu" else ""
    for role, path in _paths(config).items():
        with suppress(ModelError):
            costs[role] = CostModel.of_config(read_config(path, revision=config.model.revision), device=device)
    return costs


def placement_report(config: Config, devices: Devices) -> PlacementReport:
    """The report of a config whose placement is stated, or has been chosen. `devices`: those that were found."""
    trainer, placement = config.trainer, config.placement
    return PlacementReport(
        backend=placement.backend,
        strategy=part_name(config.strategy.name),
        gpus_needed=gpus_needed(config),
        gpus_found=devices.num_gpus,
        found_in=devices.source,
        shares_devices=shares_devices(placement, config.generator, config.platform),
        groups=tuple(_groups(layout_of(config))) if placement.backend == "ray" else (),
        engines=_engines(config),
        training=f"layout {trainer.layout}, micro-batches {part_name(trainer.micro_batching)}",
    )


def _groups(layout: Layout) -> Iterator[BundleGroup]:
    for name, bundles in layout.groups.items():
        nodes = {bundle.node for bundle in bundles if bundle.node is not None}
        yield BundleGroup(
            name=name,
            num_bundles=len(bundles),
            gpus_per_bundle=int(max(bundle.gpus for bundle in bundles)),
            num_nodes=len(nodes),
            slots=tuple((role, len(places)) for role, (group, places) in layout.seats.items() if group == name),
        )


def _engines(config: Config) -> str:
    generator = config.generator
    if not generator.has_own_devices:
        return f"generator={part_name(generator.backend)}"
    vllm, gpu = generator.vllm, config.platform.name == "gpu"
    count = count_engines(config.generator, config.placement)
    parts = [
        f"{count} vLLM engine{'s' * (count != 1)}"
        + (f" of {vllm.devices_per_engine} GPU{'s' * (vllm.devices_per_engine != 1)}" if gpu else ""),
        f"CUDA graphs {'off' if vllm.enforce_eager else 'on'}" if gpu else "",
        f"prefix caching {'on' if vllm.prefix_caching else 'off'}",
        "chunked prefill on" if gpu else "",
        f"{vllm.gpu_memory_utilization:.0%} of a GPU's memory" if gpu else "",
        "its core in a process of its own" if config.placement.backend == "inline" else "",
        "sharing a device with the models"
        if config.placement.backend == "inline" and shares_devices(config.placement, config.generator, config.platform)
        else "",
    ]
    return ", ".join(part for part in parts if part)


def plan_memory(config: Config) -> DeviceMemory | None:
    """Return what passes hold on one device; None where `plan.device_memory_gb` asks for nothing. Raises ModelError
    where a model's config cannot be had."""
    stated = config.trainer.memory_budget_gb * (1 << 30) if config.trainer.sizes_itself else 0.0
    device_bytes = int(config.plan.device_memory_gb * 1e9 or stated)
    if not device_bytes:
        return None
    facts, paths, effort = models_of(config), _paths(config), effort_of(config.trainer)
    one_at_a_time = shares_devices(config.placement, config.generator, config.platform)
    shared = {role: _sharing(config, role, facts) for role in facts}
    margin_bytes = int(device_bytes * config.trainer.memory_margin)
    engine = _engine_share(config)
    at_rest = {role: sum(resident_bytes(each, training=False).values()) for role, each in facts.items()}
    processes = 0 if config.platform.name == "cpu" else 1
    passes: list[PassMemory] = []
    for role, each in facts.items():
        beside = 0 if one_at_a_time else sum(at_rest[other] for other in shared[role] if other != role)
        contexts = processes * _CONTEXT_BYTES * _num_processes(config, len(shared[role]), engine=engine > 0)
        limit = device_bytes - margin_bytes - contexts - beside
        phases: tuple[Phase, ...] = ("scoring",) if role == "reference" else ("training", "scoring")
        others = sum(at_rest[other] for other in shared[role] if other != role)
        planned = planned_passes(
            _learner_at(config, role, paths[role]), config.generator.max_context_length, each, effort
        )
        for phase in phases:
            predicted = _pass(config, role, phase, planned, limit)
            passes.append(_beside_measured(config, predicted, each, planned, 0 if one_at_a_time else others))
    with_engine = [] if one_at_a_time else [role for role in facts if config.placement.backend == "inline"]
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
    """Return the prediction with what a run of the same configuration measured, if `output_dir` holds its `memory.json`."""
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
        "strategy": "ddp"
        if config.strategy.is_custom
        else config.strategy.kind,  # whole on each rank, as far as is known
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
    """Return the engine's share of the device, where it shares it; it sleeps while the models compute."""
    shares = (
        shares_devices(config.placement, config.generator, config.platform)
        and config.generator.has_own_devices
        and config.platform.name != "cpu"
    )
    return config.generator.vllm.gpu_memory_utilization if shares else 0.0
