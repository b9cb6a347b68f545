"""`placement=auto`: backend, ranks, engines and what they share, chosen for the GPUs that there are.

    GPUs            models                                engines (generator=vllm)
    1               share it with the engine              one, which sleeps while they compute
    2 to 8          sharded over all, sharing them        one a GPU, or each over 2, 4 or 8 where the model is large
    several nodes   sharded over all                      the same on each node: no engine leaves its node

Neither torch nor Ray is imported for well-known families of models, but for a cluster that is joined, whose GPUs Ray
counts. What cannot fit is refused by name with settings for which the same prediction says that it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import overload

from skyrl_train.config.learners import gpus_needed
from skyrl_train.config.placement import ROLES, PlacementConfig
from skyrl_train.config.platform import Devices, local_devices
from skyrl_train.config.schema import Config
from skyrl_train.config.sft import AnyConfig, SFTConfig, sft_layout
from skyrl_train.config.validate import validate_config
from skyrl_train.data.hub import fetch_config
from skyrl_train.errors import ConfigError, ModelError, Violation
from skyrl_train.memory.model_sizes import ModelSizes, model_sizes
from skyrl_train.plan.fitting import recomputing
from skyrl_train.plan.memory import plan_memory
from skyrl_train.wording import counted

ASSUMED_MEMORY_GB = 80.0
"""Memory assumed of a GPU that does not say how much it has."""
_COUNT_TIMEOUT_S = 30.0
"""Deadline of joining a cluster to count its GPUs."""
_GPUS_OF_A_NODE = 8
"""GPUs of each node that a remedy proposes."""
_MOST_NODES = 16
"""The most nodes that a remedy proposes."""
_ENGINE_OVERHEAD_BYTES = 2_000_000_000
"""What one engine takes beside weights, keys and values: activations of a prefill, and captured graphs."""
_WEIGHTS_OF_ENGINE = 0.6
"""Largest share of an engine's memory that its weights should take, so that there is room for many sequences."""
_TRAINED_BYTES = 16
"""Bytes of one parameter that AdamW trains: itself, its gradient and two averages, in float32."""
_BUCKET_BYTES = 1 << 30
"""Bytes of the bucket in which weights travel to the engines."""
_CHECKPOINTING, _OFFLOAD, _ADAPTER = (
    "model.gradient_checkpointing=true",
    "strategy.cpu_offload=true",
    "model.lora.rank=32",
)
_SETTINGS: Mapping[str, Callable[[Config], Config]] = {
    # auto is tried with it already
    _CHECKPOINTING: lambda config: (
        config if config.model.gradient_checkpointing == "auto" else recomputing(config, True)
    ),
    _OFFLOAD: lambda config: replace(config, strategy=replace(config.strategy, cpu_offload=True)),
    _ADAPTER: lambda config: replace(config, model=replace(config.model, lora=replace(config.model.lora, rank=32))),
}
_REMEDIES = (
    (_CHECKPOINTING,),
    (_OFFLOAD,),
    (_CHECKPOINTING, _OFFLOAD),
    (_CHECKPOINTING, _ADAPTER),
    (_CHECKPOINTING, _ADAPTER, _OFFLOAD),
)
"""What makes room, the least change first."""


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
        from skyrl_train.cluster.session import gpus_of_cluster

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
        return _on_cpu(config)
    devices = devices or find_devices(config.placement)
    if not devices.num_gpus:
        raise ConfigError([_no_gpu(config.placement, devices)])
    if isinstance(config, SFTConfig):
        return _supervised(config, devices)
    return _Choice(config, devices, training).made()


def _stated(placement: PlacementConfig) -> Iterator[Violation]:
    """What `auto` would overwrite."""
    default = PlacementConfig()
    names = [f"{role}_{name}" for role in ROLES for name in ("num_workers", "num_nodes", "num_gpus_per_node")]
    for name in [*names, "inference_num_nodes", "inference_num_gpus_per_node", "colocate_all"]:
        value = getattr(placement, name)
        derived = name.endswith("num_workers") and getattr(placement, name.replace("workers", "gpus_per_node"))
        if value != getattr(default, name) and not derived:
            yield Violation(
                field=f"placement.{name}",
                rule="is chosen with placement=auto",
                value=repr(value),
                remedy=f"add placement=ray to state it, or drop placement.{name}",
            )


