"""The law over real processes: two ranks on gloo, each with its shard, add up to the gradient of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from skyrl_train.batch.planner import reduction_schedule
from skyrl_train.batch.steps import stage
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.models import ModelConfig
from skyrl_train.model import load_causal_lm
from tests.support.gloo_ranks import on_ranks
from tests.support.layout_cases import REGIMES, Regime
from tests.support.layouts import (
    Layout,
    Step,
    assert_same_gradient,
    closed,
    fixed_rollouts,
    flat_gradient,
    plain_gradient,
    plain_loss,
    rescoring,
)
from tests.support.learner_cases import make_double, save_tiny_model

STEP = Step(algorithm=AlgorithmConfig(kl_loss_coef=0.1, entropy_coef=0.02, loss_reduction="sequence_mean"))
UNEVEN = Layout(dp_size=2, micro_batching="token_budget", tokens=20, step_wise=True, order_seed=3, dummy_rows=1)


def load(folder: Path) -> nn.Module:
    model = load_causal_lm(ModelConfig(path=str(folder)), "cpu")
    make_double(model)
    return model


def largest_anywhere(count: int) -> int:
    """What every rank runs: the number of micro-batches of the rank with the most."""
    agreed = torch.tensor(count)
    distributed.all_reduce(agreed, op=distributed.ReduceOp.MAX)
    return int(agreed)


def run_rank(rank: int, folder: Path) -> dict[str, Any]:
    """One rank's micro-batches, dummies included; gradients are reduced after the last of them."""
    return {regime: compute_rank(load(folder), rank, regime) for regime in REGIMES}


def compute_rank(model: nn.Module, rank: int, regime: Regime) -> dict[str, Any]:
    rescore = rescoring(model, STEP, fixed_rollouts(), replace(UNEVEN, dp_size=1), regime)
    shard = stage(closed(STEP, fixed_rollouts(), UNEVEN, rescore).batch, 2).shards[rank]
    model.zero_grad(set_to_none=True)
    own = len(UNEVEN.strategy().forwards(shard, training=True))
    parts = list(UNEVEN.strategy().iterate(shard, training=True, agree=largest_anywhere))
    for part, reduces in zip(parts, reduction_schedule(len(parts))):
        plain_loss(model, STEP.algorithm, part.batch).backward()  # type: ignore[no-untyped-call]
        if reduces:
            for parameter in model.parameters():
                distributed.all_reduce(parameter.grad)
    return {"gradient": flat_gradient(model), "own": own, "ran": len(parts)}


@pytest.mark.slow
def test_two_gloo_ranks_have_the_gradient_of_one_process(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    found = on_ranks(run_rank, tmp_path)
    for regime in REGIMES:
        results = [rank[regime] for rank in found]
        expected = plain_gradient(load(tmp_path), STEP, fixed_rollouts(), regime=regime)
        for result in results:
            assert_same_gradient(result["gradient"], expected)
        assert results[0]["ran"] == results[1]["ran"]
        assert {result["own"] for result in results} != {results[0]["ran"]}, "one rank should run a dummy micro-batch"


def test_the_same_step_in_one_process(tmp_path: Path) -> None:
    model = load(save_tiny_model(tmp_path))
    expected = plain_gradient(model, STEP, fixed_rollouts())
    for layout in (UNEVEN, replace(UNEVEN, dp_size=1)):
        assert_same_gradient(plain_gradient(model, STEP, fixed_rollouts(), layout), expected)
    expected = plain_gradient(model, STEP, fixed_rollouts(), regime="shared")
    for regime in REGIMES[1:]:
        assert_same_gradient(plain_gradient(model, STEP, fixed_rollouts(), UNEVEN, regime), expected)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
