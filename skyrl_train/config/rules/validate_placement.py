"""Rules of `placement` and `strategy`: nodes, GPUs and ranks that agree with each other and with the engines, how the ranks
of a model are laid out, and experts that are divided over them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from skyrl_train.config.algorithm.settings import AlgorithmConfig, needs_reference
from skyrl_train.config.data.sources import DataConfig, EnvironmentConfig
from skyrl_train.config.environment.rewards import reward_entries
from skyrl_train.config.fields.fields import Rule
from skyrl_train.config.models.engines import GeneratorConfig
from skyrl_train.config.models.models import CriticConfig, CriticModelConfig, ModelConfig
from skyrl_train.config.models.placement import RATE_NAMES, ROLES, PlacementConfig, PlatformConfig, StrategyConfig
from skyrl_train.config.placement.bundles import shares_devices
from skyrl_train.config.rules.batch_rules import divisors
from skyrl_train.config.schema import LoopConfig, TrainerConfig
from skyrl_train.errors import Violation
from skyrl_train.parts import WEIGHT_TRANSPORTS
from skyrl_train.registry import part_name, split_spec

_SEQUENCE_PARALLEL, _TENSOR_PARALLEL = "strategy.sequence_parallel_size", "strategy.tensor_parallel_size"


def _sequence_parallel(strategy: StrategyConfig, model: ModelConfig) -> Iterator[Violation]:
    """What does not go with ranks that share micro-batches; that they divide a model's ranks is a rule of batch sizes,
    that they divide its attention heads is checked where it is loaded."""
    size = strategy.sequence_parallel_size
    if size == 1:
        return
    if model.attention != "auto":
        rule = f"must be auto with {_SEQUENCE_PARALLEL}={size}: positions of several ranks have kernels of their own"
        remedy = f"drop model.attention, or set {_SEQUENCE_PARALLEL}=1"
        yield Violation.of("model.attention", model.attention, rule, remedy)


def _tensor_parallel(strategy: StrategyConfig, model: ModelConfig) -> Iterator[Violation]:
    """What does not go with ranks that have parts of matrices; that they divide a model is checked before loading."""
    size = strategy.tensor_parallel_size
    if size == 1:
        return
    for other in (_SEQUENCE_PARALLEL, "strategy.expert_parallel_size"):
        value = getattr(strategy, other.partition(".")[2], 1)
        if value > 1:
            rule = f"must be 1 with {_TENSOR_PARALLEL}={size}"
            yield Violation.of(other, value, rule, f"drop {other} or {_TENSOR_PARALLEL}")
    yield from _whole_model(strategy, model, "model")


def _whole_model(strategy: StrategyConfig, model: ModelConfig | CriticModelConfig, field: str) -> Iterator[Violation]:
    """What asks for whole matrices."""
    stated: dict[str, tuple[object, object]] = {"lora.rank": (model.lora.rank, 0)}
    if isinstance(model, ModelConfig):
        stated |= {"quantization": (model.quantization, "none"), "compile": (model.compile, False)}
    for name, (value, off) in stated.items() if strategy.tensor_parallel_size > 1 else ():
        if value != off:
            rule = f"must be {str(off).lower()} with {_TENSOR_PARALLEL}={strategy.tensor_parallel_size}, which cuts matrices"
            yield Violation.of(f"{field}.{name}", value, rule, f"drop {field}.{name}, or {_TENSOR_PARALLEL}")


def _tensor_groups(strategy: StrategyConfig, placement: PlacementConfig, role: str) -> Iterator[Violation]:
    """Groups lie on one node each, where the links are that their exchanges in every layer need."""
    size, nodes = strategy.tensor_parallel_size, getattr(placement, f"{role}_num_nodes")
    per_node = max(1, getattr(placement, f"{role}_num_workers") // nodes)
    if nodes > 1 and per_node % size and not placement.auto:
        rule = f"must divide the {per_node} ranks of the {role} on a node"
        fitting = " or ".join(f"{_TENSOR_PARALLEL}={n}" for n in divisors(per_node))
        yield Violation.of(_TENSOR_PARALLEL, size, rule, f"try {fitting}")


def _fsdp_size(strategy: StrategyConfig, placement: PlacementConfig, role: str) -> Iterator[Violation]:
    """Groups that hold the same are equally large, and of whole nodes or within one."""
    size, together, tensor = strategy.fsdp_size, strategy.sequence_parallel_size, strategy.tensor_parallel_size
    # The placement that is chosen comes here again, and another strategy than a sharded one does not read it.
    if not size or placement.auto or strategy.kind != "fsdp2":
        return
    workers, nodes = getattr(placement, f"{role}_num_workers"), getattr(placement, f"{role}_num_nodes")
    # of ranks that have parts of the same matrices, each is in another group
    workers, per_node = max(1, workers // tensor), max(1, workers // nodes // tensor)
    each = f" / {_TENSOR_PARALLEL}={tensor}" if tensor > 1 else ""
    rule = ""
    if size == 1 and workers > 1:
        rule = "must be more than 1: ranks that each hold the whole model are strategy=ddp"
    elif workers % size:
        rule = f"must divide placement.{role}_num_workers={workers * tensor}{each}"
    elif size % together:
        rule = (
            f"must be a multiple of {_SEQUENCE_PARALLEL}={together}: ranks that share micro-batches lie within a group"
        )
    elif nodes > 1 and per_node % size and size % per_node:
        rule = f"must divide the {per_node * tensor} ranks of a node{each}, or be a multiple of them"
    if rule:
        fitting = [n for n in divisors(workers) if n > 1 and not n % together and not (per_node % n and n % per_node)]
        choices = " or ".join(f"strategy.fsdp_size={n}" for n in fitting if n < workers)
        advice = f"try {choices}, or drop it" if choices else "drop strategy.fsdp_size"
        yield Violation.of("strategy.fsdp_size", size, rule, advice)


def _others(
    strategy: StrategyConfig, placement: PlacementConfig, critic: CriticConfig, algorithm: AlgorithmConfig
) -> Iterator[Violation]:
    """The same of the models beside the policy."""
    roles = [role for role, used in (("critic", critic.model.path), ("ref", needs_reference(algorithm))) if used]
    for role in roles:
        yield from _fsdp_size(strategy, placement, role)
        yield from _tensor_groups(strategy, placement, role)
    if critic.model.path:
        yield from _whole_model(strategy, critic.model, "critic.model")


STRATEGY_RULES: tuple[Rule, ...] = (
    _sequence_parallel,
    _tensor_parallel,
    partial(_tensor_groups, role="policy"),
    partial(_fsdp_size, role="policy"),
)
"""What contradicts itself in any kind of run."""
MODEL_STRATEGY_RULES: tuple[Rule, ...] = (_others,)
"""What does for the models beside a policy."""


EXPERT_PARALLEL = "strategy.expert_parallel_size"
_NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
"""Names of that number in configs of transformers."""


def num_experts(architecture: Mapping[str, Any]) -> int:
    """Return the experts of a layer that a model's config.json states; 0 for a dense model."""
    return next((int(architecture[name]) for name in _NUM_EXPERTS if architecture.get(name)), 0)


