"""Micro-batches that size themselves on Ray actors: one budget on both ranks, kept for the next start, the same step.

Ranks with unequal memory are in `tests/equivalence/test_budgets_on_ranks.py`: a run has one limit for all of them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_train.cluster.learners import start_learner
from skyrl_train.cluster.placement import Slot
from skyrl_train.cluster.session import RaySession
from skyrl_train.config import Config
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.models import ModelConfig, OptimizerConfig, StrategyConfig
from skyrl_train.interfaces import Learner
from skyrl_train.learner.memory import read_reports, size_run
from tests.support.layout_cases import close
from tests.support.learner_cases import make_batch, policy_of, settings_of

pytestmark = pytest.mark.cluster

SLOT = Slot(options={"num_cpus": 1})
LENGTHS = [9, 14, 7, 12, 16, 8, 10, 11, 13, 9, 15, 6] * 4


def make_config(model_folder: Path, strategy: str) -> Config:
    config = Config(model=ModelConfig(path=str(model_folder)), strategy=StrategyConfig(name=strategy))  # type: ignore[arg-type]
    policy = replace(config.trainer.policy, optimizer=OptimizerConfig(name="sgd", lr=0.1))
    algorithm = AlgorithmConfig(kl_loss_coef=0.1, entropy_coef=0.02)
    trainer = replace(config.trainer, policy=policy, algorithm=algorithm, micro_batching="auto", memory_budget_gb=0.001)
    placement = replace(
        config.placement, backend="ray", policy_num_workers=2, start_timeout_s=180.0, call_timeout_s=120.0
    )
    return replace(config, trainer=trainer, placement=placement)


def step(learner: Learner) -> tuple[float, float]:
    """The loss, and how often memory ran out."""
    metrics = learner.forward_backward(close(make_batch(LENGTHS)))
    learner.optim_step()
    redone = metrics.get("memory/policy_redone")
    return metrics["loss/total"].value, redone.value if redone else 0.0


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_find_one_budget_and_train_as_one_process_does(
    session: RaySession, model_folder: Path, tmp_path: Path, strategy: str
) -> None:
    config, file = make_config(model_folder, strategy), tmp_path / "memory.json"
    alone = policy_of(replace(config, strategy=StrategyConfig()))
    learner = start_learner(settings_of(config, "policy"), config.placement, session, [SLOT, SLOT])()
    try:
        (line,) = size_run(config.trainer, [learner], file, longest=16, max_rows=48)
        first, second = read_reports(file)["policy"]
        assert "probes" in line
        assert first.budgets == second.budgets
        assert first.training is not None
        assert 16 <= first.training.tokens < sum(LENGTHS) // 2
        (line,) = size_run(config.trainer, [learner], file, longest=16, max_rows=48)
        assert "of the run that is resumed" in line
        loss, redone = step(learner)
        found = {name: tensor.clone() for name, tensor in learner.weights()}
    finally:
        learner.close()
    expected_loss, _ = step(alone)
    assert redone == 0
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    expected = {name: tensor.clone() for name, tensor in alone.weights()}
    difference = sum(float((found[name] - expected[name]).double().square().sum()) for name in expected)
    size = sum(float(tensor.double().square().sum()) for tensor in expected.values())
    assert (difference / size) ** 0.5 < 1e-6
