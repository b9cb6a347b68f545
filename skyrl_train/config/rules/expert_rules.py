"""Rules of experts that are divided over ranks (`strategy.expert_parallel_size`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from skyrl_train.config.algorithm.settings import AlgorithmConfig, needs_reference
from skyrl_train.config.fields.fields import Rule
from skyrl_train.config.models.placement import ROLES, PlacementConfig, StrategyConfig
from skyrl_train.config.schema import CriticConfig, LoopConfig, ModelConfig
from skyrl_train.errors import Violation

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
    if strategy.kind == "single":
        rule = "must be 1 with strategy=single, which is one process"
        yield Violation.of(EXPERT_PARALLEL, size, rule, f"add strategy=fsdp2 or strategy=ddp, or set {off}")
    elif not placement.auto:  # the placement that is chosen comes here again
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
