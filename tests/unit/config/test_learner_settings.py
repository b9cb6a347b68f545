"""Which forward passes a configuration needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from skyrl_train.config.algorithm.settings import AlgorithmConfig, OffPolicyConfig
from skyrl_train.config.derived.learners import old_logprobs_scored
from skyrl_train.config.schema import TrainerConfig

ONE_STEP = TrainerConfig(train_batch_size=16, policy_mini_batch_size=16)


@pytest.mark.parametrize("change", [{}, {"policy_mini_batch_size": 8}, {"docs_per_step": 32}])
def test_the_policy_of_the_first_optimizer_step_is_the_old_one(change: dict[str, Any]) -> None:
    assert old_logprobs_scored(replace(ONE_STEP, **change)) == "later"


def test_a_second_epoch_compares_the_first_rows_with_the_policy_before_the_first() -> None:
    assert old_logprobs_scored(replace(ONE_STEP, update_epochs_per_batch=2)) == "all"


@pytest.mark.parametrize("loss", ["rollout_is", "dppo", "cross_entropy"])
def test_losses_that_do_not_read_old_log_probabilities_need_none(loss: str) -> None:
    assert old_logprobs_scored(replace(ONE_STEP, algorithm=AlgorithmConfig(policy_loss=loss))) == "none"


@pytest.mark.parametrize(
    "algorithm",
    [
        AlgorithmConfig(kl_reward_coef=0.1),
        AlgorithmConfig(advantage_estimator="on_policy_distillation"),
        AlgorithmConfig(off_policy=OffPolicyConfig(weight="token", batch_normalize=True)),
    ],
)
def test_rewards_and_advantages_made_of_them_need_them(algorithm: AlgorithmConfig) -> None:
    assert old_logprobs_scored(replace(ONE_STEP, algorithm=algorithm)) == "all"


def test_the_engines_own_take_their_place() -> None:
    algorithm = AlgorithmConfig(proximal="behaviour")
    assert old_logprobs_scored(replace(ONE_STEP, algorithm=algorithm)) == "none"
