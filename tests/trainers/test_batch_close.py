"""What is taken of the models when a batch closes, whatever weights sampled its tokens."""

from dataclasses import replace

import torch

from skyrl_train.batch.steps import token_ages
from skyrl_train.runs import assembler
from skyrl_train.trainers import steps
from skyrl_train.types import RolloutBatch
from tests.support.fakes_trainer import FakeLearner, logprob_of, make_config, make_prompts, make_trajectory, make_turn


def stale_batch(config):
    """Four prompts of two samples: responses of two tokens, sampled by versions 5 and 6 of weights; the learner has 6."""
    turn = make_turn((1, 2), (3, 4), reward=1.0, response_logprobs=(-3.0, -3.0), weight_versions=((0, 5), (1, 6)))
    prompts = make_prompts(4)
    trajectories = [make_trajectory(turn, uid=prompt.uid, sample=sample) for prompt in prompts for sample in range(2)]
    rollouts = RolloutBatch(prompts=tuple(prompts), trajectories=tuple(trajectories), n_samples_per_prompt=2)
    return assembler(config)(rollouts, max_staleness=1, step=7, weight_version=6)


def test_values_returns_and_the_proximal_policy_are_those_of_the_close(tmp_path):
    config = make_config(tmp_path)
    algorithm = replace(config.trainer.algorithm, advantage_estimator={"_target_": "gae", "gae_lambda": 0.5})
    # With one epoch the first mini-batch would be its own proximal policy, and not be scored.
    trainer = replace(config.trainer, algorithm=algorithm, update_epochs_per_batch=2)
    learners = steps.Learners(policy=FakeLearner(weight=2.0), reference=None, critic=FakeLearner("critic", weight=1.0))
    batch = stale_batch(replace(config, trainer=trainer))
    assert token_ages(batch).tolist() == [0, 0, 1, 0] * 8
    for weight in (1.0, 30.0):  # of the critic, which moves between two closes
        learners.critic.weight = weight
        scored = steps.score(batch, learners, trainer)
        value = logprob_of(weight)
        torch.testing.assert_close(scored["values"], torch.tensor([0.0, 0.0, value, value] * 8))
        torch.testing.assert_close(scored["old_logprobs"], torch.tensor([0.0, 0.0, *[logprob_of(2.0)] * 2] * 8))
        assert scored["rollout_logprobs"].tolist() == [0.0, 0.0, -3.0, -3.0] * 8
        estimated = steps.estimate(scored, algorithm, kl_coef=0.0, seed=0)
        # delta of the last token is 1 - value; that of the one before it is value - value = 0, and half of the next counts.
        returns = torch.tensor([0.0, 0.0, value + 0.5 * (1 - value), 1.0] * 8)
        torch.testing.assert_close(estimated["returns"], returns)