def size_violation(field: str, workers: int, size: int) -> Iterator[Violation]:
    """What is wrong with a number of ranks that come in groups of `size`."""
    if workers % size:
        rule = f"must be a multiple of {EXPERT_PARALLEL}={size}: so many ranks divide the experts"
        remedy = f"try {field}={-(-workers // size) * size}, or another {EXPERT_PARALLEL}"
        yield Violation.of(field, workers, rule, remedy)


def _experts(
    strategy: StrategyConfig, placement: PlacementConfig, model: ModelConfig, trainer: LoopConfig
) -> Iterator[Violation]:
    size = strategy.expert_parallel_size
    if size == 1:
        return
    off = f"{EXPERT_PARALLEL}=1"
    if strategy.kind != "single" and not placement.auto:  # the placement that is chosen comes here again
        yield from size_violation("placement.policy_num_workers", placement.policy_num_workers, size)
    if strategy.fsdp_size % size:
        rule = f"must be a multiple of {EXPERT_PARALLEL}={size}: ranks that divide experts lie within a group"
        yield Violation.of("strategy.fsdp_size", strategy.fsdp_size, rule, f"drop it, or try strategy.fsdp_size={size}")
    cases = (
        ("model.compile", model.compile, model.compile, "must be false", "set it to false"),
        ("model.quantization", model.quantization, model.quantization != "none", "must be none", "set it to none"),
        (
            "trainer.memory_probe",
            trainer.memory_probe,
            trainer.sizes_itself and trainer.memory_probe != "measure",
            "must be measure",
            "set trainer.memory_probe=measure",
        ),
    )
    for field, value, holds, rule, remedy in cases:
        if holds:
            full = f"{rule} with {EXPERT_PARALLEL}={size}: tokens travel between ranks inside of a layer"
            yield Violation.of(field, value, full, f"{remedy}, or {off}")


