"""Layouts over real processes: two ranks, replicated and sharded, each with the trees of its own shard, agree with one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from skyrl_train.batch.steps import stage
from skyrl_train.config.models import ModelConfig, OptimizerConfig
from skyrl_train.distributed import ModelStrategy, Replicated, Sharded
from skyrl_train.learner import ModelEngine, PolicyLearner
from skyrl_train.model import load_causal_lm
from tests.support.gloo_ranks import on_ranks
from tests.support.layout_cases import (
    ALGORITHM,
    close,
    distance,
    flat_gradient,
    on_policy,
    plain,
    tree_batch,
    use_layout,
)
from tests.support.learner_cases import fixed_rows, make_double, make_learner, save_tiny_model


def strategy(name: str) -> ModelStrategy:
    if name == "ddp":
        return Replicated()
    return Sharded(device=torch.device("cpu"), dtype=torch.float64, cpu_offload=False)


def run_rank(rank: int, folder: Path, name: str) -> list[Tensor]:
    """The gradients after one mini-batch of which this rank computes its shard, whole: drawn columns, and own ones."""
    model = load_causal_lm(ModelConfig(path=str(folder)), "cpu")
    make_double(model)
    spread = strategy(name)
    engine = ModelEngine(
        model,
        name="policy",
        micro_batching=fixed_rows(1),
        optimizer=OptimizerConfig(),
        strategy=spread,
    )
    learner = PolicyLearner(engine, model=ModelConfig(), algorithm=ALGORITHM, temperature=1.0)
    use_layout(learner, "prefix_shared", rows=2 + rank)
    closed = close(tree_batch(12))
    shard = stage(closed.batch, 2, together="prompt").shards[rank]
    found = []
    for scored in (shard, on_policy(shard, learner.forward(shard))):
        engine.zero_grad()
        learner.forward_backward(replace(closed, batch=scored))
        spread.reduce_gradients(engine.parameters.values())
        gradients = [spread.full(p.grad).flatten() for p in engine.parameters.values() if p.grad is not None]
        found.append(torch.cat(gradients).clone())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tolerance"), [("ddp", 1e-10), ("fsdp2", 1e-6)])
def test_two_ranks_have_the_gradient_of_one(
    tmp_path: Path, name: str, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsdp2 sums gradients in float32, whatever the model's type."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    save_tiny_model(tmp_path)
    gradients = on_ranks(run_rank, tmp_path, name)
    learner = make_learner(tmp_path, double=True, algorithm=ALGORITHM)
    plain(learner)
    batch = tree_batch(12)
    for number, scored in enumerate((batch, on_policy(batch, learner.forward(batch)))):
        learner.forward_backward(close(scored))
        expected = flat_gradient(learner)
        for found in gradients:
            assert distance(found[number], expected) < tolerance
