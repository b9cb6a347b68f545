"""From a configuration to everything that a dry run shows: batch plan, devices, and what is kept and moved.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from skyrl_train.batch.layouts import CostModel, ModelShape, rates_of as device_rates_of
from skyrl_train.batch.planner import TokenBudgets
from skyrl_train.config import AnyConfig, Config, SFTConfig, TrainerConfig
from skyrl_train.config.algorithm import needs_reference
from skyrl_train.config.derived import (
    LearnerSettings,
    ScheduleLength,
    gpus_needed,
    layout_of,
    old_logprobs_scored,
    run_models,
    scores_entropies,
    sft_learner_settings,
)
from skyrl_train.config.models import PlatformConfig, mesh_sizes
from skyrl_train.config.placement import Layout, Role, count_engines, shares_devices
from skyrl_train.config.rules import sizes_of, validate_batch_sizes
from skyrl_train.errors import ConfigError, MemoryLimitError, ModelError, Violation, counted
from skyrl_train.learner.memory import Effort, PredictedPasses
from skyrl_train.model.sizes import model_sizes, read_config
from skyrl_train.plan.batch_plan import BatchPlan, make_batch_plan
from skyrl_train.plan.estimate import PassEstimate, RowLengths, assumed_lengths, estimate_passes
from skyrl_train.plan.forms.scale import MachineRates
from skyrl_train.plan.machine import StepTime, machine_rates, predicted_rates
from skyrl_train.plan.memory.device import (
    CONTEXT_BYTES,
    DeviceMemory,
    device_memory,
    predicted_passes,
    wanted_positions,
)
from skyrl_train.plan.notes import data_notes, environment_notes, estimate_notes, plan_notes, sandbox_notes, size_notes
from skyrl_train.plan.report import (
    BundleGroup,
    PlacementReport,
    PlanReport,
    Storage,
    micro_batching_text,
    rate_points,
    storage_items,
)
from skyrl_train.plan.time import NO_RATES, Rates, RunTime, disk_bytes, run_time, work_of_step
from skyrl_train.registry import part_name
from skyrl_train.system import Devices, gpu_name

Announce = Callable[[str], object]
"""Told of what takes seconds."""
_PROCESS_BYTES = 550_000_000
"""Of a run's process on a CPU without a model: Python, PyTorch and transformers, measured on Linux."""
MachineOf = Callable[[PlatformConfig, str], MachineRates]
"""Of a platform, and of the type in which models compute."""


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
    rates: Rates | None = None,
    machine: MachineOf | None = None,
    num_eval_prompts: int = 0,
    announce: Announce = lambda _: None,
) -> PlanReport:
    """The report of a run over `num_train_prompts` prompts; never raises for sizes that do not fit together.

    Args:
        lengths: recorded row lengths; without them a long-tailed guess is used and said to be one.
        num_parameters: of the policy, where known: adds the sizes of weights and optimizer state.
        violations: of other rules, to be shown with those of the batch sizes.
        memory: what passes hold on a device, where that is asked for.
        placement: which devices the run reserves, where that is known.
        rates: how fast a rank is, where that is known.
        machine: gives the rates of the machine where it is not; asked where there is a plan.
        num_eval_prompts: held-out prompts of an evaluation.
        announce: told of what takes seconds.
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
            violations=tuple(found),
            memory=memory,
            placement=placement,
        )
    plan = plan_batches(config, num_train_prompts=num_train_prompts)
    budgets = _budgets(config.trainer, memory)
    lengths, estimates = _estimates(config, plan, lengths, budgets)
    rates = rates or _rates(config, plan, lengths, estimates, machine, num_eval_prompts)
    return PlanReport(
        plan=plan,
        num_train_prompts=num_train_prompts,
        micro_batching=micro_batching_text(config.trainer, budgets),
        lengths_source=lengths.source,
        estimates=tuple(estimates),
        learning_rates=(
            *rate_points("policy", config.trainer.policy.optimizer, plan.schedule_steps),
            *rate_points("critic", config.critic.optimizer, plan.critic_schedule_steps),
        ),
        storage=tuple(_storage(config, plan, lengths, num_parameters, estimates, announce)),
        notes=(
            *size_notes(config),
            *plan_notes(
                plan,
                trainer=config.trainer,
                generator=config.generator,
                critic_optimizer=config.critic.optimizer,
                num_train_prompts=num_train_prompts,
            ),
            *estimate_notes(estimates),
            *environment_notes(config.environment.env_class),
            *sandbox_notes(config.environment),
            *data_notes(config.data),
        ),
        memory=memory,
        placement=placement,
        time=None if rates is None else _time(config, plan, lengths, estimates, rates),
        disk=disk_bytes(plan, lengths, config.trainer, config.rollouts, num_parameters=num_parameters),
    )


def _estimates(
    config: Config, plan: BatchPlan, lengths: RowLengths | None, budgets: Mapping[str, TokenBudgets]
) -> tuple[RowLengths, list[PassEstimate]]:
    """The lengths of rows, assumed by the settings unless given, and what one pass over such rows computes."""
    lengths = lengths or assumed_lengths(
        config.generator, seed=config.seed, max_prompt_length=config.data.max_prompt_length
    )
    estimates = estimate_passes(
        plan,
        lengths,
        trainer=config.trainer,
        generator=config.generator,
        seed=config.seed,
        costs=planned_costs(config),
        budgets=budgets,
    )
    return lengths, estimates


def _storage(
    config: Config,
    plan: BatchPlan,
    lengths: RowLengths,
    num_parameters: int | None,
    estimates: Sequence[PassEstimate],
    announce: Announce,
) -> Iterator[Storage]:
    """What is kept and moved, and what the process of a run on a CPU takes at most, where that can be predicted."""
    trainer, strategy, workers = config.trainer, config.strategy, config.placement.policy_num_workers
    shards = mesh_sizes(strategy, workers).shard if strategy.kind == "fsdp2" else 1
    yield from storage_items(trainer, config.model, plan, lengths, num_parameters=num_parameters, num_shards=shards)
    positions = _trained_positions(estimates)
    with suppress(ModelError, MemoryLimitError):
        if peak := peak_on_cpu(config, positions, announce):
            when = f"in a training pass of {max(positions.values()):,} positions, activations and logits included; predicted"
            yield Storage(what="most of the whole process", kind="kept", num_bytes=peak, when=when)


def _trained_positions(estimates: Sequence[PassEstimate]) -> dict[str, int]:
    """By role, the computed positions of the largest micro-batch in training."""
    return {each.role: each.largest_micro_batch_tokens for each in estimates if each.role != "reference"}


def peak_on_cpu(config: Config, positions: Mapping[str, int], announce: Announce = lambda _: None) -> int | None:
    """Predict the bytes that the process of a run in one process on a CPU takes at most, activations and logits included.

    Args:
        positions: By role, computed positions of its largest micro-batch in training.
        announce: As in `plan_memory`.

    None where ranks or engines are processes of their own, and where models take less than the process without them, which
    is not worth a trace. Raises ModelError.
    """
    inline = config.platform.name == "cpu" and config.placement.backend == "inline"
    if not inline or config.generator.has_own_devices or config.strategy.kind != "single":
        return None
    sizes = {each.role: model_sizes(each.model.path, revision=each.model.revision) for each in planned_models(config)}
    if sum(4 * each.parameters for each in sizes.values()) < _PROCESS_BYTES / 4:
        return None
    models = models_of(config, Effort(announce=announce))
    at_rest = {role: each.resident_bytes("scoring") for role, each in models.items()}
    in_pass = [
        each.estimate("training", -(-positions[role] // each.longest)).peak_bytes - at_rest[role]
        for role, each in models.items()
        if role in positions
    ]
    engine = models["policy"].counts.total * (2 if config.model.dtype == "bfloat16" else 4)
    held = _PROCESS_BYTES + engine + sum(at_rest.values()) + max(in_pass)
    return int(held * (1 + config.trainer.memory_margin))  # what the allocator has freed, and keeps


def expected_peak_bytes(config: Config, plan: BatchPlan, lengths: RowLengths) -> int | None:
    """Return what `peak_on_cpu` predicts of a run whose rows have these lengths; None also where a model is not known."""
    with suppress(ModelError, MemoryLimitError):
        return peak_on_cpu(config, _trained_positions(_estimates(config, plan, lengths, {})[1]))
    return None


def _budgets(trainer: TrainerConfig, memory: DeviceMemory | None) -> dict[str, TokenBudgets]:
    """By role what micro-batches that size themselves may hold: measured by a run in `output_dir`, or else predicted."""
    found: dict[str, TokenBudgets] = {}
    for each in memory.passes if memory and trainer.sizes_itself else ():
        tokens = each.measured_tokens or each.budget
        before = found.get(each.role, TokenBudgets(training=tokens, forward=tokens))
        training = each.phase == "training"
        found[each.role] = replace(before, training=tokens) if training else replace(before, forward=tokens)
    return {role: budgets for role, budgets in found.items() if budgets.training and budgets.forward}


def planned_shapes(config: Config) -> dict[str, ModelShape]:
    """The sizes of each model whose config is on this machine, by role; a reference that is the policy without its adapter
    is none."""
    shapes: dict[str, ModelShape] = {}
    for settings in planned_models(config):
        with suppress(ModelError, KeyError, TypeError, ValueError):
            architecture = read_config(settings.model.path, revision=settings.model.revision)
            shapes[settings.role] = ModelShape.of_config(architecture)
    return shapes


def planned_costs(config: Config) -> dict[str, CostModel]:
    """What rows cost on each of them, by the rates of the run or the stated ones of its device."""
    rates = device_rates_of("cpu" if config.platform.name == "cpu" else gpu_name(), config.platform.rates)
    return {role: CostModel.of_model(shape, rates) for role, shape in planned_shapes(config).items()}


def expected_step_seconds(
    config: Config, plan: BatchPlan, *, lengths: RowLengths | None = None, num_eval_prompts: int = 0
) -> StepTime | None:
    """Return what a step is expected to take, by what a plan has measured of this machine, or else by stated rates: nothing
    is measured now. None where a model's config is not on this machine.

    Args:
        lengths: Of rows; assumed by the settings unless given.
    """
    lengths, estimates = _estimates(config, plan, lengths, {})
    rates = _rates(config, plan, lengths, estimates, machine_rates, num_eval_prompts)
    if rates is None:
        return None
    phases = {each.name: each.seconds for each in _time(config, plan, lengths, estimates, rates).phases}
    return StepTime(
        source=rates.source,
        generate_s=phases["generate"],
        score_s=phases["score"],
        update_s=phases["update"],
        sync_s=rates.sync_s,
        evaluate_s=rates.each_time_s[1],
    )


def _rates(
    config: Config,
    plan: BatchPlan,
    lengths: RowLengths,
    estimates: Sequence[PassEstimate],
    machine: MachineOf | None,
    num_eval_prompts: int,
) -> Rates | None:
    """Those of the run's models on the machine; None where it, or the sizes of a model, are not known."""
    shapes = planned_shapes(config)
    if machine is None or not {each.role for each in estimates} <= set(shapes):
        return None
    work = work_of_step(plan, lengths, estimates, NO_RATES, models_scored=_models_scored(config, plan))
    generator, slots = config.generator, config.generator.max_batch_size
    if generator.backend == "vllm":
        slots = generator.vllm.most_sequences(on_gpu=config.platform.on_gpu)
    return predicted_rates(
        machine(config.platform, config.model.dtype),
        shapes,
        config.model,
        generator,
        plan,
        lengths,
        estimates,
        work,
        slots=slots,
        num_engines=count_engines(generator, config.placement) if generator.has_own_devices else 1,
        num_eval_prompts=num_eval_prompts,
    )


