"""Advantages, losses, KL: each a function of padded `[rows, length]` columns, or of anything shaped like them."""

import torch

from skyrl_train.algorithms import AdvantageOutput
from skyrl_train.algorithms.losses import PolicyLossOutput
from skyrl_train.registry import reads


@reads("old_logprobs", "ref_logprobs", whole_groups=True)
def centred(inputs, config, *, toward_reference=0.0):
    """Reward of the trajectory minus the mean over the prompt's trajectories, for each trained token; and a pull toward
    the reference."""
    live = ~inputs.is_padding
    row_rewards = inputs.rewards.sum(dim=1)
    advantages = torch.zeros_like(inputs.rewards)
    for prompt in inputs.prompt_index[live].unique():
        rows = live & (inputs.prompt_index == prompt)
        trajectories, number = inputs.trajectory_index[rows].unique(return_inverse=True)
        rewards = torch.zeros(len(trajectories), dtype=row_rewards.dtype).index_add_(0, number, row_rewards[rows])
        advantages[rows] = (rewards - rewards.mean())[number].unsqueeze(1).expand_as(advantages[rows])
    advantages += toward_reference * (inputs.ref_logprobs - inputs.old_logprobs)
    advantages = torch.where(inputs.loss_mask & live.unsqueeze(1), advantages, 0.0)
    return AdvantageOutput(advantages=advantages, returns=advantages)


@reads("advantages", "old_logprobs", "values", tokenwise=True)
def unclipped(inputs, config, *, confidence=0.0):
    """Importance-weighted policy gradient without a clip; tokens of high value count more."""
    log_ratio = torch.where(inputs.loss_mask, inputs.logprobs - inputs.old_logprobs, 0.0)
    weight = 1.0 + confidence * torch.where(inputs.loss_mask, inputs.values, 0.0)
    token_losses = -weight * log_ratio.exp() * torch.where(inputs.loss_mask, inputs.advantages, 0.0)
    return PolicyLossOutput(token_losses=torch.where(inputs.loss_mask, token_losses, 0.0))


def huber(inputs, config, *, delta=1.0):
    """The critic's loss, linear where a value is far off."""
    error = torch.where(inputs.loss_mask, inputs.values - inputs.returns, 0.0)
    near, far = 0.5 * error.square(), delta * (error.abs() - 0.5 * delta)
    return PolicyLossOutput(token_losses=torch.where(error.abs() <= delta, near, far))


def scaled_square(logprobs, ref_logprobs, *, scale=0.5):
    """An estimator of the KL divergence per token; positions that do not count are 0 in both."""
    return scale * (logprobs - ref_logprobs).square()


def root_length(counts, *, power=0.5):
    """A loss reduction: the weight of each token of a row. Long trajectories weigh more than short ones, but less than in
    proportion."""
    return counts.trajectory_tokens**-power / counts.denominators.num_sequences
