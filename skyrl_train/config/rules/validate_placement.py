"""Rules of `placement`: nodes, GPUs and ranks that agree with each other and with the engines."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from skyrl_train.config.algorithm.settings import AlgorithmConfig, needs_reference
from skyrl_train.config.fields.fields import Rule
from skyrl_train.config.models.engines import GeneratorConfig
from skyrl_train.config.models.placement import RATE_NAMES, ROLES, PlacementConfig, PlatformConfig, StrategyConfig
from skyrl_train.config.placement.bundles import shares_devices
from skyrl_train.config.rules.expert_rules import EXPERT_RULES, RL_EXPERT_RULES
from skyrl_train.config.rules.validate_strategy import MODEL_STRATEGY_RULES, STRATEGY_RULES
from skyrl_train.config.schema import CriticConfig, EnvironmentConfig, LoopConfig
from skyrl_train.errors import Violation
from skyrl_train.parts import WEIGHT_TRANSPORTS


def _rates(platform: PlatformConfig) -> Iterator[Violation]:
    rates = platform.rates
    if rates is not None and not all(
        isinstance(rates.get(name), int | float) and rates[name] > 0 for name in RATE_NAMES
    ):
        rule = f"must give {', '.join(RATE_NAMES)}, each a number above 0 (1e12)"
        yield Violation.of("platform.rates", rates, rule, "drop it, or write platform.rates=null for stated rates")


def _single_process(placement: PlacementConfig, strategy: StrategyConfig) -> Iterator[Violation]:
    if placement.backend == "ray" and strategy.kind == "single" and placement.policy_num_workers > 1:
        yield Violation(
            field="placement.policy_num_workers",
            rule="must be 1 with strategy=single, which is one process",
            value=repr(placement.policy_num_workers),
            remedy="add strategy=fsdp2 or strategy=ddp, or set placement.policy_num_workers=1",
        )


def _inline_workers(placement: PlacementConfig, role: str) -> Iterator[Violation]:
    workers = getattr(placement, f"{role}_num_workers")
    if placement.backend == "inline" and workers > 1:
        yield Violation(
            field=f"placement.{role}_num_workers",
            rule="must be 1 with placement.backend=inline, which is one process",
            value=repr(workers),
            remedy=f"add placement=ray, or set placement.{role}_num_workers=1",
        )


def _inline_strategy(placement: PlacementConfig, strategy: StrategyConfig) -> Iterator[Violation]:
    if placement.backend == "inline" and strategy.kind in ("ddp", "fsdp2"):
        yield Violation(
            field="strategy.name",
            rule="must be single with placement.backend=inline, which is one process",
            value=repr(strategy.name),
            remedy="add placement=ray, or strategy=single",
        )


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
            yield Violation(
                field=field,
                rule=f"must be {most} with placement.backend=inline, which has one engine, on this machine",
                value=repr(value),
                remedy=f"add placement=ray, or set {field}={most}",
            )
    device = platform.device
    if device.startswith("cuda") and device not in ("cuda", "cuda:0"):
        number = device.partition(":")[2]
        yield Violation(
            field="platform.device",
            rule="must be cuda:0 with generator=vllm placement=inline: vLLM takes the first GPU that it sees, and shares it "
            "with the models",
            value=repr(device),
            remedy=f"set platform.device=cuda:0, with CUDA_VISIBLE_DEVICES={number} in the environment",
        )


def _environment_workers(environment: EnvironmentConfig, placement: PlacementConfig) -> Iterator[Violation]:
    if environment.python and environment.isolation == "thread":
        rule = "is for worker processes, and environment.isolation=thread has none"
        yield Violation.of("environment.python", environment.python, rule, "set environment.isolation=process")
    if environment.placement == "local":
        return
    inline = placement.backend == "inline" and not placement.auto
    if inline or environment.isolation == "thread":
        other = (
            "placement.backend=inline, which has no nodes"
            if inline
            else "environment.isolation=thread: threads are here"
        )
        remedy = "add placement=ray" if inline else "set environment.isolation=process"
        yield Violation(
            field="environment.placement",
            rule=f"must be local with {other}",
            value=repr(environment.placement),
            remedy=f"{remedy}, or environment.placement=local",
        )


def _ranks(placement: PlacementConfig, role: str) -> Iterator[Violation]:
    workers, nodes, gpus = (
        getattr(placement, f"{role}_{name}") for name in ("num_workers", "num_nodes", "num_gpus_per_node")
    )
    if gpus and workers != nodes * gpus:
        yield Violation(
            field=f"placement.{role}_num_workers",
            rule=f"must be {role}_num_nodes x {role}_num_gpus_per_node = {nodes * gpus} where those are stated",
            value=repr(workers),
            remedy=f"drop placement.{role}_num_workers, or placement.{role}_num_gpus_per_node",
        )
    elif workers % nodes:
        yield Violation(
            field=f"placement.{role}_num_nodes",
            rule=f"must divide placement.{role}_num_workers={workers}",
            value=repr(nodes),
            remedy=f"try placement.{role}_num_gpus_per_node=8 in place of {role}_num_workers",
        )


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
        yield Violation(
            field=f"placement.{role}_num_nodes",
            rule=(
                f"must be placement.policy_num_nodes={placement.policy_num_nodes}, and divide "
                f"placement.{role}_num_workers={workers}, with {setting}"
            ),
            value=repr(nodes),
            remedy=(
                f"try placement.{role}_num_nodes={placement.policy_num_nodes} "
                f"placement.{role}_num_workers={placement.policy_num_workers}, or placement.{setting}=false"
            ),
        )


def _inference(placement: PlacementConfig, generator: GeneratorConfig) -> Iterator[Violation]:
    vllm = generator.vllm
    nodes, gpus = placement.inference_num_nodes, placement.inference_num_gpus_per_node
    if gpus and not nodes:
        yield Violation(
            field="placement.inference_num_gpus_per_node",
            rule="does nothing with placement.inference_num_nodes=0",
            value=repr(gpus),
            remedy="try placement.inference_num_nodes=1",
        )
    if not nodes:
        return
    if not generator.has_own_devices or placement.colocate_all:
        rule, remedy = "needs generator.backend=vllm, whose engines they are for", "add generator=vllm"
        if placement.colocate_all:
            rule, remedy = "contradicts placement.colocate_all=true", "set placement.colocate_all=false"
        yield Violation(
            field="placement.inference_num_nodes",
            rule=rule,
            value=repr(nodes),
            remedy=f"{remedy}, or drop placement.inference_num_nodes",
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
        yield Violation(
            field="generator.vllm.num_engines",
            rule=f"times the {vllm.devices_per_engine} devices of an engine must fill {wanted} evenly",
            value=repr(vllm.count(placement)),
            remedy=f"try generator.vllm.num_engines={engines}",
        )


def _stated_devices(placement: PlacementConfig, name: str) -> Iterator[Violation]:
    if not placement.auto and getattr(placement, name) != getattr(PlacementConfig(), name):
        yield Violation(
            field=f"placement.{name}",
            rule="is read with placement=auto only",
            value=repr(getattr(placement, name)),
            remedy=f"add placement=auto, or drop placement.{name}",
        )


def _session(placement: PlacementConfig) -> Iterator[Violation]:
    if placement.backend == "inline" and placement.ray_address:
        yield Violation(
            field="placement.ray_address",
            rule="is not read with placement.backend=inline",
            value=repr(placement.ray_address),
            remedy="add placement=ray, or drop placement.ray_address",
        )
    nodes = max(placement.policy_num_nodes, placement.critic_num_nodes, placement.ref_num_nodes)
    total = nodes + placement.inference_num_nodes
    if placement.backend == "ray" and total > 1 and not placement.ray_address:
        yield Violation(
            field="placement.ray_address",
            rule=f"must name a cluster: {total} nodes are asked for, and a session of this machine has one",
            value="''",
            remedy="try placement.ray_address=auto on a node of the cluster",
        )


def _fewer_workers(placement: PlacementConfig, trainer: LoopConfig) -> Iterator[Violation]:
    if not placement.allow_fewer_workers:
        return
    rule = ""
    if not placement.ray_address:
        rule = "needs a cluster of several nodes (placement.ray_address)"
    elif getattr(trainer, "docs_per_step", 0):
        rule = "cannot be where trainer.docs_per_step closes the steps, which fewer ranks would close elsewhere"
    if rule:
        yield Violation(
            field="placement.allow_fewer_workers", rule=rule, value="true", remedy="drop placement.allow_fewer_workers"
        )


def _silence(placement: PlacementConfig) -> Iterator[Violation]:
    if placement.silence_timeout_s > placement.call_timeout_s:
        yield Violation(
            field="placement.silence_timeout_s",
            rule=f"must be at most placement.call_timeout_s={placement.call_timeout_s:g}, the deadline of a whole call",
            value=repr(placement.silence_timeout_s),
            remedy=f"try placement.silence_timeout_s={placement.call_timeout_s:g}",
        )


def _colocated_engines(placement: PlacementConfig, generator: GeneratorConfig) -> Iterator[Violation]:
    """An engine shares the devices of as many ranks as it has workers, all on one node."""
    if not placement.colocate_all or not generator.has_own_devices:
        return
    vllm = generator.vllm
    ranks, nodes, size = placement.policy_num_workers, placement.policy_num_nodes, vllm.tensor_parallel_size
    ranks_per_node = max(1, ranks // nodes)
    if ranks_per_node % size:
        yield Violation(
            field="generator.vllm.tensor_parallel_size",
            rule=f"must divide the {ranks_per_node} ranks of the policy on a node, with placement.colocate_all",
            value=repr(size),
            remedy=f"try generator.vllm.tensor_parallel_size={math.gcd(ranks_per_node, size)}",
        )
    elif vllm.count(placement) * size > ranks or vllm.count(placement) % nodes:
        among = f" / {size} devices of an engine" if size > 1 else ""
        yield Violation(
            field="generator.vllm.num_engines",
            rule=(
                f"must be at most placement.policy_num_workers={ranks}{among}, and a multiple of "
                f"placement.policy_num_nodes={nodes}, with placement.colocate_all"
            ),
            value=repr(vllm.count(placement)),
            remedy=f"try generator.vllm.num_engines={ranks // size}",
        )


def _stays(
    placement: PlacementConfig, generator: GeneratorConfig, platform: PlatformConfig, critic: CriticConfig
) -> Iterator[Violation]:
    shares = generator.has_own_devices and shares_devices(placement, generator, platform)
    if placement.offload is False and shares and placement.backend == "ray" and critic.model.path:
        yield Violation(
            field="placement.offload",
            rule="must be true with a critic on Ray: micro-batches of the policy are sized before the critic has its "
            "optimizer's state",
            value="False",
            remedy="drop placement.offload",
        )


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
        yield Violation(
            field="generator.weight_transport",
            rule=rule,
            value=repr(name),
            remedy="try generator.weight_transport=auto",
        )


def _full_sync_every(
    generator: GeneratorConfig, platform: PlatformConfig, placement: PlacementConfig
) -> Iterator[Violation]:
    name = WEIGHT_TRANSPORTS.name_of(generator.weight_transport)
    shared = platform.name == "gpu" and shares_devices(placement, generator, platform)
    sends_parts = name in ("shared_memory", "broadcast") or (name == "auto" and not shared)
    if generator.full_sync_every > 1 and not (
        sends_parts and placement.backend == "ray" and generator.has_own_devices and generator.backend != "http"
    ):
        yield Violation(
            field="generator.full_sync_every",
            rule="what changed alone travels to engines on Ray, by generator.weight_transport=shared_memory or broadcast",
            value=str(generator.full_sync_every),
            remedy="try generator.full_sync_every=1",
        )
    if generator.weight_change_tolerance > 0 and generator.full_sync_every == 1:
        yield Violation(
            field="generator.weight_change_tolerance",
            rule="every sync sends all weights with generator.full_sync_every=1, so that there is nothing to leave out",
            value=str(generator.weight_change_tolerance),
            remedy="try generator.full_sync_every=20",
        )


PROCESS_RULES: tuple[Rule, ...] = (
    _single_process,
    *(partial(_inline_workers, role=role) for role in ROLES),
    _inline_strategy,
)
"""What one process, or one rank, cannot be asked for."""
PLACEMENT_RULES: tuple[Rule, ...] = (
    _rates,
    *(partial(_ranks, role=role) for role in ROLES),
    *(partial(_stated_devices, name=name) for name in ("num_gpus", "num_nodes", "gpu_memory_gb")),
    _session,
    _fewer_workers,
    _silence,
    *STRATEGY_RULES,
    *EXPERT_RULES,
)
"""What contradicts itself in any kind of run."""
ENGINE_PLACEMENT_RULES: tuple[Rule, ...] = (
    _environment_workers,
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
