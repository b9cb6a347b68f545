"""Rules of `strategy`: how the ranks of a model are laid out, and what goes with what."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from skyrl_train.config.algorithm.settings import AlgorithmConfig, needs_reference
from skyrl_train.config.fields.fields import Rule
from skyrl_train.config.models.placement import PlacementConfig, StrategyConfig
from skyrl_train.config.rules.batch_rules import divisors
from skyrl_train.config.schema import CriticConfig, CriticModelConfig, ModelConfig
from skyrl_train.errors import Violation

_SEQUENCE_PARALLEL, _TENSOR_PARALLEL = "strategy.sequence_parallel_size", "strategy.tensor_parallel_size"


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


def _tensor_parallel(strategy: StrategyConfig, model: ModelConfig) -> Iterator[Violation]:
    """What does not go with ranks that have parts of matrices; that they divide a model is checked before loading."""
    size = strategy.tensor_parallel_size
    if size == 1:
        return
    if strategy.kind != "fsdp2":
        rule = f"must be 1 with strategy={strategy.kind}"
        yield Violation.of(_TENSOR_PARALLEL, size, rule, f"add strategy=fsdp2, or drop {_TENSOR_PARALLEL}")
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
    if not size or placement.auto:  # the placement that is chosen comes here again
        return
    workers, nodes = getattr(placement, f"{role}_num_workers"), getattr(placement, f"{role}_num_nodes")
    # of ranks that have parts of the same matrices, each is in another group
    workers, per_node = max(1, workers // tensor), max(1, workers // nodes // tensor)
    each = f" / {_TENSOR_PARALLEL}={tensor}" if tensor > 1 else ""
    rule = ""
    if strategy.kind != "fsdp2":
        rule = "is read by strategy=fsdp2 alone"
    elif size == 1 and workers > 1:
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
        advice = f"try {choices}, or drop it" if choices and strategy.kind == "fsdp2" else "drop strategy.fsdp_size"
        yield Violation(field="strategy.fsdp_size", rule=rule, value=repr(size), remedy=advice)


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
