"""Learners whose ranks share micro-batches, on real processes: what each case gives, from rank 0 or from one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skyrl_train.batch.steps import stage
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.fields import LayoutChoice
from skyrl_train.config.models import LoraConfig, ModelConfig, OptimizerConfig, StrategyConfig, mesh_sizes
from skyrl_train.distributed import ModelStrategy, RankMesh, Replicated, SequenceGroup, Sharded, SingleProcess
from skyrl_train.learner import CriticLearner, ModelEngine, PolicyLearner
from skyrl_train.model import load_causal_lm, load_value_model, quiet_transformers
from skyrl_train.model.lora import adapter_tensors, add_adapter
from skyrl_train.parts import POLICY_LOSSES
from tests.support.gloo_ranks import on_ranks
from tests.support.layout_cases import close, on_policy, tree_batch, use_layout
from tests.support.learner_cases import fixed_rows, make_double

TIMEOUT_S = 60.0
LAYOUTS: list[tuple[LayoutChoice, bool]] = [
    ("padded", False),
    ("padded", True),
    ("packed", False),
    ("packed", True),
    ("prefix_shared", False),
]
"""Without and with turns merged."""
FAMILIES = ("qwen2", "qwen3", "llama")
PLAIN_FAMILIES: Mapping[str, Mapping[str, Any]] = {family: {} for family in FAMILIES}
ALGORITHM = AlgorithmConfig(kl_loss_coef=0.1, entropy_coef=0.02)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model, one layout, one loss."""

    family: str = "qwen2"
    layout: LayoutChoice = "padded"
    merge: bool = False
    role: str = "policy"
    policy_loss: str = "regular"
    rows: int = 3
    """In a micro-batch."""
    checkpointing: bool = False
    adapter: bool = False
    """Trained in place of all weights, with dropout."""
    on_policy: bool = False
    """Old and reference log-probabilities are those that this layout computes first."""

    @property
    def name(self) -> str:
        return "-".join(str(value) for value in vars(self).values())


