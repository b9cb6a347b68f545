"""Rules of `strategy`: how the ranks of a model are laid out, and what goes with what."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from skyrl_train.config.algorithm import AlgorithmConfig, needs_reference
from skyrl_train.config.batch_rules import divisors
from skyrl_train.config.fields import Rule
from skyrl_train.config.placement import PlacementConfig, StrategyConfig
from skyrl_train.config.schema import CriticConfig, ModelConfig
from skyrl_train.errors import Violation

_SEQUENCE_PARALLEL = "strategy.sequence_parallel_size"


def _sequence_parallel(strategy: StrategyConfig, model: ModelConfig) -> Iterator[Violation]:
    """What does not go with ranks that share micro-batches; that they divide a model's ranks is a rule of batch sizes,
    that they divide its attention heads is checked where it is loaded."""
    size = strategy.sequence_parallel_size
    if size == 1:
        return
    if strategy.kind == "single":
        yield Violation(
            field=_SEQUENCE_PARALLEL,
            rule="must be 1 with strategy=single, which is one process",
            value=str(size),
            remedy="add strategy=fsdp2 or strategy=ddp, or drop strategy.sequence_parallel_size",
        )
    if model.attention != "auto":
        yield Violation(
            field="model.attention",
            rule=f"must be auto with {_SEQUENCE_PARALLEL}={size}: positions of several ranks have kernels of their own",
            value=repr(model.attention),
            remedy=f"drop model.attention, or set {_SEQUENCE_PARALLEL}=1",
        )


def _fsdp_size(strategy: StrategyConfig, placement: PlacementConfig, role: str) -> Iterator[Violation]:
    """Groups that hold the same are equally large, and of whole nodes or within one."""
    size, together = strategy.fsdp_size, strategy.sequence_parallel_size
    if not size or placement.auto:  # the placement that is chosen comes here again
        return
    workers, nodes = getattr(placement, f"{role}_num_workers"), getattr(placement, f"{role}_num_nodes")
    per_node = max(1, workers // nodes)
    rule = ""
    if strategy.kind != "fsdp2":
        rule = "is read by strategy=fsdp2 alone"
    elif size == 1 and workers > 1:
        rule = "must be more than 1: ranks that each hold the whole model are strategy=ddp"
    elif workers % size:
        rule = f"must divide placement.{role}_num_workers={workers}"
    elif size % together:
        rule = (
            f"must be a multiple of {_SEQUENCE_PARALLEL}={together}: ranks that share micro-batches lie within a group"
        )
    elif nodes > 1 and per_node % size and size % per_node:
        rule = f"must divide the {per_node} ranks of a node, or be a multiple of them"
    if rule:
        fitting = [n for n in divisors(workers) if n > 1 and not n % together and not (per_node % n and n % per_node)]
        choices = " or ".join(f"strategy.fsdp_size={n}" for n in fitting if n < workers)
        advice = f"try {choices}, or drop it" if choices and strategy.kind == "fsdp2" else "drop strategy.fsdp_size"
        yield Violation(field="strategy.fsdp_size", rule=rule, value=repr(size), remedy=advice)


def _fsdp_size_of_others(
    strategy: StrategyConfig, placement: PlacementConfig, critic: CriticConfig, algorithm: AlgorithmConfig
) -> Iterator[Violation]:
    if critic.model.path:
        yield from _fsdp_size(strategy, placement, "critic")
    if needs_reference(algorithm):
        yield from _fsdp_size(strategy, placement, "ref")


STRATEGY_RULES: tuple[Rule, ...] = (_sequence_parallel, partial(_fsdp_size, role="policy"))
"""What contradicts itself in any kind of run."""
MODEL_STRATEGY_RULES: tuple[Rule, ...] = (_fsdp_size_of_others,)
"""What does for the models beside a policy."""