def _models_scored(config: Config, plan: BatchPlan) -> float:
    """Forwards alone over a batch."""
    later = 1.0 - plan.num_samples_per_step / plan.num_samples_per_batch
    of_policy = {"none": 0.0, "later": later, "all": 1.0}[old_logprobs_scored(config.trainer)]
    reference = needs_reference(config.trainer.algorithm)
    return (1.0 if scores_entropies(config) else of_policy) + reference + bool(config.critic.model.path)


def _time(
    config: Config, plan: BatchPlan, lengths: RowLengths, estimates: Sequence[PassEstimate], rates: Rates
) -> RunTime:
    work = work_of_step(plan, lengths, estimates, rates, models_scored=_models_scored(config, plan))
    return run_time(
        rates,
        work,
        config.trainer,
        total_steps=plan.total_steps,
        num_devices=gpus_needed(config) or 1,
        takes_turns=shares_devices(config.placement, config.generator, config.platform),
    )


def plan_memory(
    config: Config, *, one_row: bool = False, largest_only: bool = False, announce: Announce = lambda _: None
) -> DeviceMemory | None:
    """Predict what passes hold; None where `plan.device_memory_gb` asks for nothing.

    Args:
        one_row: Whether it is enough to know that a row fits; budgets are then one row, or 0.
        largest_only: Whether it is enough to know the largest pass of each model: training, where it is trained.
        announce: Told that a prediction will take a while, where nothing is remembered of the model.

    Raises ModelError where a model's config cannot be had, or its step cannot be traced.
    """
    trainer = config.trainer
    stated = trainer.memory_budget_gb * (1 << 30) if trainer.sizes_itself else 0.0
    device_bytes = int(config.plan.device_memory_gb * 1e9 or stated)
    if not device_bytes:
        return None
    effort = Effort(how="compiled by XLA" if trainer.memory_probe == "xla" else "traced", announce=announce)
    found = device_memory(
        models_of(config, effort),
        device_bytes,
        trainer=trainer,
        generator=config.generator,
        placement=config.placement,
        platform=config.platform,
        layout=layout_of(config),
        measured=Path(config.output_dir) / "memory.json",
        one_row=one_row,
        largest_only=largest_only,
    )
    return replace(found, effort=effort.line())


