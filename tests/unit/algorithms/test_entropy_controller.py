"""The weight of the entropy bonus follows a plain loop, reaches the loss, and is part of a checkpoint."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.algorithms.controllers import EntropyControllerState, initial_entropy_state, next_entropy_state
from skyrl_train.batch.steps import MiniBatch, close_mini_batch
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.errors import CheckpointError, NonFiniteError
from skyrl_train.telemetry import Mean, StepMetrics
from skyrl_train.trainers import steps
from tests.support.fakes_trainer import make_config
from tests.support.learner_cases import make_batch, make_learner, save_tiny_model

ADAPTIVE = AlgorithmConfig(
    entropy_controller="adaptive", entropy_coef=0.01, entropy_target=0.5, entropy_coef_delta=0.02, entropy_coef_max=0.05
)


def test_the_weight_rises_while_entropy_is_low_and_is_applied_only_then() -> None:
    draw = random.Random(0)
    state, coef, applied = initial_entropy_state(ADAPTIVE), 0.01, 0.0
    for _ in range(50):
        assert state.applied == pytest.approx(applied)
        entropy = draw.uniform(0, 1)
        state = next_entropy_state(state, entropy=entropy, config=ADAPTIVE)
        coef = min(coef + 0.02, 0.05) if entropy <= 0.5 else max(coef - 0.02, 0.0)
        applied = coef if entropy <= 0.5 else 0.0
        assert state.coef == pytest.approx(coef)


def test_the_state_survives_a_checkpoint_and_damage_is_named() -> None:
    state = EntropyControllerState(coef=0.03, is_low=True)
    assert EntropyControllerState.from_json(json.loads(json.dumps(state.to_json()))) == state
    with pytest.raises(CheckpointError, match="needs coef and is_low"):
        EntropyControllerState.from_json({"coef": math.nan, "is_low": True})


def test_an_entropy_that_is_no_number_is_refused() -> None:
    with pytest.raises(NonFiniteError):
        next_entropy_state(initial_entropy_state(ADAPTIVE), entropy=math.nan, config=ADAPTIVE)


@dataclass
class RecordingPolicy:
    """Keeps the weights it is given; its entropy falls from step to step."""

    weights: list[float] = field(default_factory=list)

    def forward_backward(self, mini_batch: MiniBatch) -> StepMetrics:
        self.weights.append(float(mini_batch.batch["entropy_coef"].unique()))
        return {"policy/entropy": Mean(0.7 - 0.2 * len(self.weights), 1.0)}

    def optim_step(self) -> StepMetrics:
        return {}


def test_each_optimizer_step_is_given_the_weight_that_the_one_before_left(tmp_path: Path) -> None:
    config = make_config(tmp_path, algorithm=ADAPTIVE, update_epochs_per_batch=2)
    batch = make_batch([6, 7, 8, 9])
    metadata = replace(batch.metadata, policy_mini_batch_boundaries=((0, 2), (2, 4)))
    policy: Any = RecordingPolicy()
    learners = steps.Learners(policy=policy, reference=None, critic=None)
    update = steps.update(replace(batch, metadata=metadata), learners, config.trainer, on_progress=lambda *_: None)
    assert policy.weights == pytest.approx([0.0, 0.03, 0.05, 0.05])
    assert update.entropy == EntropyControllerState(coef=0.05, is_low=True)


def test_the_weight_of_the_column_is_the_weight_of_the_bonus(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    batch = make_batch([6, 7, 8])
    mini_batch = close_mini_batch(batch, loss_reduction="token_mean", max_sequence_length_for_norm=8)
    column = torch.full((batch.num_tokens,), 0.3, dtype=torch.float64)
    gradients = []
    for algorithm, given in (
        (AlgorithmConfig(entropy_coef=0.3), mini_batch),
        (ADAPTIVE, replace(mini_batch, batch=mini_batch.batch.with_columns(entropy_coef=column))),
    ):
        learner = make_learner(folder, double=True, algorithm=algorithm)
        learner.forward_backward(given)
        gradients.append(
            torch.cat([p.grad.flatten() for p in learner.engine.parameters.values() if p.grad is not None])
        )
    assert torch.allclose(gradients[0], gradients[1], rtol=0, atol=1e-14)
