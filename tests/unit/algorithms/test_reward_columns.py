"""A greedy sample's reward and reward components, from rollouts to the batch's rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyrl_train.algorithms.baseline_advantages import with_greedy_rewards, with_reward_columns
from skyrl_train.batch import component_column
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.errors import BatchError
from skyrl_train.runs import assembler
from skyrl_train.telemetry.records import decode_trajectory, encode_trajectory
from skyrl_train.trainers import steps
from skyrl_train.types import RolloutBatch
from tests.support.fakes_trainer import failed_trajectory, make_config, make_prompts, make_trajectory, make_turn

REMAX = AlgorithmConfig(advantage_estimator="remax")


def rollouts() -> RolloutBatch:
    """Two prompts of two samples; the second sample of the first has two turns, the last of all failed."""
    trajectories = (
        make_trajectory(make_turn(reward=1.0), sample=0, metrics={"format": 0.5}),
        make_trajectory(make_turn(reward=0.0), sample=1, metrics={"format": 1.0}),
        make_trajectory(make_turn(reward=3.0), uid="p1", sample=0, metrics={"format": 0.0}),
        failed_trajectory(uid="p1", sample=1),
    )
    return RolloutBatch(prompts=tuple(make_prompts(2)), trajectories=trajectories, n_samples_per_prompt=2)


def greedy(*trajectories) -> RolloutBatch:
    return RolloutBatch(prompts=tuple(make_prompts(2)), trajectories=trajectories, n_samples_per_prompt=1)


def test_every_trajectory_gets_the_reward_of_its_prompts_greedy_sample_through_the_log_and_into_its_rows(
    tmp_path: Path,
):
    both = greedy(make_trajectory(make_turn(reward=0.25)), make_trajectory(make_turn(reward=2.0), uid="p1"))
    found = with_greedy_rewards(rollouts(), both)
    assert [trajectory.greedy_reward for trajectory in found.trajectories] == [0.25, 0.25, 2.0, None]
    recorded = json.loads(json.dumps(encode_trajectory(found.prompts[0], found.trajectories[0])))
    assert decode_trajectory(recorded)[1].greedy_reward == 0.25
    config = make_config(tmp_path, train_batch_size=2, policy_mini_batch_size=2, algorithm=REMAX)
    batch = assembler(config)(found, step=1, weight_version=0)
    assert batch["greedy_rewards"].tolist() == [0.25, 0.25, 2.0, 0.0]
    advantages = steps.estimate(batch, config.trainer.algorithm, kl_coef=0.0, seed=config.seed)
    per_row = [row[mask].unique().tolist() for row, mask in zip(*map(advantages.padded, ("advantages", "loss_mask")))]
    assert per_row == [[0.75], [-0.25], [1.0], []]


def test_a_greedy_sample_that_failed_takes_its_prompt_with_it():
    found = with_greedy_rewards(
        rollouts(), greedy(failed_trajectory(), make_trajectory(make_turn(reward=2.0), uid="p1"))
    )
    assert [trajectory.failed for trajectory in found.trajectories] == [True, True, False, True]
    failure = found.trajectories[0].failure
    assert failure is not None
    assert failure.message.startswith("the greedy sample of its prompt failed: ")


def test_greedy_samples_of_other_prompts_are_refused():
    with pytest.raises(BatchError, match="one for each prompt"):
        with_greedy_rewards(rollouts(), rollouts())


def test_components_come_from_the_environments_metrics(tmp_path: Path):
    algorithm = AlgorithmConfig(advantage_estimator="gdpo", reward_components={"format": 1})
    config = make_config(tmp_path, train_batch_size=2, policy_mini_batch_size=2, algorithm=algorithm)
    batch = assembler(config)(rollouts(), step=1, weight_version=0)
    assert batch[component_column("format")].tolist() == [0.5, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (REMAX, "p0/0 has no reward of a greedy sample"),
        (
            AlgorithmConfig(advantage_estimator="gdpo", reward_components={"speed": 1}),
            "p0/0 has no metric 'speed' that is a finite number, which reward_components names; .* report format",
        ),
    ],
)
def test_what_a_trajectory_lacks_is_named(tmp_path: Path, algorithm: AlgorithmConfig, message: str):
    config = make_config(tmp_path, train_batch_size=2, policy_mini_batch_size=2)
    batch = assembler(config)(rollouts(), step=1, weight_version=0)
    with pytest.raises(BatchError, match=message):
        with_reward_columns(batch, rollouts(), algorithm)