def models_of(config: Config, effort: Effort) -> Mapping[Role, PredictedPasses]:
    """Return what predicts the passes of each model that the run holds. A reference that is the policy without its adapter
    is no model of its own. Raises ModelError."""
    ranks = {
        "policy": config.placement.policy_num_workers,
        "reference": config.placement.ref_num_workers,
        "critic": config.placement.critic_num_workers,
    }
    return {
        settings.role: predicted_passes(
            settings,
            ranks[settings.role],
            effort,
            longest=config.generator.max_context_length,
            image_tokens=config.data.max_prompt_length,
            device_bytes=int(config.plan.device_memory_gb * 1e9),
        )
        for settings in planned_models(config)
    }


def planned_models(config: Config) -> Iterator[LearnerSettings]:
    """Yield the models of a run, of the architecture that `plan.architecture` states in place of the policy's."""
    for settings in run_models(config, lambda _: ScheduleLength()).learners:
        path = settings.model.path
        if config.plan.architecture and path == config.model.path:
            path = config.plan.architecture
        yield replace(settings, model=replace(settings.model, path=path))


def head_violations(config: Config) -> Iterator[Violation]:
    """Yield why ranks cannot share the micro-batches of a model whose config is on this machine: around attention they take
    its heads apart."""
    size, field = config.strategy.sequence_parallel_size, "strategy.sequence_parallel_size"
    for settings in planned_models(config) if size > 1 else ():
        with suppress(ModelError):
            heads = model_sizes(settings.model.path, revision=settings.model.revision).num_heads
            fitting = [each for each in range(1, min(heads, 2 * size) + 1) if heads % each == 0]
            if heads % size:
                yield Violation(
                    field=field,
                    rule=f"must divide the {heads} attention heads of {settings.model.path} ({settings.role})",
                    value=str(size),
                    remedy=f"try {field}={max((each for each in fitting if each < size), default=1)}"
                    + (f" or {field}={larger}" if (larger := max(fitting)) > size else ""),
                )


