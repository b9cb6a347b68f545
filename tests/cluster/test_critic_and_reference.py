"""The critic on Ray actors, a reference that becomes the policy there, and one that is the policy without its adapter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from skyrl_train.batch.steps import MiniBatch, close_mini_batch
from skyrl_train.cluster.learners import start_learner
from skyrl_train.cluster.session import RaySession
from skyrl_train.config.models import CriticConfig, CriticModelConfig, LoraConfig, OptimizerConfig
from skyrl_train.errors import ModelError
from skyrl_train.interfaces import Learner
from skyrl_train.weights import stored_weights
from tests.support.learner_cases import critic_of, make_batch, policy_of, settings_of
from tests.support.ray_learners import (
    LENGTHS,
    SLOT,
    make_config,
    ray_learner,
    relative_difference,
    three_steps,
    weights_of,
)

pytestmark = pytest.mark.cluster


def critic_batch(seed: int) -> MiniBatch:
    batch = make_batch(LENGTHS, seed=seed, dtype=torch.float32)
    batch = batch.with_columns(values=0.1 * batch["advantages"], returns=batch["input_ids"].float().sin())
    return close_mini_batch(batch, loss_reduction="token_mean", max_sequence_length_for_norm=16)


def train_critic(learner: Learner) -> list[float]:
    losses = []
    for seed in range(3):
        losses.append(learner.forward_backward(critic_batch(seed))["critic/value_loss"].value)
        learner.optim_step()
    return losses


def test_a_sharded_critic_gives_the_weights_and_values_of_one_process(session: RaySession, model_folder: Path) -> None:
    critic = CriticConfig(model=CriticModelConfig(path="policy"), optimizer=OptimizerConfig(lr=1e-2))
    alone_config = replace(make_config(model_folder), critic=critic)
    alone = critic_of(alone_config)
    losses, batch = train_critic(alone), make_batch(LENGTHS)
    config = replace(make_config(model_folder, strategy="fsdp2"), critic=critic)
    learner = start_learner(settings_of(config, "critic"), config.placement, session, [SLOT] * 2)()
    try:
        assert train_critic(learner) == pytest.approx(losses, rel=1e-5)
        assert relative_difference(weights_of(learner), weights_of(alone)) < 1e-5
        assert torch.allclose(learner.forward(batch), alone.forward(batch), atol=1e-5)
    finally:
        learner.close()


@pytest.mark.nightly
def test_a_reference_group_takes_the_weights_of_the_policys(session: RaySession, model_folder: Path) -> None:
    config, batch = make_config(model_folder, strategy="fsdp2"), make_batch(LENGTHS)
    reference = start_learner(settings_of(config, "reference"), config.placement, session, [SLOT])()
    try:
        with ray_learner(session, config, 2) as policy:
            three_steps(policy)
            assert not torch.allclose(reference.forward(batch), policy.forward(batch), atol=1e-3)
            reference.load_weights(policy.weights())
            assert torch.allclose(reference.forward(batch), policy.forward(batch), atol=1e-5)
        single = make_config(model_folder)
        alone = policy_of(single)
        reference.load_weights(alone.weights())
        assert torch.allclose(reference.forward(batch), alone.forward(batch), atol=1e-5)
        with pytest.raises(ModelError, match="parameters got 0"):
            reference.load_weights(stored_weights({}))
    finally:
        reference.close()


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.nightly), "fsdp2"])
def test_the_policys_ranks_score_for_the_reference_with_the_adapter_off(
    session: RaySession, model_folder: Path, strategy: str
) -> None:
    """From before the first step on, and without any effect on what is trained."""
    config, batch = make_config(model_folder, strategy=strategy), make_batch(LENGTHS)
    config = replace(config, model=replace(config.model, lora=LoraConfig(rank=4)))
    single = replace(make_config(model_folder), model=config.model)
    alone = policy_of(single)
    before = alone.forward(batch)
    three_steps(alone)
    with ray_learner(session, config, 2) as policy:
        assert torch.allclose(policy.forward_base(batch), before, atol=1e-5)
        three_steps(policy)
        assert torch.allclose(policy.forward_base(batch), before, atol=1e-5)
        assert torch.allclose(policy.forward(batch), alone.forward(batch), atol=1e-5)
        assert not torch.allclose(policy.forward(batch), before, atol=1e-3)
        assert relative_difference(weights_of(policy), weights_of(alone)) < 1e-5