def _no_gpu(placement: PlacementConfig, devices: Devices) -> Violation:
    where = "try platform=cpu, or placement.ray_address=auto on a node of a cluster"
    return Violation(
        field="placement.auto",
        rule=f"must have GPUs to choose for: {devices.source}",
        value="0 GPUs",
        remedy="state what is still to come: placement.num_gpus=8 placement.wait_for_nodes_s=600"
        if placement.ray_address
        else where,
    )


def _on_cpu(config: AnyConfig) -> AnyConfig:
    engines = isinstance(config, Config) and config.generator.has_own_devices
    backend = "ray" if engines or config.placement.ray_address else "inline"
    return replace(config, placement=_chosen(config.placement, backend=backend))


def _supervised(config: SFTConfig, devices: Devices) -> SFTConfig:
    """One process on one GPU, a rank a GPU on several."""
    nodes, per_node = _even_nodes(devices)
    if nodes * per_node == 1 and not config.placement.ray_address:
        return replace(config, placement=_chosen(config.placement, backend="inline"))
    strategy = replace(config.strategy, name="fsdp2") if config.strategy.kind == "single" else config.strategy
    placement = _chosen(config.placement, policy_num_nodes=nodes, policy_num_gpus_per_node=per_node)
    return replace(config, placement=placement, strategy=strategy)


def _chosen(placement: PlacementConfig, **settings: object) -> PlacementConfig:
    """Return the placement as it is recorded: the choice as if it were stated, and nothing left to choose."""
    done = {"auto": False, "num_gpus": 0, "num_nodes": 1, "gpu_memory_gb": 0.0, "backend": "ray"}
    return replace(placement, **{**done, **settings})  # type: ignore[arg-type]


def _even_nodes(devices: Devices) -> tuple[int, int]:
    """Nodes and GPUs of each with which most are used, equally many on each."""
    counts = sorted(devices.gpus_per_node, reverse=True)
    return max(((index + 1, gpus) for index, gpus in enumerate(counts)), key=lambda pair: (pair[0] * pair[1], -pair[0]))


