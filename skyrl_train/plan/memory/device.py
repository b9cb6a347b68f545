"""Memory in a plan: what each model's passes hold on one device, by kind, the largest micro-batch that fits, and what a node
keeps in its own memory.

Reads configs of models, no weights. What passes take is predicted by `learner/memory/predict.py`, which traces the
run's own step once and remembers it; no torch is imported after that. In a node's memory are copies of what models and
sleeping engines hold while others have their devices, copies from which checkpoints are written, and state that never leaves
the host: for a model of 32 billion parameters on eight GPUs over a terabyte. Python, Ray and environments are not counted.
"""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_train.config import LoopConfig, MicroBatchConfig
from skyrl_train.config.derived import LearnerSettings
from skyrl_train.config.models import (
    STATE_BUCKET_BYTES,
    GeneratorConfig,
    PlacementConfig,
    PlatformConfig,
    mesh_sizes,
)
from skyrl_train.config.placement import Layout, Role, leaves_devices, shares_devices
from skyrl_train.errors import MemoryLimitError, Violation, byte_size, three_digits
from skyrl_train.learner.memory import DeviceShare, Effort, Phase, PredictedPasses
from skyrl_train.model.sizes import model_sizes, of_depth, read_architecture
from skyrl_train.parts import OPTIMIZERS
from skyrl_train.plan.batch_plan import optimizer_state_bytes
from skyrl_train.plan.forms.scale import Device

if TYPE_CHECKING:
    from skyrl_train.learner.memory import Probed

_GPUS_PER_NODE = 8
"""Of a node, where the placement binds nothing to one."""
_MARGIN = 0.9
"""Of a node's memory that these may take: the rest is for processes, the object store and files that are read."""
_ALL = 1 << 60
"""More bytes than any state has."""
WANTED = 16_384
"""Positions of a micro-batch from which on a larger one is hardly faster."""
CONTEXT_BYTES = 1_000_000_000
"""Of one process on a CUDA device: context, kernels, communication buffers. About what PyTorch with NCCL takes."""


