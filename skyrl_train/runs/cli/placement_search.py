"""The form of a run that `placement=auto` chooses: ranked on paper (`plan/forms/search.py`), confirmed by rules and by
a trace.

    candidates --seconds of a step, on paper--> the best first --rules, plan_memory--> the first that fits

The plainest form is FSDP2 over all GPUs, which the engines share; another has to be quicker. What the user states is fixed.
Rates on paper are stated, those of an H100 and its links, so that only ratios count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from typing import Literal, TypeVar

from skyrl_train.config import AnyConfig, Config, SFTConfig
from skyrl_train.config.models import ROLES, PlacementConfig, StrategyConfig, mesh_sizes
from skyrl_train.config.rules import FIELDS as SIZE_FIELDS, validate_config
from skyrl_train.data.sources import fetch_config
from skyrl_train.errors import ConfigError, ModelError, Violation, counted, three_digits
from skyrl_train.model.sizes import ModelSizes, model_sizes, read_architecture
from skyrl_train.plan import head_violations, plan_memory, positions_that_fit
from skyrl_train.plan.forms import (
    LAYOUT_SETTINGS,
    Allocation,
    Device,
    EngineOptions,
    Form,
    ScaledModel,
    StepWork,
    allocations,
    devices_per_engine,
    engine_room,
    rank_forms,
    step_work,
)
from skyrl_train.plan.memory import WANTED, optimizer_state_bytes, wanted_positions
from skyrl_train.system import Devices

C = TypeVar("C", Config, SFTConfig, AnyConfig)

ASSUMED_MEMORY_GB = 80.0
"""Memory assumed of a GPU that does not say how much it has."""
_GPUS_OF_A_NODE = 8
"""GPUs of each node that a remedy proposes."""
_MOST_NODES = 16
"""The most nodes that a remedy proposes."""
_SYNC_BYTES = (1 << 30) + 2_000_000_000
"""On a GPU in a sync beside parameters and weights: the bucket in which weights travel, and the engine's own."""
_TRAINED_BYTES = 16
"""Bytes of one parameter that AdamW trains: itself, its gradient and two averages, in float32."""
_HOST_FIELD = "placement.host_memory_gb"
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


def recomputing(config: C, value: Literal["auto", True, False]) -> C:
    """Return the config with another `model.gradient_checkpointing`."""
    return replace(config, model=replace(config.model, gradient_checkpointing=value))


def chosen(placement: PlacementConfig, **settings: object) -> PlacementConfig:
    """Return the placement as it is recorded: the choice as if it were stated, and nothing left to choose."""
    done = {"auto": False, "num_gpus": 0, "num_nodes": 1, "gpu_memory_gb": 0.0, "stated": (), "backend": "ray"}
    return replace(placement, **{**done, **settings})  # type: ignore[arg-type]


def even_nodes(devices: Devices) -> tuple[int, int]:
    """Return nodes and GPUs of each with which most are used, equally many on each."""
    counts = sorted(devices.gpus_per_node, reverse=True)
    return max(((index + 1, gpus) for index, gpus in enumerate(counts)), key=lambda pair: (pair[0] * pair[1], -pair[0]))


def sizes_of(config: Config) -> ModelSizes | None:
    """Return the sizes of the policy's model; None where its config cannot be had here, so that nothing can be predicted."""
    path, revision = config.plan.architecture or config.model.path, config.model.revision
    with suppress(ModelError):
        return model_sizes(path, revision=revision)
    if fetch_config(path, revision=revision):
        with suppress(ModelError):
            return model_sizes(path, revision=revision)
    return None