def _experts_of_others(
    strategy: StrategyConfig, placement: PlacementConfig, critic: CriticConfig, algorithm: AlgorithmConfig
) -> Iterator[Violation]:
    """Of the models beside the policy."""
    used = {"critic": bool(critic.model.path), "ref": needs_reference(algorithm)}
    for role in ROLES[1:]:
        if used[role] and strategy.kind != "single" and not placement.auto:
            field = f"{role}_num_workers"
            yield from size_violation(f"placement.{field}", getattr(placement, field), strategy.expert_parallel_size)


EXPERT_RULES: tuple[Rule, ...] = (_experts,)
"""Of any kind of run."""
RL_EXPERT_RULES: tuple[Rule, ...] = (_experts_of_others,)


def _rates(platform: PlatformConfig) -> Iterator[Violation]:
    rates = platform.rates
    if rates is not None and not all(
        isinstance(rates.get(name), int | float) and rates[name] > 0 for name in RATE_NAMES
    ):
        rule = f"must give {', '.join(RATE_NAMES)}, each a number above 0 (1e12)"
        yield Violation.of("platform.rates", rates, rule, "drop it, or write platform.rates=null for stated rates")


def _single_process(placement: PlacementConfig, strategy: StrategyConfig) -> Iterator[Violation]:
    if placement.backend == "ray" and strategy.kind == "single" and placement.policy_num_workers > 1:
        rule = "must be 1 with strategy=single, which is one process"
        remedy = "add strategy=fsdp2 or strategy=ddp, or set placement.policy_num_workers=1"
        yield Violation.of("placement.policy_num_workers", placement.policy_num_workers, rule, remedy)


def _inline_workers(placement: PlacementConfig, role: str) -> Iterator[Violation]:
    workers = getattr(placement, f"{role}_num_workers")
    if placement.backend == "inline" and workers > 1:
        rule = "must be 1 with placement.backend=inline, which is one process"
        remedy = f"add placement=ray, or set placement.{role}_num_workers=1"
        yield Violation.of(f"placement.{role}_num_workers", workers, rule, remedy)


def _inline_strategy(placement: PlacementConfig, strategy: StrategyConfig) -> Iterator[Violation]:
    if placement.backend == "inline" and strategy.kind in ("ddp", "fsdp2"):
        rule = "must be single with placement.backend=inline, which is one process"
        yield Violation.of("strategy.name", strategy.name, rule, "add placement=ray, or strategy=single")


def _inline_engines(
    placement: PlacementConfig, generator: GeneratorConfig, platform: PlatformConfig
) -> Iterator[Violation]:
    """Without Ray there is one engine, on this machine."""
    if placement.backend != "inline" or not generator.has_own_devices:
        return
    stated = {
        "generator.vllm.num_engines": (generator.vllm.num_engines, 1),
        "placement.inference_num_nodes": (placement.inference_num_nodes, 0),
    }
    for field, (value, most) in stated.items():
        if value > most:
            rule = f"must be {most} with placement.backend=inline, which has one engine, on this machine"
            yield Violation.of(field, value, rule, f"add placement=ray, or set {field}={most}")
    device = platform.device
    if device.startswith("cuda") and device not in ("cuda", "cuda:0"):
        number = device.partition(":")[2]
        rule = (
            "must be cuda:0 with generator=vllm placement=inline: vLLM takes the first GPU that it sees, and shares it "
            "with the models"
        )
        remedy = f"set platform.device=cuda:0, with CUDA_VISIBLE_DEVICES={number} in the environment"
        yield Violation.of("platform.device", device, rule, remedy)