@dataclass(frozen=True, kw_only=True)
class PassMemory:
    """One pass of one model at the largest micro-batch that fits; where none does, at one row of the longest."""

    role: str
    phase: str
    """`training` or `scoring`."""
    budget: int
    """Computed positions of a micro-batch that fit whatever the lengths of its rows; 0: not even one row does."""
    rows_of_longest: int
    """Rows of the longest length that the budget holds."""
    moment: str
    """When most is held."""
    kinds: Mapping[str, int]
    """Bytes by kind at that moment, of this model."""
    limit_bytes: int
    """What the pass may hold: the device, less the margin and what else lies on it."""
    measured_tokens: int = 0
    """The budget that a run of the same configuration measured in `output_dir`; 0 where there is none."""
    predicted_tokens: int = 0
    """What is predicted for the memory that it had."""

    @property
    def peak_bytes(self) -> int:
        return sum(self.kinds.values())


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """What one node keeps in its memory at most."""

    owners: Mapping[str, int]
    """Bytes by what they are."""
    node_bytes: int
    """The memory of a node; 0 where it is not known."""

    @property
    def num_bytes(self) -> int:
        return sum(self.owners.values())

    def violations(self) -> tuple[Violation, ...]:
        """Return that it does not fit, where the memory of a node is known."""
        if not self.node_bytes or self.num_bytes <= _MARGIN * self.node_bytes:
            return ()
        parts = ", ".join(f"{name} {byte_size(count)}" for name, count in self.owners.items())
        return (
            Violation(
                field="placement.host_memory_gb",
                rule=f"a node must hold what the run keeps in its memory, {byte_size(self.num_bytes)} and a tenth beside "
                f"it: {parts}",
                value=f"{self.node_bytes / 1e9:g}",
                remedy="more nodes, trainer.background_checkpoints=false, models and engines on devices of their own "
                "(placement.colocate_all=false), or model.lora.rank=32",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """What the plan assumes of one device."""

    device_bytes: int
    longest: int
    """Tokens of the longest row: `generator.max_context_length`."""
    margin_bytes: int
    """Left free for fragmentation and the kernels' own space."""
    context_bytes: int
    """CUDA contexts of the processes that share a device."""
    passes: tuple[PassMemory, ...]
    engine_bytes: int
    """Of an inference engine that shares the device, while it generates."""
    resident_bytes: int
    """What models keep on that device meanwhile."""
    effort: str = ""
    """How passes were predicted, and how long that took."""
    moved_bytes: int = 0
    """Optimizer state that comes from the host in a step of the optimizer, and goes back to it."""
    host: HostMemory | None = None
    """What a node keeps in its own memory; None on a CPU, where that is the device's."""

    @property
    def engine_fits(self) -> bool:
        """Whether an engine that shares the device has its share beside what the models keep."""
        return self.engine_bytes + self.resident_bytes + self.context_bytes <= self.device_bytes

    def violations(self) -> tuple[Violation, ...]:
        """Return what cannot run."""
        return (*self._too_long(), *self._no_engine(), *(self.host.violations() if self.host else ()))

    def _too_long(self) -> Iterator[Violation]:
        for each in self.passes:
            if not each.budget:
                yield Violation(
                    field="generator.max_context_length",
                    rule=f"one row must fit a device of {gigabytes(self.device_bytes)}: {each.role} {each.phase} of one "
                    f"such row takes {gigabytes(each.peak_bytes)}, and {gigabytes(max(0, each.limit_bytes))} are there",
                    value=str(self.longest),
                    remedy="shorter rows, strategy=fsdp2 over more ranks, model.gradient_checkpointing=true, "
                    "strategy.cpu_offload=optimizer (or true), model.lora.rank=32, placement.offload=true, or devices that "
                    "the models do not share",
                )

    def _no_engine(self) -> Iterator[Violation]:
        if not self.engine_fits:
            room = max(0.0, 1 - (self.resident_bytes + self.context_bytes) / self.device_bytes)
            yield Violation(
                field="generator.vllm.gpu_memory_utilization",
                rule=f"must leave the {gigabytes(self.resident_bytes + self.context_bytes)} that models keep on the "
                "device they share with the engine",
                value=f"{self.engine_bytes / self.device_bytes:g}",
                remedy=f"try generator.vllm.gpu_memory_utilization={int(room * 100) / 100:g}, "
                "strategy.cpu_offload=true, or another placement",
            )


def memory_lines(memory: DeviceMemory) -> Iterator[str]:
    """Return lines for a terminal."""
    if memory.effort:
        yield f"activations {memory.effort}"
    for each in memory.passes:
        yield (
            f"{each.role:<10} {each.phase:<9} {each.budget:>11,} positions ({each.rows_of_longest:,} rows of "
            f"{memory.longest:,}), {gigabytes(each.peak_bytes)} of {gigabytes(each.limit_bytes)}, most {each.moment}"
        )
        kinds = sorted(each.kinds.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{kind} {gigabytes(count)}" for kind, count in kinds if count >= 1e6)
        yield from textwrap.wrap(parts, 116, initial_indent=" " * 21, subsequent_indent=" " * 21)
        if each.measured_tokens:
            difference = each.predicted_tokens / each.measured_tokens - 1
            yield (
                f"{'':<21}measured by the run in output_dir: {each.measured_tokens:,} positions; predicted for the memory "
                f"it had: {each.predicted_tokens:,} ({difference:+.1%})"
            )
    if memory.engine_bytes:
        yield (
            f"{'engine':<10} {gigabytes(memory.engine_bytes)} while it generates, beside "
            f"{gigabytes(memory.resident_bytes)} of models"
        )
    if memory.moved_bytes:
        seconds = 2 * memory.moved_bytes / Device.host_rate
        yield (
            f"{'optimizer':<10} {gigabytes(memory.moved_bytes)} in the host (strategy.cpu_offload=optimizer): each of its "
            f"steps moves them here and back, {seconds:.2g} s"
        )
    if memory.host and memory.host.owners:
        yield "a node keeps in its own memory:"
        yield from (f"  {line}" for line in host_lines(memory.host))


def gigabytes(count: int) -> str:
    """Return GB of 10^9 bytes."""
    return f"{three_digits(count / 1e9)} GB"


def device_memory(
    models: Mapping[Role, PredictedPasses],
    device_bytes: int,
    *,
    trainer: LoopConfig,
    generator: GeneratorConfig,
    placement: PlacementConfig,
    platform: PlatformConfig,
    layout: Layout,
    measured: Path,
    one_row: bool,
    largest_only: bool,
) -> DeviceMemory:
    """Reckon what lies on a device of so many bytes, and on a node, from what predicts the passes of each model.

    Args:
        measured: The `memory.json` of a run of the same configuration; it need not be there.
        one_row: Whether it is enough to know that a row fits; budgets are then one row, or 0.
        largest_only: Whether it is enough to know the largest pass of each model: training, where it is trained.

    Raises ModelError where a model's step cannot be traced.
    """
    one_at_a_time = leaves_devices(placement, generator, platform)
    engine = _engine_share(placement, generator, platform)
    beside_models = 0 if one_at_a_time else int(engine * device_bytes)
    margin_bytes = int(device_bytes * trainer.memory_margin)
    at_rest = {role: each.resident_bytes("scoring") for role, each in models.items()}
    context_bytes = 0 if platform.name == "cpu" else CONTEXT_BYTES
    passes: list[PassMemory] = []
    for role, predicted in models.items():
        sharing = _sharing(placement, role, list(models))
        others = 0 if one_at_a_time else sum(at_rest[other] for other in sharing if other != role)
        contexts = context_bytes * _num_processes(placement, len(sharing), engine=engine > 0)
        limit = device_bytes - margin_bytes - contexts - others - beside_models
        phases: tuple[Phase, ...] = ("scoring",) if role == "reference" else ("training", "scoring")
        for phase in phases[:1] if one_row or largest_only else phases:  # what can be trained can be scored
            found = _pass(predicted, role, phase, limit, one_row=one_row)
            passes.append(found if one_row else _beside_measured(measured, found, phase, predicted, others))
    return DeviceMemory(
        device_bytes=device_bytes,
        longest=generator.max_context_length,
        margin_bytes=margin_bytes,
        context_bytes=context_bytes * _num_processes(placement, len(models), engine=engine > 0),
        passes=tuple(passes),
        engine_bytes=int(engine * device_bytes),
        resident_bytes=sum(at_rest.values()) if beside_models else 0,
        moved_bytes=max(each.state_in_host_bytes for each in models.values()),
        host=None
        if platform.name == "cpu"
        else host_memory(models, layout, trainer=trainer, generator=generator, placement=placement, platform=platform),
    )


def wanted_positions(batching: MicroBatchConfig, longest: int) -> int:
    """Return the positions that have to fit: of the micro-batches that are stated, or `WANTED`, but one row at least."""
    found = WANTED
    if batching.sizes_itself:
        found = min(WANTED, batching.max_positions)
    elif batching.micro_batching == "token_budget":
        found = batching.max_tokens_per_microbatch
    elif batching.micro_batching == "fixed":
        found = batching.micro_train_batch_size_per_gpu * longest
    return max(longest, found)


def predicted_passes(
    settings: LearnerSettings, num_ranks: int, effort: Effort, *, longest: int, image_tokens: int, device_bytes: int
) -> PredictedPasses:
    """Return what predicts the passes of one model over rows of at most `longest` tokens, `image_tokens` of them of images.

    Raises ModelError.
    """
    model = settings.model
    architecture = read_architecture(model.path, revision=model.revision)
    sizes, mesh = model_sizes(model.path, revision=model.revision), mesh_sizes(settings.strategy, num_ranks)
    state_bytes = 0 if settings.optimizer is None else optimizer_state_bytes(settings.optimizer)
    share = DeviceShare(
        num_shards=mesh.shard,
        sequence=mesh.sequence,
        tensor_ranks=mesh.tensor,
        sharded=settings.strategy.kind == "fsdp2",  # a custom one has whole models, as far as is known
        expert_ranks=settings.strategy.expert_parallel_size,
        cpu_offload=settings.strategy.offloads_all,
        gradient_sync=settings.strategy.gradient_sync,
        device_bytes=device_bytes,
        state_bytes=state_bytes,
        state_at_once=_state_at_once(settings, -(-state_bytes * sizes.largest_parameter // (mesh.shard * mesh.tensor))),
        compute_bytes=2 if model.dtype == "bfloat16" else 4,
        frozen_bytes=2 if model.dtype == "bfloat16" else 4,
        is_scored_only=settings.optimizer is None,
        in_4_bits=model.quantization != "none",
        device_type="cpu" if settings.platform.name == "cpu" else "cuda",
    )
    return PredictedPasses(
        settings=settings,
        sizes=sizes,
        config=architecture,
        longest=longest,
        image_tokens=min(longest, image_tokens),
        share=share,
        effort=effort,
        make_learner=lambda num_layers: _learner_without_weights(settings, of_depth(architecture, num_layers), share),
    )


def _learner_without_weights(
    settings: LearnerSettings, architecture: Mapping[str, object], share: DeviceShare
) -> Probed:
    from skyrl_train.plan.memory.traced_learner import learner_without_weights  # and with it torch

    return learner_without_weights(settings, architecture, share)


def _state_at_once(settings: LearnerSettings, largest_bytes: int) -> int | None:
    """As `DeviceShare.state_at_once`. `largest_bytes`: the state of the largest parameter. See `learner/optimizer.py`."""
    if settings.optimizer is None or not settings.strategy.offloads_state:
        return None
    in_buckets = OPTIMIZERS.name_of(settings.optimizer.name) == "adamw"
    return max(STATE_BUCKET_BYTES, largest_bytes) if in_buckets else _ALL


def _pass(predicted: PredictedPasses, role: str, phase: Phase, limit_bytes: int, *, one_row: bool) -> PassMemory:
    longest = predicted.longest
    try:
        if one_row:
            budget = longest * (predicted.estimate(phase, 1).peak_bytes <= limit_bytes)
        else:
            budget = predicted.token_budget(phase, limit_bytes)
    except MemoryLimitError:
        budget = 0
    rows = budget // longest
    estimate = predicted.estimate(phase, max(1, rows))
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
    measured_file: Path, found: PassMemory, phase: Phase, predicted: PredictedPasses, others_bytes: int
) -> PassMemory:
    """With what a run of the same configuration measured, where there is its `memory.json`."""
    try:
        content = json.loads(measured_file.read_text(encoding="utf-8"))
        report = content[found.role][0]
        measured = report["training" if phase == "training" else "forward"]
        same = all(report["facts"][name] == value for name, value in _expected_facts(predicted).items())
        if not same or not measured["probes"]:
            return found
        tokens, limit = int(measured["tokens"]), int(measured["limit_bytes"]) - others_bytes
        resident = predicted.resident_bytes(phase)
        within = resident + int((limit - resident) / (1 + predicted.settings.micro_batching.memory_margin))
        return replace(found, measured_tokens=tokens, predicted_tokens=predicted.token_budget(phase, within))
    except (OSError, ValueError, KeyError, TypeError, IndexError, MemoryLimitError):
        return found


def _expected_facts(predicted: PredictedPasses) -> dict[str, str]:
    """What `memory.json` says of a model that is trained as this one is; the names of `sizing._facts`."""
    settings = predicted.settings
    batching, merges = settings.micro_batching, settings.merge_turns
    return {
        "parameters": str(predicted.counts.total),
        "type": settings.model.dtype,
        "recomputes": str(settings.model.recomputes),
        "longest": str(predicted.longest),
        "layout": f"{batching.layout}{', merged turns' if merges else ''}",
        "margin": str(batching.memory_margin),
    }


def _sharing(placement: PlacementConfig, role: Role, roles: list[Role]) -> list[Role]:
    """The models on the same device, `role` among them."""
    if placement.backend == "inline" or placement.colocate_all:
        return roles
    if placement.colocate_policy_ref and role in ("policy", "reference"):
        return [other for other in roles if other in ("policy", "reference")]
    return [role]


def _num_processes(placement: PlacementConfig, num_models: int, *, engine: bool) -> int:
    return 1 + engine if placement.backend == "inline" else num_models + engine


def _engine_share(placement: PlacementConfig, generator: GeneratorConfig, platform: PlatformConfig) -> float:
    """Of the device, where an engine shares it."""
    shares = shares_devices(placement, generator, platform) and generator.has_own_devices and platform.name != "cpu"
    return generator.vllm.gpu_memory_utilization if shares else 0.0


def host_lines(memory: HostMemory) -> Iterator[str]:
    """Yield the lines of a terminal."""
    for name, count in memory.owners.items():
        yield f"{byte_size(count):>9}  {name}"
    there = f"of {byte_size(memory.node_bytes)}" if memory.node_bytes else "placement.host_memory_gb=G checks it"
    yield f"{byte_size(memory.num_bytes):>9}  in all ({there})"


def host_memory(
    models: Mapping[Role, PredictedPasses],
    layout: Layout,
    *,
    trainer: LoopConfig,
    generator: GeneratorConfig,
    placement: PlacementConfig,
    platform: PlatformConfig,
) -> HostMemory:
    """Reckon the node that keeps most, against `placement.host_memory_gb`. `models`: what predicts their passes, by role."""
    shared = leaves_devices(placement, generator, platform)
    copies = trainer.background_checkpoints
    found = [
        dict(_owners(models, seats, shared=shared, copies=copies, engines=generator.has_own_devices))
        for seats in _seats_by_node(layout).values()
    ]
    owners = max(found, key=lambda one: sum(one.values()), default={})
    return HostMemory(owners=owners, node_bytes=int(placement.host_memory_gb * 1e9))


def _seats_by_node(layout: Layout) -> dict[int, Counter[str]]:
    """By node, how many seats each role has on it."""
    nodes: dict[int, Counter[str]] = {}
    for role, (group, places) in layout.seats.items():
        for place in places:
            node = layout.groups[group][place].node
            nodes.setdefault(place // _GPUS_PER_NODE if node is None else node, Counter())[role] += 1
    return nodes


def _owners(
    models: Mapping[Role, PredictedPasses], seats: Mapping[str, int], *, shared: bool, copies: bool, engines: bool
) -> Iterator[tuple[str, int]]:
    """Yield what a node keeps, and its bytes. `shared`: whether models and engines leave their devices in turn; `copies`:
    whether checkpoints are written from copies; `engines`: whether engines have devices."""
    for role, model in models.items():
        ranks = seats.get(role, 0)
        trained = role != "reference"
        state = model.share.state_bytes + 4 if trained else 0
        on_a_rank = model.counts.trained // max(1, model.share.num_shards)  # of a model that is cut, one rank's part
        if ranks and shared:
            yield f"{role}, while others have its devices", ranks * model.resident_bytes("scoring")
        if ranks and model.share.cpu_offload and trained:
            yield f"{role}, by strategy.cpu_offload", ranks * on_a_rank * (state + 4)
        if ranks and model.state_in_host_bytes:
            yield f"{role}, optimizer state by strategy.cpu_offload", ranks * model.state_in_host_bytes
        if ranks and trained and copies:
            yield f"{role}, copy that a checkpoint is written from", ranks * on_a_rank * state
    if engines and shared and (asleep := seats.get("engine", 0)):
        policy = models["policy"]
        weight_bytes = 2 if policy.settings.model.dtype == "bfloat16" else 4
        yield "engines asleep", asleep * policy.counts.total * policy.share.tensor_ranks * weight_bytes
