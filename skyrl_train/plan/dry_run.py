"""From a configuration to everything that a dry run shows: batch plan, devices, and what is kept and moved.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from skyrl_train.batch.layouts import CostModel, ModelShape
from skyrl_train.batch.layouts import rates_of as device_rates_of
from skyrl_train.batch.planner import TokenBudgets
from skyrl_train.config import Config, TrainerConfig
from skyrl_train.config.algorithm import needs_reference
from skyrl_train.config.derived import gpus_needed, layout_of, old_logprobs_scored, scores_entropies
from skyrl_train.config.models import PlatformConfig
from skyrl_train.config.placement import Layout, count_engines, shares_devices
from skyrl_train.config.rules import sizes_of, validate_batch_sizes
from skyrl_train.errors import ConfigError, MemoryLimitError, ModelError, Violation, counted
from skyrl_train.model.sizes import read_config
from skyrl_train.plan.batch_plan import BatchPlan, make_batch_plan
from skyrl_train.plan.estimate import PassEstimate, RowLengths, assumed_lengths, estimate_passes
from skyrl_train.plan.forms.scale import MachineRates
from skyrl_train.plan.machine import StepTime, machine_rates, predicted_rates
from skyrl_train.plan.memory.device import DeviceMemory, peak_on_cpu, planned_models
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
    announce: Callable[[str], object] = lambda _: None,
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
        storage=(
            *storage_items(config, plan, lengths, num_parameters=num_parameters),
            *_peak(config, estimates, announce),
        ),
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


def _peak(config: Config, estimates: Sequence[PassEstimate], announce: Callable[[str], object]) -> Iterator[Storage]:
    """What the process of a run on a CPU takes at most, where that can be predicted."""
    positions = _trained_positions(estimates)
    with suppress(ModelError, MemoryLimitError):
        if peak := peak_on_cpu(config, positions, announce):
            when = f"in a training pass of {max(positions.values()):,} positions, activations and logits included; predicted"
            yield Storage(what="most of the whole process", kind="kept", num_bytes=peak, when=when)


def _trained_positions(estimates: Sequence[PassEstimate]) -> dict[str, int]:
    """By role, the computed positions of the largest micro-batch in training."""
    return {each.role: each.largest_micro_batch_tokens for each in estimates if each.role != "reference"}


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
