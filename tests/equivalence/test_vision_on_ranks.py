"""Rows with images over real processes: replicas, shards and ranks that share rows have the gradient of one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from skyrl_train.batch.steps import stage
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.fields import LayoutName
from skyrl_train.config.models import ModelConfig, OptimizerConfig
from skyrl_train.distributed import ModelStrategy, Replicated, SequenceGroup, Sharded
from skyrl_train.learner import ModelEngine, PolicyLearner
from skyrl_train.types import RolloutBatch
from tests.support.gloo_ranks import on_ranks
from tests.support.layout_cases import distance, use_layout
from tests.support.layouts import Layout, Step, closed, fixed_rollouts, learner_gradient
from tests.support.learner_cases import fixed_rows
from tests.support.vision_cases import make_gemma, make_vlm, with_gemma_images, with_images

pytestmark = pytest.mark.slow
TIMEOUT_S = 300.0
LAYOUTS: Mapping[str, tuple[LayoutName, ...]] = {"qwen": ("padded", "packed", "prefix_shared"), "gemma": ("padded",)}
STEP = Step(algorithm=AlgorithmConfig(loss_reduction="sequence_mean"))


def strategy(name: str) -> ModelStrategy:
    if name == "ddp":
        return Replicated()
    group = SequenceGroup(2, timeout_s=TIMEOUT_S) if name == "together" else None
    return Sharded(device=torch.device("cpu"), dtype=torch.float64, cpu_offload=False, group=group)


def model_of(family: str) -> PreTrainedModel:
    return make_vlm(double=True) if family == "qwen" else make_gemma(double=True)


def rollouts_of(family: str) -> RolloutBatch:
    return (with_images if family == "qwen" else with_gemma_images)(fixed_rollouts())


def run_rank(rank: int, folder: Path, name: str, family: str) -> list[Tensor]:
    """The gradients after mini-batches of which this rank computes its share, whole: step-wise or not, in the layouts that
    there are. Some forwards have no image."""
    spread = strategy(name)
    engine = ModelEngine(
        model_of(family), name="policy", micro_batching=fixed_rows(1), optimizer=OptimizerConfig(), strategy=spread
    )
    learner = PolicyLearner(engine, model=ModelConfig(), algorithm=STEP.algorithm, temperature=1.0)
    found = []
    for layout in LAYOUTS[family] if name != "together" else ("packed",):
        for step_wise in (False, True):
            use_layout(learner, layout, rows=2)
            mini_batch = closed(STEP, rollouts_of(family), Layout(step_wise=step_wise))
            shards = stage(mini_batch.batch, 1 if name == "together" else 2, together="prompt").shards
            learner.forward_backward(replace(mini_batch, batch=shards[rank % len(shards)]))
            spread.reduce_gradients(engine.parameters.values())
            whole = [spread.full(p.grad).flatten() for p in engine.parameters.values() if p.grad is not None]
            found.append(torch.cat(whole).clone())
            engine.zero_grad()
    return found


@pytest.mark.parametrize(
    ("name", "family"),
    [
        pytest.param("ddp", "qwen", marks=pytest.mark.nightly),
        ("fsdp2", "qwen"),
        pytest.param("together", "qwen", marks=pytest.mark.nightly),
        ("fsdp2", "gemma"),
    ],
)
def test_two_ranks_have_the_gradient_of_one(
    tmp_path: Path, name: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`together`: both ranks have a part of the positions of each row."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    expected = learner_gradient(model_of(family), STEP, rollouts_of(family), Layout())
    for gradients in on_ranks(run_rank, tmp_path, name, family):
        assert len(gradients) == 2 * len(LAYOUTS[family] if name != "together" else ("packed",))
        for found in gradients:
            assert distance(found, expected) < 1e-10
