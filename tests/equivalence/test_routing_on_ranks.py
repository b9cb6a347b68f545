"""Recorded experts over real processes: replicas, shards and ranks that share rows have the gradient of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from skyrl_train.batch.steps import stage
from skyrl_train.config.models import ModelConfig, OptimizerConfig
from skyrl_train.distributed import ModelStrategy, Replicated, SequenceGroup, Sharded
from skyrl_train.learner import ModelEngine, PolicyLearner
from skyrl_train.model.parallel import follow_routing
from tests.support.gloo_ranks import on_ranks
from tests.support.layout_cases import distance, use_layout
from tests.support.layouts import Layout, closed, fixed_rollouts
from tests.support.learner_cases import fixed_rows
from tests.support.moe_cases import STEP, DoubleRouter, double_moe, gradient, with_experts

pytestmark = pytest.mark.slow
TIMEOUT_S = 300.0


def make_model() -> torch.nn.Module:
    made = double_moe()
    for layer in made.model.layers:  # type: ignore[union-attr]
        layer.mlp.gate = DoubleRouter(layer.mlp.gate.weight)
    follow_routing(made, name="m")
    return made


def strategy(name: str) -> ModelStrategy:
    if name == "ddp":
        return Replicated()
    group = SequenceGroup(2, timeout_s=TIMEOUT_S) if name == "together" else None
    return Sharded(device=torch.device("cpu"), dtype=torch.float64, cpu_offload=False, group=group)


def run_rank(rank: int, folder: Path, name: str) -> Tensor:
    """The gradient after one mini-batch of which this rank computes its share, whole."""
    spread = strategy(name)
    engine = ModelEngine(
        make_model(),  # type: ignore[arg-type]
        name="policy",
        micro_batching=fixed_rows(1),
        optimizer=OptimizerConfig(),
        strategy=spread,
    )
    learner = PolicyLearner(engine, model=ModelConfig(), algorithm=STEP.algorithm, temperature=1.0)
    use_layout(learner, "prefix_shared", rows=3)
    mini_batch = closed(STEP, with_experts(fixed_rollouts()), Layout(step_wise=True))
    shards = stage(mini_batch.batch, 1 if name == "together" else 2, together="prompt").shards
    learner.forward_backward(replace(mini_batch, batch=shards[rank % len(shards)]))
    spread.reduce_gradients(engine.parameters.values())
    return torch.cat([spread.full(p.grad).flatten() for p in engine.parameters.values() if p.grad is not None]).clone()


@pytest.mark.parametrize(("name", "tolerance"), [("ddp", 1e-10), ("fsdp2", 1e-6), ("together", 1e-6)])
def test_two_ranks_have_the_gradient_of_one(
    tmp_path: Path, name: str, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fsdp2` sums gradients in float32; `together`: both ranks have a part of the positions of each row."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    expected = gradient(make_model(), with_experts(fixed_rollouts()), "padded", step_wise=False, merge=False)
    for found in on_ranks(run_rank, tmp_path, name):
        assert distance(found, expected) < tolerance