@dataclass(frozen=True)
class Search:
    """The choice for reinforcement learning on GPUs."""

    config: Config
    devices: Devices
    training: bool = True
    _memory: dict[tuple[Allocation, StrategyConfig, bool], str] = field(default_factory=dict)
    """What a trace says of learners' devices, which is the same whatever the engines."""

    def chosen(self) -> Config:
        """Return the config with its placement chosen. Raises ConfigError where nothing fits."""
        nodes, per_node = even_nodes(self.devices)
        generator = self.config.generator
        if not generator.has_own_devices and generator.backend not in ("http", "replay"):  # an engine in this process
            strategy = replace(self.config.strategy, name="single")
            return replace(self.config, placement=chosen(self.config.placement, backend="inline"), strategy=strategy)
        facts = sizes_of(self.config)
        if facts is None:
            return self._plain(nodes, per_node, None)
        if self.training and (found := self._searched(nodes, per_node, facts)) is not None:
            return found
        placed = self._plain(nodes, per_node, facts)
        if (problem := self._problem(placed, facts)) is None:
            return placed
        there = f"{counted(nodes * per_node, 'GPU')} of {self._device.memory_bytes / 1e9:g} GB"
        raise ConfigError(
            [
                Violation(
                    field="placement.auto",
                    rule=f"must find room on {there} for {self.config.model.path} ({facts.parameters / 1e9:.3g} billion "
                    f"parameters): {problem}",
                    value=there,
                    remedy=self._remedy(facts) or "try a smaller model, or shorter rows (generator.max_context_length)",
                )
            ]
        )

    @cached_property
    def _device(self) -> Device:
        return Device(memory_bytes=(self.devices.memory_gb or ASSUMED_MEMORY_GB) * 1e9)

    @property
    def work(self) -> StepWork:
        """The work of a training batch."""
        config = self.config
        return step_work(
            config.generator,
            config.trainer,
            seed=config.seed,
            max_prompt_length=config.data.max_prompt_length,
            has_critic=bool(config.critic.model.path),
        )

    @property
    def free(self) -> list[str]:
        """The settings of `strategy` that are left to choose. Parts of rows are for long ones: of short ones little is left
        to a rank beside what it exchanges."""
        strategy, default, stated = self.config.strategy, StrategyConfig(), self.config.placement.stated
        are_long = self.config.generator.max_context_length >= WANTED
        return [
            name
            for name in LAYOUT_SETTINGS
            if strategy.kind == "fsdp2"
            and (are_long or name != "sequence_parallel_size")
            and getattr(strategy, name) == getattr(default, name)
            and f"strategy.{name}" not in stated
        ]

    @property
    def _recomputed(self) -> tuple[bool, ...]:
        """The values of `model.gradient_checkpointing` that are tried: both where it is left to choose, and the memory of a
        device is known and not assumed."""
        stated = self.config.model.gradient_checkpointing
        return (stated,) if stated != "auto" else (False, True) if self.devices.memory_gb else (True,)

    def _searched(self, nodes: int, per_node: int, facts: ModelSizes) -> Config | None:
        """Return the config in the best form that fits; None where none does."""
        forms = self._forms(nodes, per_node, facts)
        misfits: list[Form] = []
        before = self._broken(self.config)
        uneven: set[tuple[int, int]] = set()
        for form in forms:
            ranks = form.allocation.ranks, form.strategy.ranks_per_share
            if ranks in uneven:
                continue
            placed = self._in_form(
                form.allocation,
                form.strategy,
                recomputed=form.recomputed,
                engine_size=form.engine_size,
                num_engines=form.num_engines,
            )
            broken = self._broken(placed) - before
            if not broken and self._problem(placed, facts, form) is None:
                return replace(placed, derived=(*placed.derived, _line(form, forms, misfits)))
            misfits.append(form)
            if broken & set(SIZE_FIELDS.values()):  # batch sizes do not divide over so many, however they lie
                uneven.add(ranks)
        return None

    @staticmethod
    def _broken(config: Config) -> set[str]:
        """The settings of which a rule says that they are wrong, but for a cluster that several nodes need."""
        named = replace(config.placement, ray_address=config.placement.ray_address or "auto")
        config = replace(config, placement=named)
        return {each.field for each in (*validate_config(config), *head_violations(config))}

    def _forms(self, nodes: int, per_node: int, facts: ModelSizes) -> list[Form]:
        """Return what may be chosen, the quickest on paper first."""
        config, vllm = self.config, self.config.generator.vllm
        engines = config.generator.has_own_devices
        pipeline = max(1, vllm.devices_per_engine // vllm.tensor_parallel_size)
        sizes = self._engine_sizes(per_node, facts)
        plain = self._engine_size(sizes, facts, nodes * per_node)
        return rank_forms(
            self._model(facts),
            self.work,
            self._device,
            allocations(
                nodes,
                per_node,
                shares=not (engines and config.trainer.max_staleness),
                apart=engines,
                num_models=1 + bool(config.critic.model.path),
            ),
            config.strategy,
            self.free,
            engines=EngineOptions(
                sizes={size * pipeline: size == plain for size in sizes},
                num_engines=vllm.num_engines,
                max_seqs=vllm.most_sequences(on_gpu=True),
                share=vllm.gpu_memory_utilization,
            )
            if engines
            else None,
            recomputed=self._recomputed,
        )

    def _model(self, facts: ModelSizes) -> ScaledModel:
        config, path = self.config, self.config.plan.architecture or self.config.model.path
        return ScaledModel.of_config(
            path,
            read_architecture(path, revision=config.model.revision),
            parameters=facts.parameters,
            trains_all=not config.model.lora.rank,
            state_bytes=optimizer_state_bytes(config.trainer.policy.optimizer),
            engine_bytes=self._engine_weights(facts) // facts.parameters,
        )

    def _in_form(
        self, place: Allocation, strategy: StrategyConfig, *, recomputed: bool, engine_size: int, num_engines: int
    ) -> Config:
        """Return the config with a form as if it were stated."""
        config = self.config
        settings = {
            f"{role}_{name}": value
            for role in ROLES
            for name, value in (
                ("num_workers", 1),
                ("num_nodes", place.nodes),
                ("num_gpus_per_node", place.ranks_per_node),
            )
        }
        if place.has_own_nodes:
            settings |= {
                "inference_num_nodes": place.engine_nodes,
                "inference_num_gpus_per_node": place.engine_gpus_per_node,
            }
        placed = replace(
            config,
            placement=chosen(config.placement, colocate_all=place.shares, **settings),
            strategy=strategy,
            model=replace(config.model, gradient_checkpointing=recomputed),
        )
        if not engine_size:
            return placed
        vllm = config.generator.vllm
        pipeline = max(1, vllm.devices_per_engine // vllm.tensor_parallel_size)
        vllm = replace(vllm, num_engines=num_engines, tensor_parallel_size=engine_size // pipeline)
        return replace(placed, generator=replace(config.generator, vllm=vllm))

    def _plain(self, nodes: int, per_node: int, facts: ModelSizes | None) -> Config:
        """Return the config with all models sharded over all GPUs, which they share with the engines."""
        vllm, size = self.config.generator.vllm, 0
        place = next(allocations(nodes, per_node, shares=True, apart=False))
        pipeline = max(1, vllm.devices_per_engine // vllm.tensor_parallel_size)
        if self.config.generator.has_own_devices:
            size = vllm.tensor_parallel_size
            if facts is not None:
                size = self._engine_size(self._engine_sizes(per_node, facts), facts, nodes * per_node)
        return self._in_form(
            place,
            self.config.strategy,
            recomputed=self._recomputed[-1],
            engine_size=size * pipeline,
            num_engines=vllm.num_engines or max(1, nodes * per_node // max(1, size * pipeline)),
        )

    def _engine_sizes(self, per_node: int, facts: ModelSizes) -> list[int]:
        """The numbers of GPUs over which an engine can be split, the fewest first."""
        vllm, kv_heads = self.config.generator.vllm, facts.num_kv_heads
        if vllm.tensor_parallel_size > 1 or "generator.vllm.tensor_parallel_size" in self.config.placement.stated:
            return [vllm.tensor_parallel_size]
        return [
            size
            for size in range(1, per_node + 1)
            if per_node % size == 0 and facts.num_heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
        ]

    def _engine_size(self, sizes: Sequence[int], facts: ModelSizes, num_ranks: int) -> int:
        """The fewest GPUs with which an engine has room for many sequences, and a sync for the policy beside it; the most
        where there is no such number."""
        mesh = mesh_sizes(self.config.strategy, num_ranks if self.config.strategy.kind == "fsdp2" else 1)
        synced = [size for size in sizes if self._syncs(facts, size, mesh.shard * mesh.tensor)] or [sizes[-1]]
        share = self.config.generator.vllm.gpu_memory_utilization
        return devices_per_engine(self._model(facts), self._device, synced, share=share)

    def _engine_weights(self, facts: ModelSizes) -> int:
        model, vllm = self.config.model, self.config.generator.vllm
        return facts.parameters * (4 if (model.dtype if vllm.dtype == "auto" else vllm.dtype) == "float32" else 2)

    def _syncs(self, facts: ModelSizes, size: int, shards: int, *, offloaded: bool | None = None) -> bool:
        """Whether there is room for the policy's parameters beside the engine's weights, which lie on a GPU together in a
        sync."""
        if not self.training:
            return True
        away = self.config.strategy.offloads_all if offloaded is None else offloaded
        parameters = 0 if away else 4 * facts.parameters / shards
        return parameters + self._engine_weights(facts) / size + _SYNC_BYTES <= self._device.memory_bytes

    def _problem(self, placed: Config, facts: ModelSizes, form: Form | None = None) -> str | None:
        """Why it does not fit, if it does not."""
        return next(self._problems(placed, facts, form), None)

    def _problems(self, placed: Config, facts: ModelSizes, form: Form | None) -> Iterator[str]:
        vllm, strategy = placed.generator.vllm, placed.strategy
        if placed.generator.has_own_devices:
            size, longest = vllm.tensor_parallel_size, placed.generator.max_context_length
            weights = self._engine_weights(facts)
            keys = 2 * facts.num_layers * facts.kv_size * longest * weights // facts.parameters
            if weights + keys > size * engine_room(self._device, vllm.gpu_memory_utilization):
                yield f"an engine over {size} of them has no room for {weights / 1e9:.3g} GB of weights and one sequence"
            mesh = mesh_sizes(strategy, placed.placement.policy_num_workers if strategy.kind == "fsdp2" else 1)
            is_apart = not placed.placement.colocate_all
            if not is_apart and not self._syncs(facts, size, mesh.shard * mesh.tensor, offloaded=strategy.offloads_all):
                yield f"in a weight sync the policy's parameters and an engine's weights over {size} are on them together"
        if self.training:
            yield from self._too_large(placed, form)

    def _too_large(self, placed: Config, form: Form | None) -> Iterator[str]:
        """What a trace finds too large for the devices or the host."""
        key = None if form is None else (form.allocation, form.strategy, form.recomputed)
        if key is not None and key in self._memory:
            yield self._memory[key]
            return
        plan = replace(placed.plan, device_memory_gb=self._device.memory_bytes / 1e9)
        traced = replace(placed.trainer, memory_probe="trace")  # compiling for each candidate would take minutes
        host_gb = placed.placement.host_memory_gb or self.devices.host_memory_gb
        placed = replace(placed, placement=replace(placed.placement, host_memory_gb=host_gb), plan=plan, trainer=traced)
        try:
            memory = plan_memory(placed, one_row=True)
            found = [(each.field, each.rule) for each in (memory.violations() if memory is not None else ())]
            if not found and form is not None:
                found += self._too_few_positions(placed)
        except ModelError as error:
            # Of a model whose step cannot be traced nothing is known; of one whose matrices cannot be cut, that.
            if form is not None and placed.strategy.tensor_parallel_size > 1:
                yield str(error)
            return
        for name, rule in found:
            if key is not None and name != _HOST_FIELD:
                self._memory[key] = rule
            yield rule

    def _too_few_positions(self, placed: Config) -> Iterator[tuple[str, str]]:
        """Where whether to recompute is left to choose, why not to do without."""
        if self.config.model.gradient_checkpointing != "auto" or placed.model.gradient_checkpointing:
            return
        wanted = wanted_positions(placed.trainer, placed.generator.max_context_length)
        fitting = positions_that_fit(placed, placed.plan.device_memory_gb)
        if fitting < wanted:
            rule = f"{fitting:,} positions fit without recomputing, {wanted:,} are wanted"
            yield "model.gradient_checkpointing", rule

    def _remedy(self, facts: ModelSizes) -> str:
        """Settings, and a number of GPUs, that fit."""
        nodes, per_node = even_nodes(self.devices)
        found: list[str] = []
        for settings in _REMEDIES:
            if _ADAPTER in settings and find_spec("peft") is None:  # without which it cannot be reckoned
                continue
            config = self.config
            for setting in settings:
                config = _SETTINGS[setting](config)
            if config == self.config or any(set(other.split()) <= set(settings) for other in found):
                continue
            if Search(config, self.devices, self.training)._has_room(nodes, per_node, facts):
                found.append(" ".join(settings))
        more = [(1, gpus) for gpus in (2, 4, _GPUS_OF_A_NODE)]
        more += [(count, _GPUS_OF_A_NODE) for count in range(2, _MOST_NODES + 1)]
        for count, gpus in more:
            if count * gpus > nodes * per_node and self._has_room(count, gpus, facts):
                found.append(f"{count * gpus} GPUs" + (f" on {counted(count, 'node')}" if count > 1 else ""))
                break
        if not found:
            return ""
        offloads = any(_OFFLOAD in each and _ADAPTER not in each for each in found)
        host = f" (offload keeps {_TRAINED_BYTES * facts.parameters / 1e9:,.0f} GB in the hosts)" if offloads else ""
        return "try " + ", or ".join(found) + host

    def _has_room(self, nodes: int, per_node: int, facts: ModelSizes) -> bool:
        """Whether some form fits so many GPUs."""
        if self.training:
            return self._searched(nodes, per_node, facts) is not None
        return self._problem(self._plain(nodes, per_node, facts), facts) is None


def _line(best: Form, forms: Sequence[Form], misfits: Sequence[Form]) -> str:
    """What was chosen, and beside what: the plainest form, or where that is it the next."""
    plain = min(forms, key=lambda form: (form.num_changes, not form.has_plain_engines))
    others = [plain] if plain is not best else [form for form in forms if form.strategy != best.strategy]
    line = f"{'form':<11} {best.text}: {three_digits(best.step_s)} s a step on paper"
    for other in others[:1]:
        line += f"; {other.text}: {three_digits(other.step_s)} s" + (", does not fit" if other in misfits else "")
    return line