@dataclass(frozen=True)
class _Choice:
    """The choice for reinforcement learning on GPUs."""

    config: Config
    devices: Devices
    training: bool

    @property
    def memory_bytes(self) -> int:
        return int((self.devices.memory_gb or ASSUMED_MEMORY_GB) * 1e9)

    def made(self) -> Config:
        """Return the config with its placement chosen. Raises ConfigError where nothing fits."""
        nodes, per_node = _even_nodes(self.devices)
        generator = self.config.generator
        if not generator.has_own_devices and generator.backend not in ("http", "replay"):  # an engine in this process
            strategy = replace(self.config.strategy, name="single")
            return replace(self.config, placement=_chosen(self.config.placement, backend="inline"), strategy=strategy)
        facts = _facts(self.config)
        placed, problem = self._fitting(nodes, per_node, facts)
        if facts is None or problem is None:
            return placed
        found = f"{counted(nodes * per_node, 'GPU')} of {self.memory_bytes / 1e9:g} GB"
        raise ConfigError(
            [
                Violation(
                    field="placement.auto",
                    rule=f"must find room on {found} for {self.config.model.path} ({facts.parameters / 1e9:.3g} billion "
                    f"parameters): {problem}",
                    value=found,
                    remedy=self._remedy(facts) or "try a smaller model, or shorter rows (generator.max_context_length)",
                )
            ]
        )

    def _fitting(self, nodes: int, per_node: int, facts: ModelSizes | None) -> tuple[Config, str | None]:
        """Return the config on these GPUs, and why it does not fit if it does not. The optimizer's state is in host memory
        where that makes room and nobody has stated where it is."""
        placed = self._over(nodes, per_node, facts)
        problem = None if facts is None else self._problem(placed, facts)
        if facts is None or problem is None or placed.strategy.cpu_offload != "auto" or not self.training:
            return placed, problem
        placed = replace(placed, strategy=replace(placed.strategy, cpu_offload="optimizer"))
        return placed, self._problem(placed, facts)

    def _over(self, nodes: int, per_node: int, facts: ModelSizes | None) -> Config:
        """Return the config with all models and engines sharing all GPUs."""
        config, vllm = self.config, self.config.generator.vllm
        shares = {
            f"{role}_{name}": value
            for role in ROLES
            for name, value in (("num_workers", 1), ("num_nodes", nodes), ("num_gpus_per_node", per_node))
        }
        config = replace(config, placement=_chosen(config.placement, colocate_all=True, **shares))
        if not config.generator.has_own_devices:
            return config
        size = vllm.tensor_parallel_size
        if size == 1 and facts is not None:
            size = self._tensor_parallel_size(config, facts, per_node)
        pipeline, _ = divmod(vllm.devices_per_engine, vllm.tensor_parallel_size)
        engines = vllm.num_engines or max(1, nodes * per_node // (size * pipeline))
        vllm = replace(vllm, num_engines=engines, tensor_parallel_size=size)
        return replace(config, generator=replace(config.generator, vllm=vllm))

    def _tensor_parallel_size(self, config: Config, facts: ModelSizes, per_node: int) -> int:
        """The fewest GPUs with which an engine has room for many sequences; the most that the model can be split over
        where there is no such number."""
        heads, kv_heads = facts.num_heads, facts.num_kv_heads
        sizes = [
            size
            for size in range(1, per_node + 1)
            if per_node % size == 0 and heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
        ]
        weights, room = self._engine_weights(config, facts), _WEIGHTS_OF_ENGINE * self._engine_room(config)
        ample = (size for size in sizes if weights / size <= room and self._syncs(config, facts, size))
        return next(ample, sizes[-1])

    def _engine_room(self, config: Config) -> float:
        return config.generator.vllm.gpu_memory_utilization * self.memory_bytes - _ENGINE_OVERHEAD_BYTES

    @staticmethod
    def _engine_weights(config: Config, facts: ModelSizes) -> int:
        dtype = config.model.dtype if config.generator.vllm.dtype == "auto" else config.generator.vllm.dtype
        return facts.parameters * (4 if dtype == "float32" else 2)

    def _syncs(self, config: Config, facts: ModelSizes, size: int) -> bool:
        """Whether there is room for the policy's parameters beside the engine's weights, which lie on a GPU together in a
        sync."""
        if not self.training:
            return True
        ranks = config.placement.policy_num_workers if config.strategy.kind == "fsdp2" else 1
        parameters = 0 if config.strategy.offloads_all else 4 * facts.parameters / ranks
        needed = parameters + self._engine_weights(config, facts) / size + _BUCKET_BYTES + _ENGINE_OVERHEAD_BYTES
        return needed <= self.memory_bytes

    def _problem(self, placed: Config, facts: ModelSizes) -> str | None:
        """Why it does not fit, if it does not."""
        if placed.generator.has_own_devices:
            size, longest = placed.generator.vllm.tensor_parallel_size, placed.generator.max_context_length
            weights = self._engine_weights(placed, facts)
            keys = 2 * facts.num_layers * facts.kv_size * longest * weights // facts.parameters
            if weights + keys > size * self._engine_room(placed):
                return (
                    f"an engine over {size} of them has no room for {weights / 1e9:.3g} GB of weights and one sequence"
                )
            if not self._syncs(placed, facts, size):
                return (
                    f"in a weight sync the policy's parameters and an engine's weights over {size} are on them together"
                )
        if not self.training:
            return None
        plan = replace(placed.plan, device_memory_gb=self.memory_bytes / 1e9)
        traced = replace(placed.trainer, memory_probe="trace")  # compiling for each candidate would take minutes
        host_gb = placed.placement.host_memory_gb or self.devices.host_memory_gb
        placed = replace(placed, placement=replace(placed.placement, host_memory_gb=host_gb))
        if placed.model.gradient_checkpointing == "auto":
            placed = recomputing(placed, True)  # what it comes to where nothing else fits
        try:
            memory = plan_memory(replace(placed, plan=plan, trainer=traced), one_row=True)
        except ModelError:  # nothing is known of a model whose step cannot be traced
            return None
        violations = memory.violations() if memory is not None else ()
        return violations[0].rule if violations else None

    def _remedy(self, facts: ModelSizes) -> str:
        """Settings, and a number of GPUs, that fit."""
        nodes, per_node = _even_nodes(self.devices)
        found: list[str] = []
        for settings in _REMEDIES:
            config = self.config
            for setting in settings:
                config = _SETTINGS[setting](config)
            if config == self.config or any(set(other.split()) <= set(settings) for other in found):
                continue
            placed, problem = replace(self, config=config)._fitting(nodes, per_node, facts)
            if problem is None and not _new_violations(placed, self.config):
                found.append(" ".join(settings))
        more = [(1, gpus) for gpus in (2, 4, _GPUS_OF_A_NODE)]
        more += [(count, _GPUS_OF_A_NODE) for count in range(2, _MOST_NODES + 1)]
        for count, gpus in more:
            if count * gpus > nodes * per_node and self._fitting(count, gpus, facts)[1] is None:
                found.append(f"{count * gpus} GPUs" + (f" on {counted(count, 'node')}" if count > 1 else ""))
                break
        if not found:
            return ""
        offloads = any(_OFFLOAD in each and _ADAPTER not in each for each in found)
        host = f" (offload keeps {_TRAINED_BYTES * facts.parameters / 1e9:,.0f} GB in the hosts)" if offloads else ""
        return "try " + ", or ".join(found) + host


def _facts(config: Config) -> ModelSizes | None:
    """Sizes of the policy's model; None where its config cannot be had here, so that nothing can be predicted."""
    path, revision = config.plan.architecture or config.model.path, config.model.revision
    with suppress(ModelError):
        return model_sizes(path, revision=revision)
    if fetch_config(path, revision=revision):
        with suppress(ModelError):
            return model_sizes(path, revision=revision)
    return None


def can_predict(config: Config) -> bool:
    """Return whether the config of the policy's model is here, from which its memory follows."""
    return _facts(config) is not None


def _new_violations(placed: Config, before: Config) -> set[str]:
    """Fields about which the rules complain only now."""
    return {each.field for each in validate_config(placed)} - {each.field for each in validate_config(before)}


def _gpus_of_sft(config: SFTConfig) -> int:
    return sft_layout(config).num_gpus if config.placement.backend == "ray" else int(config.platform.on_gpu)


def room_violations(config: AnyConfig) -> Iterator[Violation]:
    """A placement, chosen or stated, that needs more GPUs than this machine has for a run of its own."""
    placement = config.placement
    if placement.auto or placement.ray_address or config.platform.name == "cpu":
        return
    needed = _gpus_of_sft(config) if isinstance(config, SFTConfig) else gpus_needed(config)
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
            else "try platform=cpu, or placement.ray_address=auto on a node of a cluster",
        )


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
        if not can_predict(config):
            notes.append(
                f"The memory of {config.model.path} is not predicted here, so that engines have one GPU each unless "
                "generator.vllm.tensor_parallel_size says more; plan.architecture names a model of the same sizes"
            )
    config = place(config, devices)
    if not config.placement.host_memory_gb:
        config = replace(config, placement=replace(config.placement, host_memory_gb=devices.host_memory_gb))
    if auto and can_predict(config):
        config = replace(config, plan=replace(config.plan, device_memory_gb=devices.memory_gb))
    return config, found, notes