def _environment_workers(environment: EnvironmentConfig, placement: PlacementConfig) -> Iterator[Violation]:
    if environment.placement == "ray" and placement.backend == "inline" and not placement.auto:
        rule = "must be local with placement.backend=inline, which has no nodes"
        remedy = "add placement=ray, or environment.placement=local"
        yield Violation.of("environment.placement", "ray", rule, remedy)


def _rollouts_at_engines(
    placement: PlacementConfig,
    generator: GeneratorConfig,
    environment: EnvironmentConfig,
    data: DataConfig,
    trainer: TrainerConfig,
) -> Iterator[Violation]:
    """What needs the process of the loop stays there."""
    if placement.rollouts == "driver":
        return
    models = [entry for entry in reward_entries(environment) if split_spec(entry.spec)[0] in ("model", "judge")]
    contradicted = {
        f"generator.backend={part_name(generator.backend)}, which is no engine in an actor": not generator.has_own_devices,
        f"trainer.max_staleness={trainer.max_staleness}, whose journal the loop writes": trainer.max_staleness > 0,
        "generator.agent_loop=agent, whose programs ask the loop": part_name(generator.agent_loop) == "agent",
        "environment.placement=ray, whose workers the loop starts": environment.placement == "ray",
        "data.mix, whose environments the loop has": bool(data.mix),
        f"{models[0].setting if models else ''}, whose model the loop has": bool(models),
    }
    for what in [what for what, is_stated in contradicted.items() if is_stated]:
        yield Violation.of(
            "placement.rollouts", "engines", f"must be driver with {what}", "set placement.rollouts=driver"
        )


def _ranks(placement: PlacementConfig, role: str) -> Iterator[Violation]:
    workers, nodes, gpus = (
        getattr(placement, f"{role}_{name}") for name in ("num_workers", "num_nodes", "num_gpus_per_node")
    )
    if gpus and workers != nodes * gpus:
        rule = f"must be {role}_num_nodes x {role}_num_gpus_per_node = {nodes * gpus} where those are stated"
        remedy = f"drop placement.{role}_num_workers, or placement.{role}_num_gpus_per_node"
        yield Violation.of(f"placement.{role}_num_workers", workers, rule, remedy)
    elif workers % nodes:
        rule = f"must divide placement.{role}_num_workers={workers}"
        remedy = f"try placement.{role}_num_gpus_per_node=8 in place of {role}_num_workers"
        yield Violation.of(f"placement.{role}_num_nodes", nodes, rule, remedy)


def _shared_nodes(
    placement: PlacementConfig, critic: CriticConfig, algorithm: AlgorithmConfig, role: str
) -> Iterator[Violation]:
    """A model that shares the policy's devices, `critic` or `ref`, lies on its nodes."""
    if role == "ref":
        shares = needs_reference(algorithm) and (placement.colocate_all or placement.colocate_policy_ref)
    else:
        shares = bool(critic.model.path) and placement.colocate_all
    if not shares:
        return
    nodes, workers = getattr(placement, f"{role}_num_nodes"), getattr(placement, f"{role}_num_workers")
    setting = "colocate_all" if placement.colocate_all else "colocate_policy_ref"
    if nodes not in (1, placement.policy_num_nodes) or workers % placement.policy_num_nodes:
        yield Violation.of(
            f"placement.{role}_num_nodes",
            nodes,
            f"must be placement.policy_num_nodes={placement.policy_num_nodes}, and divide "
            f"placement.{role}_num_workers={workers}, with {setting}",
            f"try placement.{role}_num_nodes={placement.policy_num_nodes} "
            f"placement.{role}_num_workers={placement.policy_num_workers}, or placement.{setting}=false",
        )