def positions_that_fit(config: AnyConfig, memory_gb: float, announce: Announce = lambda _: None) -> int:
    """Return how many positions of a training micro-batch fit a device of `memory_gb`, on the trained model with the fewest,
    up to `wanted_positions`; 0 where a model does not fit at all.

    Raises ModelError where nothing is known of a model.
    """
    wanted = wanted_positions(config.trainer, config.longest_row)
    if isinstance(config, SFTConfig):
        config = replace(config, trainer=replace(config.trainer, micro_batching="auto", max_positions=wanted))
        return _positions_of_sft(config, memory_gb, announce)
    # As if they sized themselves, so that no more is traced than is asked; compiling would take minutes.
    trainer = replace(config.trainer, micro_batching="auto", memory_probe="trace", max_positions=wanted)
    plan = replace(config.plan, device_memory_gb=memory_gb)
    memory = plan_memory(replace(config, plan=plan, trainer=trainer), largest_only=True, announce=announce)
    if memory is None or not memory.engine_fits or not all(each.budget for each in memory.passes):
        return 0
    return min(each.budget for each in memory.passes if each.phase == "training")


def _positions_of_sft(config: SFTConfig, memory_gb: float, announce: Announce) -> int:
    settings, device_bytes = sft_learner_settings(config), int(memory_gb * 1e9)
    predicted = predicted_passes(
        settings,
        config.placement.policy_num_workers,
        Effort(announce=announce),
        longest=config.longest_row,
        image_tokens=config.longest_row,
        device_bytes=device_bytes,
    )
    limit = device_bytes - int(device_bytes * config.trainer.memory_margin) - CONTEXT_BYTES
    try:
        return predicted.token_budget("training", limit)
    except MemoryLimitError:
        return 0


def placement_report(config: Config, devices: Devices) -> PlacementReport:
    """The report of a config whose placement is stated, or has been chosen. `devices`: those that were found."""
    trainer, placement = config.trainer, config.placement
    return PlacementReport(
        backend=placement.backend,
        strategy=part_name(config.strategy.name)
        + (", optimizer state in the host" if config.strategy.offloads_state else ""),
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
        f"{counted(count, 'vLLM engine')}" + (f" of {counted(vllm.devices_per_engine, 'GPU')}" if gpu else ""),
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
