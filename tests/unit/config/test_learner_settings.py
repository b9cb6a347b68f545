"""Which forward passes a configuration needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.learners import needs_old_logprobs
from skyrl_train.config.schema import TrainerConfig

ONE_STEP = TrainerConfig(train_batch_size=16, policy_mini_batch_size=16)


def test_a_batch_that_is_one_optimizer_step_is_not_scored_first() -> None:
    assert not needs_old_logprobs(ONE_STEP)


@pytest.mark.parametrize(
    "change", [{"policy_mini_batch_size": 8}, {"update_epochs_per_batch": 2}, {"docs_per_step": 32}]
)
def test_later_optimizer_steps_compare_with_the_policy_before_the_first(change: dict[str, Any]) -> None:
    assert needs_old_logprobs(replace(ONE_STEP, **change))


@pytest.mark.parametrize("loss", ["rollout_is", "dppo", "cross_entropy"])
def test_losses_that_do_not_read_old_log_probabilities_need_none(loss: str) -> None:
    assert not needs_old_logprobs(
        replace(ONE_STEP, policy_mini_batch_size=8, algorithm=AlgorithmConfig(policy_loss=loss))
    )


@pytest.mark.parametrize(
    "algorithm",
    [AlgorithmConfig(kl_reward_coef=0.1), AlgorithmConfig(advantage_estimator="on_policy_distillation")],
)
def test_rewards_and_advantages_made_of_them_need_them(algorithm: AlgorithmConfig) -> None:
    assert needs_old_logprobs(replace(ONE_STEP, algorithm=algorithm))


def test_the_engines_own_take_their_place() -> None:
    algorithm = AlgorithmConfig(proximal="behaviour")
    assert not needs_old_logprobs(replace(ONE_STEP, policy_mini_batch_size=8, algorithm=algorithm))
