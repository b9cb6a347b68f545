"""`placement=auto`: backend, ranks, engines and what they share, chosen for the GPUs that there are.

    1 GPU, 2 to 8, several nodes  --placement_search.py-->  the form with the least predicted seconds a step that fits
    supervised                    a rank a GPU, sharded over all
    a run that goes on            the form that it recorded, where the GPUs are as many

Then what depends on the memory of a device, by the plan's own arithmetic, for a run and for its plan alike. Activations are
not recomputed where the positions that are wanted of a micro-batch fit without, models and engines off the device in turn.
Nothing leaves its device where everything fits at once, as it is computed by then. In this order: to recompute takes a
quarter of an update, to move a model and back a second or two of a step. A run records both as if they had been typed. Last,
what is wrong with a configuration that is placed.

Neither torch nor Ray is imported for well-known families of models, but for a cluster that is joined, whose GPUs Ray counts.
What cannot fit is refused by name with settings for which the same prediction says that it does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal, TypeVar, overload

from skyrl_train.config import SFT_RULES, AnyConfig, Config, SFTConfig
from skyrl_train.config.derived import gpus_needed, layout_of
from skyrl_train.config.door import Loaded
from skyrl_train.config.fields import Rule, is_refused
from skyrl_train.config.models import ROLES, PlacementConfig
from skyrl_train.config.placement import count_engines, shares_devices
from skyrl_train.config.rules import rule_violations as violations_of, run_rules, validate_config, with_sound_sizes
from skyrl_train.data.sources import fetch_config
from skyrl_train.errors import ConfigError, ModelError, Violation, counted
from skyrl_train.model.sizes import model_sizes, read_architecture
from skyrl_train.plan import positions_that_fit
from skyrl_train.plan.forms import ENGINE_OVERHEAD_BYTES
from skyrl_train.plan.memory import wanted_positions
from skyrl_train.runs.cli.placement_search import (
    ASSUMED_MEMORY_GB,
    Search,
    chosen,
    even_nodes,
    recomputing,
    sizes_of,
)
from skyrl_train.runs.cli.resolvers import recorded_settings
from skyrl_train.system import Devices, local_devices

_ELSEWHERE = "try platform=cpu, or placement.ray_address=auto on a node of a cluster"
_CONTEXT_KEPT = 0.5
"""Share of the longest context that an engine has room for in each of its sequences, which begin and end at other times."""
_COUNT_TIMEOUT_S = 30.0
"""Deadline of joining a cluster to count its GPUs."""


def find_devices(placement: PlacementConfig) -> Devices:
    """The GPUs to choose for: stated, of the cluster that is joined, or of this machine.

    Raises SkyrlTrainError where a cluster does not answer.
    """
    here = local_devices()
    if placement.num_gpus:
        per_node, rest = divmod(placement.num_gpus, placement.num_nodes)
        found = Devices(
            gpus_per_node=(per_node + bool(rest),) * rest + (per_node,) * (placement.num_nodes - rest),
            memory_gb=here.memory_gb,
            source=f"placement.num_gpus={placement.num_gpus}",
        )
    elif placement.ray_address:
        from skyrl_train.cluster import gpus_of_cluster

        gpus = gpus_of_cluster(placement.ray_address, min(_COUNT_TIMEOUT_S, placement.start_timeout_s))
        found = Devices(gpus_per_node=gpus, memory_gb=here.memory_gb, source=f"the cluster at {placement.ray_address}")
    else:
        found = here
    return replace(found, memory_gb=placement.gpu_memory_gb) if placement.gpu_memory_gb else found


@overload
def place(config: Config, devices: Devices | None = None, *, training: bool = True) -> Config: ...
@overload
def place(config: SFTConfig, devices: Devices | None = None, *, training: bool = True) -> SFTConfig: ...
@overload
def place(config: AnyConfig, devices: Devices | None = None, *, training: bool = True) -> AnyConfig: ...
def place(config: AnyConfig, devices: Devices | None = None, *, training: bool = True) -> AnyConfig:
    """The config with its placement chosen where `placement.auto` asks for it, else as it is.

    Args:
        devices: to choose for; `find_devices` unless given.
        training: whether room to train is needed, or the engines only generate.

    Raises ConfigError: there is no GPU, settings contradict the choice, or the models do not fit.
    """
    if not config.placement.auto:
        return config
    if violations := list(_stated(config.placement)):
        raise ConfigError(violations)
    if config.platform.name == "cpu":
        engines = isinstance(config, Config) and config.generator.has_own_devices
        backend = "ray" if engines or config.placement.ray_address else "inline"
        return replace(config, placement=chosen(config.placement, backend=backend))
    devices = devices or find_devices(config.placement)
    if not devices.num_gpus:
        raise ConfigError([_no_gpu(config.placement, devices)])
    if isinstance(config, SFTConfig):
        return _a_rank_a_device(config, devices, "fsdp2")
    if training and (recorded := _as_recorded(config, devices)) is not None:
        return recorded
    return Search(config, devices, training).chosen()


def _stated(placement: PlacementConfig) -> Iterator[Violation]:
    """What `auto` would overwrite."""
    default = PlacementConfig()
    names = [f"{role}_{name}" for role in ROLES for name in ("num_workers", "num_nodes", "num_gpus_per_node")]
    for name in [*names, "inference_num_nodes", "inference_num_gpus_per_node", "colocate_all"]:
        value = getattr(placement, name)
        derived = name.endswith("num_workers") and getattr(placement, name.replace("workers", "gpus_per_node"))
        if value != getattr(default, name) and not derived:
            remedy = f"add placement=ray to state it, or drop placement.{name}"
            yield Violation.of(f"placement.{name}", value, "is chosen with placement=auto", remedy)


def _no_gpu(placement: PlacementConfig, devices: Devices) -> Violation:
    return Violation(
        field="placement.auto",
        rule=f"must have GPUs to choose for: {devices.source}",
        value="0 GPUs",
        remedy="state what is still to come: placement.num_gpus=8 placement.wait_for_nodes_s=600"
        if placement.ray_address
        else _ELSEWHERE,
    )


def place_replicas(config: Config) -> Config:
    """The config of a server with its placement chosen where `placement.auto` asks for it: each GPU has the whole model.
    Raises ConfigError as `place` does."""
    if not config.placement.auto:
        return config
    if config.platform.name == "cpu":
        backend = "ray" if config.placement.ray_address else "inline"
        return replace(config, placement=chosen(config.placement, backend=backend))
    if violations := list(_stated(config.placement)):
        raise ConfigError(violations)
    devices = find_devices(config.placement)
    if not devices.num_gpus:
        raise ConfigError([_no_gpu(config.placement, devices)])
    return _a_rank_a_device(config, devices, "ddp")


def _a_rank_a_device(config: C, devices: Devices, strategy: Literal["fsdp2", "ddp"]) -> C:
    """One process on one GPU, a rank a GPU on several."""
    nodes, per_node = even_nodes(devices)
    if nodes * per_node == 1 and not config.placement.ray_address:
        return replace(config, placement=chosen(config.placement, backend="inline"))
    chosen_strategy = replace(config.strategy, name=strategy) if config.strategy.kind == "single" else config.strategy
    placement = chosen(config.placement, policy_num_nodes=nodes, policy_num_gpus_per_node=per_node)
    return replace(config, placement=placement, strategy=chosen_strategy)


def _as_recorded(config: Config, devices: Devices) -> Config | None:
    """The config with the form that the run which is gone on from has recorded, which is not chosen again; None where it
    begins anew, or on another number of GPUs."""
    trainer = config.trainer
    record = recorded_settings(trainer.resume_mode, trainer.resume_path, config.output_dir)
    names = {each.name for each in fields(PlacementConfig)}
    kept = {
        name
        for name in names
        if name == "backend" or name.startswith(("policy_", "critic_", "ref_", "inference_", "colocate_"))
    }

    def of(section: str, settings: set[str]) -> dict[str, Any]:
        found = {name: record.get(f"{section}.{name}") for name in settings}
        return {name: value for name, value in found.items() if value is not None}

    free = Search(config, devices).free
    if not record or len(placement := of("placement", kept)) < len(kept):
        return None
    engines = of("generator.vllm", {"num_engines", "tensor_parallel_size"})
    found = replace(
        config,
        placement=chosen(config.placement, **placement),
        strategy=replace(config.strategy, **of("strategy", set(free))),
        generator=replace(config.generator, vllm=replace(config.generator.vllm, **engines)),
    )
    nodes, per_node = even_nodes(devices)
    return found if gpus_needed(found) == nodes * per_node else None


def room_violations(config: AnyConfig) -> Iterator[Violation]:
    """A placement, chosen or stated, that needs more GPUs than this machine has for a run of its own."""
    placement = config.placement
    if placement.auto or placement.ray_address or config.platform.name == "cpu":
        return
    if isinstance(config, Config):
        needed = gpus_needed(config)
    else:
        needed = layout_of(config).num_gpus if placement.backend == "ray" else int(config.platform.on_gpu)
    if needed == 1 and placement.backend == "inline":  # a matter of `platform.device`
        return
    devices = local_devices()
    if needed > devices.num_gpus:
        yield Violation(
            field="placement",
            rule=f"needs {counted(needed, 'GPU')}, and there are {devices.num_gpus} ({devices.source})",
            value=counted(needed, "GPU"),
            remedy="try placement=auto, or placement.ray_address=auto on a node of a cluster"
            if devices.num_gpus
            else _ELSEWHERE,
        )


def rule_violations(config: AnyConfig, *, refused: Collection[str] = ()) -> list[Violation]:
    """Return what breaks rules between settings; `refused` as in `validate_config`."""
    if isinstance(config, SFTConfig):
        return violations_of(config, SFT_RULES, refused)
    return validate_config(config, refused=refused)


def violations_here(
    loaded: Loaded[AnyConfig], machine_rules: Sequence[Rule] | None, *, trains: bool
) -> list[Violation]:
    """Return the violations of names and types, then of rules between fields and of what is on this machine, with the
    placement that is chosen here. Without `machine_rules` rules are left to the caller, and those between fields are named
    beside a refused value alone. `trains`: as `training` of `place`."""
    config, refused = loaded.config, loaded.refused

    def of_settings() -> list[Violation]:
        """What is wrong with single settings, with remedies that go with the others."""
        if isinstance(config, SFTConfig):
            return list(loaded.violations)
        return with_sound_sizes(loaded.violations, config, refused=refused)

    if machine_rules is None:
        return [*of_settings(), *rule_violations(config, refused=refused)] if refused else []
    found: list[Violation] = []
    try:
        config = place(config, training=trains)
    except ConfigError as error:
        found += [violation for violation in error.violations if violation.field not in refused]
        # What is left to choose stays out of the rules.
        refused = refused | {"placement"}
    found = [*of_settings(), *found, *rule_violations(config, refused=refused)]
    found += run_rules(config, machine_rules, refused)
    return found if is_refused("placement", refused) else [*found, *room_violations(config)]


def place_for_plan(config: Config) -> tuple[Config, Devices, list[str]]:
    """The config with its placement chosen, the devices that were found, and notes on what had to be assumed.

    Raises ConfigError where no placement can be chosen.
    """
    notes: list[str] = []
    if config.platform.name == "cpu":
        return place(config), Devices(), notes
    auto, stated_gb = config.placement.auto, config.placement.gpu_memory_gb or config.plan.device_memory_gb
    devices = replace(found := find_devices(config.placement), memory_gb=stated_gb or found.memory_gb)
    if auto:
        if not devices.num_gpus:
            notes.append(
                f"{devices.source}. Planning for one GPU; placement.num_gpus=N placement.num_nodes=M state how many"
            )
            devices = replace(devices, gpus_per_node=(1,))
        if not devices.memory_gb:
            notes.append(
                f"Planning for GPUs of {ASSUMED_MEMORY_GB:g} GB; placement.gpu_memory_gb=G states what they have"
            )
            devices = replace(devices, memory_gb=ASSUMED_MEMORY_GB)
        if sizes_of(config) is None:
            notes.append(
                f"The memory of {config.model.path} is not predicted here, so that engines have one GPU each unless "
                "generator.vllm.tensor_parallel_size says more; plan.architecture names a model of the same sizes"
            )
    config = place(config, devices)
    if not config.placement.host_memory_gb:
        config = replace(config, placement=replace(config.placement, host_memory_gb=devices.host_memory_gb))
    if auto and sizes_of(config) is not None:
        config = replace(config, plan=replace(config.plan, device_memory_gb=devices.memory_gb))
    return config, found, notes


C = TypeVar("C", Config, SFTConfig, AnyConfig)

_CHECKPOINTING, _OFFLOAD = "model.gradient_checkpointing", "placement.offload"
_ENGINE_SHARE = "generator.vllm.gpu_memory_utilization"


def with_memory_settings(config: C, memory_gb: float, announce: Callable[[str], object] = lambda _: None) -> C:
    """Return the config, whose placement is chosen, with `model.gradient_checkpointing` and `placement.offload` as they were
    recorded, or as they follow from a device of `memory_gb`, 0 where that is not known; `derived` says why. `announce`: as
    in `plan_memory`."""
    if "auto" not in (config.model.gradient_checkpointing, config.placement.offload):
        return config
    trainer = config.trainer
    config = _with_recorded_memory(
        config, recorded_settings(trainer.resume_mode, trainer.resume_path, config.output_dir)
    )
    if config.platform.name == "cpu":  # what shares a CPU goes on as it did
        return _decided(config, checkpointing=False)
    if trainer.sizes_itself and trainer.memory_budget_gb:
        memory_gb = min(memory_gb or math.inf, trainer.memory_budget_gb * (1 << 30) / 1e9)
    lines: list[str] = []
    try:
        if memory_gb:
            _fetch_architecture(config)
            if config.model.gradient_checkpointing == "auto":
                config, why = _without_recomputing(config, memory_gb, announce)
                lines.append(why)
            if isinstance(config, Config) and _leaves_open(config):
                config, why = _kept_together(config, memory_gb, announce)
                lines.append(why)
    except ModelError:  # nothing is known of a model whose step cannot be traced
        pass
    if config.model.gradient_checkpointing == "auto":
        lines.append("recomputes activations: nothing is known here of the model, or of the memory of a device")
    config = _decided(config, checkpointing=True)
    return replace(config, derived=(*config.derived, *(f"memory      {line}" for line in lines)))


def _without_recomputing(
    config: C, memory_gb: float, announce: Callable[[str], object] = lambda _: None
) -> tuple[C, str]:
    """Return the config with `model.gradient_checkpointing` decided, and why. Raises ModelError."""
    free, wanted = recomputing(config, False), wanted_positions(config.trainer, config.longest_row)
    found = positions_that_fit(free, memory_gb, announce)
    if found >= wanted:
        return free, f"recomputes no activations: {wanted:,} positions fit {memory_gb:g} GB without"
    why = f"recomputes activations: {found:,} positions fit without, {wanted:,} are wanted"
    return recomputing(config, True), why


def _kept_together(
    config: Config, memory_gb: float, announce: Callable[[str], object] = lambda _: None
) -> tuple[Config, str]:
    """Return the config with `placement.offload` decided, and engines with as much of the device as models that stay leave
    them; and why. Raises ModelError."""
    wanted = wanted_positions(config.trainer, config.longest_row)
    away = replace(config, placement=replace(config.placement, offload=True))
    if config.critic.model.path and config.placement.backend == "ray":
        return away, "models and engines leave their devices in turn, as there is a critic"
    stays = replace(config, placement=replace(config.placement, offload=False))

    def beside(share: float) -> Config:
        vllm = replace(config.generator.vllm, gpu_memory_utilization=share)
        return replace(stays, generator=replace(config.generator, vllm=vllm))

    def fits(share: float) -> bool:
        return positions_that_fit(beside(share), memory_gb, announce) >= wanted

    stated, least = config.generator.vllm.gpu_memory_utilization, _least_engine_share(config, memory_gb)
    shares = [stated, *(hundredths / 100 for hundredths in range(int(100 * stated), math.ceil(100 * least) - 1, -1))]
    share = next(filter(fits, shares), None) if fits(shares[-1]) else None
    if share is None:
        return away, f"models and engines leave their devices in turn: not all fit {memory_gb:g} GB at once"
    of = f"of which {share:g} are the engine's"
    return beside(share), f"models and engines stay on their devices: all fit {memory_gb:g} GB at once, {of}"


def _least_engine_share(config: Config, memory_gb: float) -> float:
    """Return the share of a device with which an engine has room for its sequences."""
    vllm, samples = config.generator.vllm, config.trainer.train_batch_size * config.generator.n_samples_per_prompt
    sizes = model_sizes(config.plan.architecture or config.model.path, revision=config.model.revision)
    dtype = config.model.dtype if vllm.dtype == "auto" else vllm.dtype
    number_bytes = 4 if dtype == "float32" else 2
    engines = max(1, count_engines(config.generator, config.placement))
    sequences = min(-(-samples // engines), vllm.most_sequences(on_gpu=True))
    kept = sequences * int(_CONTEXT_KEPT * config.generator.max_context_length)
    # Ranks beyond the key and value heads have copies of them.
    split = min(vllm.tensor_parallel_size, sizes.num_kv_heads)
    keys = 2 * sizes.num_layers * sizes.kv_size * number_bytes * kept / split
    weights = number_bytes * sizes.parameters / vllm.devices_per_engine
    return (weights + keys + ENGINE_OVERHEAD_BYTES) / (memory_gb * 1e9)


def _shares_gpus(config: AnyConfig) -> bool:
    """Return whether models and engines are on the same GPUs, so that `placement.offload` says something."""
    return (
        isinstance(config, Config)
        and config.platform.name == "gpu"
        and config.generator.has_own_devices
        and shares_devices(config.placement, config.generator, config.platform)
    )


def _leaves_open(config: AnyConfig) -> bool:
    return config.placement.offload == "auto" and _shares_gpus(config)


def _decided(config: C, *, checkpointing: bool) -> C:
    """Return the config with what is still at auto: `checkpointing`, and models that leave GPUs that they share."""
    if config.model.gradient_checkpointing == "auto":
        config = recomputing(config, checkpointing)
    if _leaves_open(config):
        config = replace(config, placement=replace(config.placement, offload=True))
    return config


def _with_recorded_memory(config: C, record: Mapping[str, Any]) -> C:
    recorded = record.get(_CHECKPOINTING)
    if config.model.gradient_checkpointing == "auto" and isinstance(recorded, bool):
        config = recomputing(config, recorded)
    # Before it was a setting all left.
    offload = record.get(_OFFLOAD, True if record else None)
    if _leaves_open(config) and isinstance(offload, bool):
        config = replace(config, placement=replace(config.placement, offload=offload))
        if isinstance(config, Config) and not offload:
            vllm = config.generator.vllm
            share = min(vllm.gpu_memory_utilization, float(record.get(_ENGINE_SHARE, 1.0)))
            vllm = replace(vllm, gpu_memory_utilization=share)
            config = replace(config, generator=replace(config.generator, vllm=vllm))
    return config


def _fetch_architecture(config: AnyConfig) -> None:
    """Have the config of the policy's model here, where it can be had."""
    stands_in = config.plan.architecture if isinstance(config, Config) else ""
    path, revision = stands_in or config.model.path, config.model.revision
    try:
        read_architecture(path, revision=revision)
    except ModelError:
        fetch_config(path, revision=revision)