CASES = [
    *(Case(layout=layout, merge=merge, family=family) for layout, merge in LAYOUTS for family in FAMILIES),
    *(Case(layout=layout, merge=merge, role="critic") for layout, merge in LAYOUTS),
    *(Case(layout="prefix_shared", policy_loss=loss) for loss in sorted(POLICY_LOSSES)),
    *(Case(layout=layout, merge=merge, policy_loss="kl_cov", on_policy=True) for layout, merge in LAYOUTS),
    Case(layout="packed", rows=1),
    Case(layout="prefix_shared", checkpointing=True),
    *(Case(layout=layout, adapter=True) for layout in ("padded", "prefix_shared")),
]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one case."""

    scores: Tensor
    """`[num_tokens]` of a forward without gradients."""
    gradient: Tensor
    """Of the whole mini-batch, flat."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """How many, and how they are used."""

    strategy: str
    num_ranks: int
    sequence_parallel_size: int = 1
    fsdp_size: int = 0
    tensor_parallel_size: int = 1
    cpu_offload: bool = False
    layers_ahead: int | None = None

    @property
    def name(self) -> str:
        return "_".join(str(value) for value in vars(self).values())

    @property
    def ranks_per_share(self) -> int:
        """Those that have the same rows."""
        return self.sequence_parallel_size * self.tensor_parallel_size


def save_models(
    folder: Path, families: Mapping[str, Mapping[str, Any]] = PLAIN_FAMILIES, *, num_layers: int = 2
) -> None:
    """A random model of each family, with what its config has of its own, and half as many key and value heads as heads."""
    from transformers import AutoConfig, AutoModelForCausalLM

    for seed, (family, extra) in enumerate(families.items()):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(
            family,
            vocab_size=50,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=128,
            initializer_range=0.2,
            tie_word_embeddings=family != "llama",
            pad_token_id=0,
            **extra,
        )
        with quiet_transformers():
            AutoModelForCausalLM.from_config(config).save_pretrained(folder / family)


def make_learner(folder: Path, case: Case, strategy: ModelStrategy) -> PolicyLearner | CriticLearner:
    """In float64."""
    config = ModelConfig(path=str(folder / case.family), gradient_checkpointing=case.checkpointing)
    model = load_causal_lm(config, "cpu") if case.role == "policy" else load_value_model(config, "cpu")
    if case.role == "critic":
        head: Any = model.score
        torch.nn.init.normal_(head.weight, std=0.2, generator=torch.Generator().manual_seed(1))
    if case.adapter:
        add_adapter(model, LoraConfig(rank=4, alpha=8.0, dropout=0.3), seed=3)
        generator = torch.Generator().manual_seed(2)
        for name, parameter in adapter_tensors(model).items():
            if ".lora_B." in name:  # which starts at 0, and A without a gradient
                torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    if case.family.endswith("moe"):
        model.set_experts_implementation("eager")  # grouped products are of other types
    make_double(model)
    engine = ModelEngine(
        model, name=case.role, micro_batching=fixed_rows(4), optimizer=OptimizerConfig(), strategy=strategy
    )
    learner: Any = (
        PolicyLearner(engine, model=config, algorithm=replace(ALGORITHM, policy_loss=case.policy_loss), temperature=0.8)
        if case.role == "policy"
        else CriticLearner(engine, model=config, algorithm=ALGORITHM)
    )
    use_layout(learner, case.layout, merge=case.merge, rows=case.rows)
    return learner  # type: ignore[no-any-return]


def outcome(
    learner: PolicyLearner | CriticLearner, *, on_policy_scored: bool = False, dp_rank: int = 0, dp_size: int = 1
) -> Outcome:
    """Of `tree_batch(12)`, of which this rank computes its share. Called by all ranks."""
    strategy = learner.engine.strategy
    batch = tree_batch(12)
    scores = learner.forward(batch)
    closed = close(on_policy(batch, scores) if on_policy_scored else batch)
    learner.forward_backward(replace(closed, batch=stage(closed.batch, dp_size).shards[dp_rank]))
    parameters = learner.engine.parameters.values()
    strategy.reduce_gradients(parameters)
    found = [torch.zeros_like(p, dtype=torch.float64) if p.grad is None else strategy.full(p.grad) for p in parameters]
    return Outcome(scores=scores, gradient=torch.cat([each.flatten() for each in found]))


def alone(folder: Path, case: Case) -> Outcome:
    """One process, one row at a time, padded, nothing shared."""
    plain = replace(case, layout="padded", merge=False, rows=1, checkpointing=False)
    return outcome(make_learner(folder, plain, SingleProcess()), on_policy_scored=case.on_policy)


def run_ranks(folder: Path, ranks: Ranks, cases: list[Case]) -> dict[str, Outcome]:
    """What rank 0 has of each case, after checking that every rank of its group scored the same."""
    found: dict[str, Outcome] = on_ranks(
        _run_rank, folder, ranks, cases, num_ranks=ranks.num_ranks, deadline_s=TIMEOUT_S
    )[0]
    return found


def make_strategy(ranks: Ranks) -> ModelStrategy:
    """Of this process, which has joined the others."""
    size, device = ranks.sequence_parallel_size, torch.device("cpu")
    group = SequenceGroup(size, timeout_s=TIMEOUT_S) if size > 1 else None
    if ranks.strategy == "ddp":
        return Replicated(group)
    chosen = StrategyConfig(
        name=ranks.strategy,
        fsdp_size=ranks.fsdp_size,
        sequence_parallel_size=size,
        tensor_parallel_size=ranks.tensor_parallel_size,
    )
    sizes = mesh_sizes(chosen, ranks.num_ranks)
    mesh = RankMesh(sizes=sizes, device_type="cpu", timeout_s=TIMEOUT_S)
    return Sharded(
        device=device,
        dtype=torch.float64,
        cpu_offload=ranks.cpu_offload,
        group=group,
        mesh=mesh,
        layers_ahead=ranks.layers_ahead,
    )


def _run_rank(rank: int, folder: Path, ranks: Ranks, cases: list[Case]) -> dict[str, Outcome]:
    strategy, size = make_strategy(ranks), ranks.ranks_per_share
    found = {}
    for case in cases:
        learner = make_learner(folder, case, strategy)
        found[case.name] = outcome(
            learner, on_policy_scored=case.on_policy, dp_rank=rank // size, dp_size=ranks.num_ranks // size
        )
        first = strategy.of_rank_0(found[case.name].scores)
        if not torch.equal(first, found[case.name].scores):
            raise ValueError(f"rank {rank} scores otherwise than rank 0: {case}")
    return found
