"""Learners on Ray actors: a small configuration, its steps, and what is compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from skyrl_train.batch.steps import MiniBatch, close_mini_batch
from skyrl_train.cluster import RayLearner, RaySession, Slot, start_learner
from skyrl_train.config import Config, TrainerConfig
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.models import ModelConfig, OptimizerConfig, PlacementConfig, PolicyConfig, StrategyConfig
from skyrl_train.errors import NonFiniteError
from skyrl_train.interfaces import Learner
from tests.support.learner_cases import make_batch, settings_of

LENGTHS = [9, 4, 12, 7, 5, 16, 8]
SLOT = Slot(options={"num_cpus": 1})


def make_config(model_folder: Path, *, strategy: str = "single", silence_timeout_s: float = 60.0) -> Config:
    return Config(
        model=ModelConfig(path=str(model_folder)),
        trainer=TrainerConfig(
            total_steps=3,
            micro_train_batch_size_per_gpu=2,
            algorithm=AlgorithmConfig(kl_loss_coef=0.1, entropy_coef=0.01),
            policy=PolicyConfig(optimizer=OptimizerConfig(lr=1e-2, max_grad_norm=0.5)),
        ),
        strategy=StrategyConfig(name=strategy),  # type: ignore[arg-type]
        placement=PlacementConfig(
            backend="ray", start_timeout_s=600.0, call_timeout_s=300.0, silence_timeout_s=silence_timeout_s
        ),
    )


def mini_batch(seed: int) -> MiniBatch:
    return close_mini_batch(
        make_batch(LENGTHS, seed=seed, dtype=torch.float32),
        loss_reduction="token_mean",
        max_sequence_length_for_norm=16,
    )


def three_steps(learner: Learner) -> list[float]:
    norms = []
    for seed in range(3):
        learner.forward_backward(mini_batch(seed))
        norms.append(learner.optim_step()["policy/grad_norm"].value)
    return norms


def weights_of(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.weights()}


def relative_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert list(found) == list(expected)
    difference = sum(float((found[name] - expected[name]).double().square().sum()) for name in expected)
    size = sum(float(tensor.double().square().sum()) for tensor in expected.values())
    return (difference / size) ** 0.5


def require_refusal_of_non_finite_losses(learner: Learner) -> None:
    """A step with an infinite advantage moves no weight, and the next one goes on."""
    before = weights_of(learner)
    bad = mini_batch(0)
    advantages = bad.batch["advantages"].clone()
    advantages[-1] = float("inf")
    learner.forward_backward(
        MiniBatch(batch=bad.batch.with_columns(advantages=advantages), denominators=bad.denominators)
    )
    with pytest.raises(NonFiniteError, match="No weight was changed"):
        learner.optim_step()
    assert relative_difference(weights_of(learner), before) == 0.0
    learner.forward_backward(mini_batch(0))
    learner.optim_step()


@contextmanager
def ray_learner(session: RaySession, config: Config, num_ranks: int) -> Iterator[RayLearner]:
    learner = start_learner(settings_of(config, "policy"), config.placement, session, [SLOT] * num_ranks)()
    try:
        yield learner
    finally:
        learner.close()
