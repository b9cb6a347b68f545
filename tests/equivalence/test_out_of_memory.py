"""Memory that runs out on one rank, anywhere in a pass: no rank waits, and the step is what it would have been."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from skyrl_train.batch.stage import stage
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.schema import ModelConfig, OptimizerConfig
from skyrl_train.learner.engine import ModelEngine
from skyrl_train.learner.policy import PolicyLearner
from skyrl_train.model.causal_lm import load_causal_lm
from tests.layout_cases import close
from tests.learner_cases import make_batch, make_double, save_tiny_model
from tests.memory_cases import FailingMeter, full_weights, on_two_ranks, size_itself, spread

ALGORITHM = AlgorithmConfig(kl_loss_coef=0.1, entropy_coef=0.02)
LENGTHS = [9, 14, 7, 12, 16, 8, 10, 11, 13, 9, 15, 6]
TOKENS = 64
POINTS = 16
"""Places in a step at which memory runs out, spread over all of its allocations."""


@dataclass(frozen=True)
class Found:
    """After one step."""

    weights: Tensor
    scores: Tensor
    budgets: tuple[int, int]


def build(folder: Path, name: str) -> tuple[PolicyLearner, FailingMeter]:
    model = load_causal_lm(ModelConfig(path=str(folder)), "cpu")
    make_double(model)
    engine = ModelEngine(
        model,
        name="policy",
        micro_batching=None,  # type: ignore[arg-type]
        optimizer=OptimizerConfig(name="sgd", lr=0.1),
        strategy=spread(name),
    )
    return PolicyLearner(engine, model=ModelConfig(), algorithm=ALGORITHM, temperature=1.0), FailingMeter()


def one_step(learner: PolicyLearner, meter: FailingMeter, rank: int, refused: list[int]) -> Found:
    """A scoring and an update from the weights as they are, which come back afterwards."""
    engine = learner.engine
    batches = size_itself(engine, meter, tokens=TOKENS)
    closed = close(make_batch(LENGTHS))
    shard = stage(closed.batch, 2).shards[rank]
    before = [parameter.detach().clone() for parameter in engine.parameters.values()]
    meter.refuse(*refused)
    scores = learner.forward(shard)
    learner.forward_backward(replace(closed, batch=shard))
    learner.optim_step()
    found = Found(full_weights(engine), scores, (batches.budgets.training, batches.budgets.forward))
    with torch.no_grad():
        for parameter, value in zip(engine.parameters.values(), before):
            parameter.copy_(value)
    if engine.strategy.sharded:
        from skyrl_train.distributed.fsdp import reshard

        reshard(engine.model)
    return found


def run_rank(rank: int, folder: Path, name: str) -> None:
    """The undisturbed step, then the same one with memory running out on rank 1 at one point after another."""
    learner, meter = build(folder, name)
    calm = one_step(learner, meter, rank, [])
    total = learner.engine.strategy.agree(meter.num_allocations)
    points = [1 + (total - 1) * index // (POINTS - 1) for index in range(POINTS)]
    disturbed = [one_step(learner, meter, rank, [point] if rank == 1 else []) for point in points]
    both = one_step(learner, meter, rank, [points[8 + 2 * rank]])
    torch.save((calm, [*disturbed, both]), folder / f"rank{rank}.pt")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tolerance"), [("ddp", 1e-12), ("fsdp2", 1e-6)])
def test_memory_that_runs_out_on_one_rank_changes_no_step(
    tmp_path: Path, name: str, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsdp2 sums gradients in float32, whatever the model's type."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    save_tiny_model(tmp_path)
    results = on_two_ranks(run_rank, tmp_path, name)
    for calm, disturbed in results:
        assert len(disturbed) == POINTS + 1
        for found in disturbed:
            assert float((found.weights - calm.weights).abs().max()) <= tolerance * float(calm.weights.abs().max())
            assert float((found.scores - calm.scores).abs().max()) <= 1e-6
            assert min(found.budgets) < TOKENS
    budgets = [[found.budgets for found in disturbed] for _, disturbed in results]
    assert budgets[0] == budgets[1]
