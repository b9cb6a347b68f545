"""Advantage estimators: how much better than expected each trained token was.

Groups are the trajectories of one prompt, never rows; failed trajectories are padding and belong to no group. A group
of one, and a group whose scores are equal, gives exactly 0: no epsilon is added to a deviation that is not there.
Group estimators compare the scores that `trainer.algorithm.step_rewards` chooses; see `groups.score`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor

from skyrl_train.algorithms.groups import Scores, score
from skyrl_train.algorithms.inputs import AdvantageInputs, AdvantageOutput
from skyrl_train.algorithms.losses.checks import check_advantage_inputs, needed
from skyrl_train.algorithms.sequences import actions_of, discounted_suffix_sum, next_in_segment
from skyrl_train.config.algorithm import AlgorithmConfig, Share
from skyrl_train.declarations import InPreset
from skyrl_train.errors import BatchError
from skyrl_train.parts import ADVANTAGE_ESTIMATORS

__all__ = ["ADVANTAGE_ESTIMATORS", "AdvantageEstimator", "AdvantageInputs", "AdvantageOutput"]

AdvantageEstimator = Callable[[AdvantageInputs, AlgorithmConfig], AdvantageOutput]


def gae(
    inputs: AdvantageInputs, config: AlgorithmConfig, *, gae_lambda: Annotated[Share, InPreset(0.95)] = 1.0
) -> AdvantageOutput:
    """`A_t = sum_l (gamma * lambda)^l delta_(t+l)`, `delta_t = r_t + gamma * V_(t+1) - V_t`; returns are `A_t + V_t`.

    Generalized advantage estimation, arXiv:1506.02438, equations 11 to 16. Time runs over the trained tokens of a
    trajectory alone: observation tokens are skipped, and the turns of a step-wise trajectory follow one another, so
    that splitting it into rows changes nothing. The value after the last token is 0. verl drops rewards that sit on
    observation tokens; here the action before gets them. Needs values. Raises BatchError for malformed inputs.

    Args:
        gae_lambda: How far errors of values are summed: 0 one step ahead, 1 to the end.
    """
    check_advantage_inputs(inputs)
    actions = actions_of(inputs)
    values = actions.gather(needed("values", inputs.values))
    deltas = actions.rewards + config.gamma * next_in_segment(values, actions.trajectory) - values
    advantages = discounted_suffix_sum(deltas, actions.trajectory, config.gamma * gae_lambda)
    return AdvantageOutput(
        advantages=actions.scatter(advantages, inputs.rewards),
        returns=actions.scatter(advantages + values, inputs.rewards),
    )


def grpo(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutput:
    """`(r_i - mean(r)) / std(r)` over the prompt's trajectories, the same for every trained token of the trajectory.

    DeepSeekMath, arXiv:2402.03300, section 4.1.2. The deviation is the sample's (n - 1), without the epsilon that TRL
    (1e-4) and verl (1e-6) add. `normalize_by_std=false` leaves the division out: Dr. GRPO, arXiv:2503.20783.
    Needs groups. Raises BatchError for malformed inputs.
    """
    scores = _scores(inputs, config)
    centred = scores.values - scores.group_mean()
    if config.normalize_by_std:
        centred = centred / scores.deviation()
    return _spread(scores, centred)


def rloo(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutput:
    """`r_i - mean of the others' r_j`, which is `n / (n - 1) * (r_i - mean(r))`.

    Back to Basics, arXiv:2402.14740, equation 8. Needs groups. Raises BatchError for malformed inputs.
    """
    scores = _scores(inputs, config)
    size = scores.group_size()
    return _spread(scores, size / (size - 1).clamp(min=1) * (scores.values - scores.group_mean()))


def reinforce_plus_plus(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutput:
    """Discounted return-to-go of each token, `G_t = r_t + gamma * G_(t+1)`, whitened over the training batch.

    REINFORCE++, arXiv:2501.03262; its KL penalty per token is `kl_reward_coef`. Time runs over a trajectory's trained
    tokens, across turns. Needs neither groups nor values. Raises BatchError for malformed inputs.
    """
    check_advantage_inputs(inputs)
    actions = actions_of(inputs)
    returns = actions.scatter(discounted_suffix_sum(actions.rewards, actions.trajectory, config.gamma), inputs.rewards)
    trained = inputs.loss_mask & ~inputs.is_padding.unsqueeze(1)
    return AdvantageOutput(advantages=returns, returns=returns, whiten_over_batch=trained)


def reinforce_plus_plus_baseline(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutput:
    """`r_i - mean(r)` within the prompt, then whitened over the training batch.

    REINFORCE++-baseline, arXiv:2501.03262. Trajectories whose group is of one, or of equal scores, count in the
    batch's mean and deviation but keep their 0, which whitening would otherwise shift (in verl it does).
    Needs groups. Raises BatchError for malformed inputs.
    """
    scores = _scores(inputs, config)
    output = _spread(scores, scores.values - scores.group_mean())
    return AdvantageOutput(
        advantages=output.advantages, returns=output.returns, whiten_over_batch=scores.differs_at_tokens()
    )


def maxrl(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutput:
    """`(r_i - mean(r)) / mean(r)`: normalised by the success rate, so that hard prompts weigh more.

    Maximum Likelihood Reinforcement Learning, arXiv:2602.02710, stated there for rewards of 0 and 1; a group without a
    success gives 0. TRL adds an epsilon to the mean. Needs groups, and scores that are not negative, since a mean near
    0 would then weigh without bound. Raises BatchError for malformed inputs and for a negative score.
    """
    scores = _scores(inputs, config)
    if bool((scores.values < 0).any()):
        lowest = float(scores.values.min())
        raise BatchError(f"maxrl needs scores of at least 0; one is {lowest:g}. Choose another advantage_estimator")
    mean = scores.group_mean()
    return _spread(scores, (scores.values - mean) / torch.where(mean > 0, mean, 1.0))


def opo(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutput:
    """`r_i - sum_j(l_j * r_j) / sum_j(l_j)` with `l_j` the number of sampled tokens.

    On-Policy RL with Optimal Reward Baseline, arXiv:2505.23585: the variance-optimal baseline where the squared norm of
    a trajectory's gradient grows with its length. Needs groups. Raises BatchError for malformed inputs.
    """
    scores = _scores(inputs, config)
    total = scores.per_group(scores.num_tokens)
    baseline = scores.per_group(scores.num_tokens * scores.values) / total.clamp(min=1)
    return _spread(scores, scores.values - baseline)


def on_policy_distillation(inputs: AdvantageInputs, _config: AlgorithmConfig) -> AdvantageOutput:
    """`A_t = teacher_logprob_t - policy_logprob_t`: the negative reverse KL of each sampled token, without discount.

    The policy samples, the reference model is the teacher; with `policy_loss=importance_sampling` the gradient is that
    of `KL(policy || teacher)` token by token. MiniLLM, arXiv:2306.08543, and On-Policy Distillation of Language Models
    (GKD), arXiv:2306.13649, optimise the same divergence. Rewards are not used; returns are the trajectory's rewards.
    Needs old and reference log-probabilities. Raises BatchError for malformed inputs.
    """
    scores = score(inputs, step_rewards="outcome", gamma=1.0)
    teacher, policy = needed("ref_logprobs", inputs.ref_logprobs), needed("old_logprobs", inputs.old_logprobs)
    difference = teacher.double() - policy.double()
    return AdvantageOutput(
        advantages=torch.where(scores.trained, difference, 0.0).to(inputs.rewards.dtype),
        returns=scores.to_tokens(scores.values),
    )


def _scores(inputs: AdvantageInputs, config: AlgorithmConfig) -> Scores:
    return score(inputs, step_rewards=config.step_rewards, gamma=config.gamma)


def _spread(scores: Scores, advantages: Tensor) -> AdvantageOutput:
    """Unit advantages to tokens, exactly 0 where a group has no two different scores."""
    kept = torch.where(scores.differs(), advantages, 0.0)
    return AdvantageOutput(advantages=scores.to_tokens(kept), returns=scores.to_tokens(scores.values))
