"""Rows with images over real processes: replicas, shards and ranks that share rows have the gradient of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from skyrl_train.batch.stage import stage
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.schema import ModelConfig, OptimizerConfig
from skyrl_train.distributed.sequence_parallel import SequenceGroup
from skyrl_train.distributed.strategy import ModelStrategy, Replicated, Sharded
from skyrl_train.learner.engine import ModelEngine
from skyrl_train.learner.policy import PolicyLearner
from tests.support.gloo_ranks import on_ranks
from tests.support.layout_cases import distance, use_layout
from tests.support.layouts import Layout, Step, closed, fixed_rollouts, learner_gradient
from tests.support.learner_cases import fixed_rows
from tests.support.vision_cases import make_vlm, with_images

pytestmark = pytest.mark.slow
TIMEOUT_S = 300.0
STEP = Step(algorithm=AlgorithmConfig(loss_reduction="sequence_mean"))


def strategy(name: str) -> ModelStrategy:
    if name == "ddp":
        return Replicated()
    group = SequenceGroup(2, timeout_s=TIMEOUT_S) if name == "together" else None
    return Sharded(device=torch.device("cpu"), dtype=torch.float64, cpu_offload=False, group=group)


def run_rank(rank: int, folder: Path, name: str) -> Tensor:
    """The gradient after one mini-batch of which this rank computes its share, whole; some forwards have no image."""
    spread = strategy(name)
    engine = ModelEngine(
        make_vlm(double=True),
        name="policy",
        micro_batching=fixed_rows(1),
        optimizer=OptimizerConfig(),
        strategy=spread,
    )
    learner = PolicyLearner(engine, model=ModelConfig(), algorithm=STEP.algorithm, temperature=1.0)
    use_layout(learner, "packed", rows=2)
    mini_batch = closed(STEP, with_images(fixed_rollouts()), Layout(step_wise=True))
    shards = stage(mini_batch.batch, 1 if name == "together" else 2, together="prompt").shards
    learner.forward_backward(replace(mini_batch, batch=shards[rank % len(shards)]))
    spread.reduce_gradients(engine.parameters.values())
    return torch.cat([spread.full(p.grad).flatten() for p in engine.parameters.values() if p.grad is not None]).clone()


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "together"])
def test_two_ranks_have_the_gradient_of_one(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`together`: both ranks have a part of the positions of each row."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    expected = learner_gradient(make_vlm(double=True), STEP, with_images(fixed_rollouts()), Layout())
    for found in on_ranks(run_rank, tmp_path, name):
        assert distance(found, expected) < 1e-10