def _inference(placement: PlacementConfig, generator: GeneratorConfig) -> Iterator[Violation]:
    vllm = generator.vllm
    nodes, gpus = placement.inference_num_nodes, placement.inference_num_gpus_per_node
    if not nodes:
        return
    if not generator.has_own_devices or placement.colocate_all:
        rule, remedy = "needs generator.backend=vllm, whose engines they are for", "add generator=vllm"
        if placement.colocate_all:
            rule, remedy = "contradicts placement.colocate_all=true", "set placement.colocate_all=false"
        yield Violation.of(
            "placement.inference_num_nodes", nodes, rule, f"{remedy}, or drop placement.inference_num_nodes"
        )
    elif gpus and vllm.devices_per_engine > gpus:
        yield Violation(
            field="generator.vllm.tensor_parallel_size",
            rule=f"must leave an engine on one node, of placement.inference_num_gpus_per_node={gpus}: engines over several "
            "nodes are not supported",
            value=f"{vllm.devices_per_engine} GPUs of an engine",
            remedy=f"try generator.vllm.tensor_parallel_size={gpus} generator.vllm.num_engines={nodes}",
        )
    elif vllm.count(placement) % nodes or (gpus and vllm.count(placement) * vllm.devices_per_engine != nodes * gpus):
        wanted = f"{nodes} nodes" if not gpus else f"{nodes} nodes x {gpus} GPUs"
        engines = max(1, nodes * (gpus or 1) // vllm.devices_per_engine)
        yield Violation.of(
            "generator.vllm.num_engines",
            vllm.count(placement),
            f"times the {vllm.devices_per_engine} devices of an engine must fill {wanted} evenly",
            f"try generator.vllm.num_engines={engines}",
        )


def _session(placement: PlacementConfig) -> Iterator[Violation]:
    nodes = max(placement.policy_num_nodes, placement.critic_num_nodes, placement.ref_num_nodes)
    total = nodes + placement.inference_num_nodes
    if placement.backend == "ray" and total > 1 and not placement.ray_address:
        rule = f"must name a cluster: {total} nodes are asked for, and a session of this machine has one"
        yield Violation.of("placement.ray_address", "", rule, "try placement.ray_address=auto on a node of the cluster")


def _fewer_workers(placement: PlacementConfig, trainer: LoopConfig) -> Iterator[Violation]:
    if placement.allow_fewer_workers and trainer.docs_per_step:
        rule = "cannot be where trainer.docs_per_step closes the steps, which fewer ranks would close elsewhere"
        yield Violation.of("placement.allow_fewer_workers", True, rule, "drop placement.allow_fewer_workers")


def _silence(placement: PlacementConfig) -> Iterator[Violation]:
    if placement.silence_timeout_s > placement.call_timeout_s:
        rule = f"must be at most placement.call_timeout_s={placement.call_timeout_s:g}, the deadline of a whole call"
        remedy = f"try placement.silence_timeout_s={placement.call_timeout_s:g}"
        yield Violation.of("placement.silence_timeout_s", placement.silence_timeout_s, rule, remedy)


def _colocated_engines(placement: PlacementConfig, generator: GeneratorConfig) -> Iterator[Violation]:
    """An engine shares the devices of as many ranks as it has workers, all on one node."""
    if not placement.colocate_all or not generator.has_own_devices:
        return
    vllm = generator.vllm
    ranks, nodes, size = placement.policy_num_workers, placement.policy_num_nodes, vllm.tensor_parallel_size
    ranks_per_node = max(1, ranks // nodes)
    if ranks_per_node % size:
        rule = f"must divide the {ranks_per_node} ranks of the policy on a node, with placement.colocate_all"
        remedy = f"try generator.vllm.tensor_parallel_size={math.gcd(ranks_per_node, size)}"
        yield Violation.of("generator.vllm.tensor_parallel_size", size, rule, remedy)
    elif vllm.count(placement) * size > ranks or vllm.count(placement) % nodes:
        among = f" / {size} devices of an engine" if size > 1 else ""
        rule = (
            f"must be at most placement.policy_num_workers={ranks}{among}, and a multiple of "
            f"placement.policy_num_nodes={nodes}, with placement.colocate_all"
        )
        remedy = f"try generator.vllm.num_engines={ranks // size}"
        yield Violation.of("generator.vllm.num_engines", vllm.count(placement), rule, remedy)


def _stays(
    placement: PlacementConfig, generator: GeneratorConfig, platform: PlatformConfig, critic: CriticConfig
) -> Iterator[Violation]:
    shares = generator.has_own_devices and shares_devices(placement, generator, platform)
    if placement.offload is False and shares and placement.backend == "ray" and critic.model.path:
        rule = (
            "must be true with a critic on Ray: micro-batches of the policy are sized before the critic has its "
            "optimizer's state"
        )
        yield Violation.of("placement.offload", False, rule, "drop placement.offload")


def _weight_transport(
    generator: GeneratorConfig, platform: PlatformConfig, placement: PlacementConfig
) -> Iterator[Violation]:
    name = WEIGHT_TRANSPORTS.name_of(generator.weight_transport)
    shared = shares_devices(placement, generator, platform)
    rule = ""
    if name == "cuda_ipc" and not (shared and platform.name == "gpu"):
        rule = "cuda_ipc needs engines that share GPUs with the policy: platform=gpu and placement.colocate_all=true"
    if name in ("broadcast", "cuda_ipc") and not generator.has_own_devices:
        rule = f"{name} needs engines on devices of their own, such as generator=vllm"
    elif name == "broadcast" and placement.backend == "inline":
        rule = "an engine on this machine takes weights by shared_memory, cuda_ipc or files"
    elif name == "broadcast" and shared and platform.name == "gpu":
        rule = "NCCL cannot broadcast between processes that share a device, as they do with placement.colocate_all"
    if rule:
        yield Violation.of("generator.weight_transport", name, rule, "try generator.weight_transport=auto")


def _full_sync_every(
    generator: GeneratorConfig, platform: PlatformConfig, placement: PlacementConfig
) -> Iterator[Violation]:
    name = WEIGHT_TRANSPORTS.name_of(generator.weight_transport)
    shared = platform.name == "gpu" and shares_devices(placement, generator, platform)
    sends_parts = name in ("shared_memory", "broadcast") or (name == "auto" and not shared)
    if generator.full_sync_every > 1 and not (
        sends_parts and placement.backend == "ray" and generator.has_own_devices and generator.backend != "http"
    ):
        rule = "what changed alone travels to engines on Ray, by generator.weight_transport=shared_memory or broadcast"
        remedy = "try generator.full_sync_every=1"
        yield Violation.of("generator.full_sync_every", generator.full_sync_every, rule, remedy)
    if generator.weight_change_tolerance > 0 and generator.full_sync_every == 1:
        rule = "every sync sends all weights with generator.full_sync_every=1, so that there is nothing to leave out"
        remedy = "try generator.full_sync_every=20"
        yield Violation.of("generator.weight_change_tolerance", generator.weight_change_tolerance, rule, remedy)


PROCESS_RULES: tuple[Rule, ...] = (
    _single_process,
    *(partial(_inline_workers, role=role) for role in ROLES),
    _inline_strategy,
)
"""What one process, or one rank, cannot be asked for."""
PLACEMENT_RULES: tuple[Rule, ...] = (
    _rates,
    *(partial(_ranks, role=role) for role in ROLES),
    _session,
    _fewer_workers,
    _silence,
    *STRATEGY_RULES,
    *EXPERT_RULES,
)
"""What contradicts itself in any kind of run."""
ENGINE_PLACEMENT_RULES: tuple[Rule, ...] = (
    _environment_workers,
    _rollouts_at_engines,
    _inline_engines,
    *(partial(_shared_nodes, role=role) for role in ("ref", "critic")),
    _inference,
    _colocated_engines,
    _stays,
    _weight_transport,
    _full_sync_every,
    *MODEL_STRATEGY_RULES,
    *RL_EXPERT_RULES,
)
"""What several models and inference engines cannot be asked for."""
