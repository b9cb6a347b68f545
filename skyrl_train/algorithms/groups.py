"""Scores of trajectories or turns, and the groups in which they are compared.

A turn is a maximal run of tokens in a row that the policy sampled, trained or not, so that a trajectory kept in one row
and the same trajectory with one row per turn have the same turns. Turns are ordered by trajectory, then by step, then by
position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from skyrl_train.algorithms.inputs import AdvantageInputs
from skyrl_train.algorithms.losses.checks import check_advantage_inputs
from skyrl_train.algorithms.sequences import discounted_suffix_sum, ordered_rows, position_in_segment
from skyrl_train.batch import rounding_tolerance


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What is compared: one score per unit (a trajectory, or a turn), each unit in one group."""

    values: Tensor
    """`[units]` float64: the score of each."""
    group: Tensor
    """`[units]` int64, 0 .. groups - 1."""
    num_tokens: Tensor
    """`[units]` float64: tokens that the policy sampled."""
    magnitude: Tensor
    """`[units]` float64: sum of absolute rewards behind the score, against which rounding is measured."""
    unit_of_token: Tensor
    """`[rows, len]` int64: the unit of a sampled token; meaningless elsewhere."""
    trained: Tensor
    """`[rows, len]` bool: trained tokens of rows that are not padding."""
    reward_dtype: torch.dtype

    def per_group(self, values: Tensor) -> Tensor:
        """Return the sum of a quantity of units over each unit's group, for each unit."""
        return sum_by(values, self.group)[self.group]

    def group_size(self) -> Tensor:
        """Return `[units]` float64: how many units each unit's group has."""
        return self.per_group(torch.ones_like(self.values))

    def group_mean(self) -> Tensor:
        """Return `[units]` float64: the mean score of each unit's group."""
        return self.per_group(self.values) / self.group_size()

    def deviation(self) -> Tensor:
        """Return `[units]` float64: the sample deviation (n - 1) of each unit's group; 1 where its scores do not differ."""
        centred = self.values - self.group_mean()
        variance = self.per_group(centred.square()) / (self.group_size() - 1).clamp(min=1)
        return torch.where(self.differs(), variance, 1.0).sqrt()

    def differs(self) -> Tensor:
        """Return `[units]` bool: whether the unit's group has at least two units whose scores differ by more than rounding.

        Rounding is that of the rewards' own dtype: 0.1 + 0.2 in one trajectory equals 0.3 in another.
        """
        num_groups = int(self.group.max()) + 1 if self.group.numel() else 0
        empty = self.values.new_zeros(num_groups)
        highest = empty.scatter_reduce(0, self.group, self.values, "amax", include_self=False)
        lowest = empty.scatter_reduce(0, self.group, self.values, "amin", include_self=False)
        magnitude = empty.scatter_reduce(0, self.group, self.magnitude, "amax", include_self=False)
        return ((highest - lowest) > rounding_tolerance(magnitude, self.reward_dtype))[self.group]

    def to_tokens(self, unit_values: Tensor) -> Tensor:
        """Return `[rows, len]` in the rewards' dtype: each trained token gets its unit's value, others 0."""
        if unit_values.numel() == 0:
            return torch.zeros_like(self.trained, dtype=self.reward_dtype)
        return torch.where(self.trained, unit_values.to(self.reward_dtype)[self.unit_of_token], 0.0)

    def differs_at_tokens(self) -> Tensor:
        """Return `[rows, len]` bool: trained tokens whose group differs."""
        if self.values.numel() == 0:
            return torch.zeros_like(self.trained)
        return self.trained & self.differs()[self.unit_of_token]


def sum_by(values: Tensor, index: Tensor) -> Tensor:
    """Return `[highest index + 1]`: sums of `values` `[n]` with equal `index` `[n]`."""
    size = int(index.max()) + 1 if index.numel() else 0
    return values.new_zeros(size).index_add(0, index, values)


@dataclass(frozen=True, kw_only=True)
class _Turns:
    of_token: Tensor
    """`[rows, len]` int64, of the ordered rows."""
    reward: Tensor
    magnitude: Tensor
    num_tokens: Tensor
    trajectory: Tensor
    """The rest `[turns]`; trajectories and prompts are numbered from 0."""
    prompt: Tensor


def _turns(inputs: AdvantageInputs, rows: Tensor) -> _Turns:
    """A row without a sampled token is one empty turn, whose reward still counts."""
    mask = inputs.responses[rows]
    starts = mask.clone()
    starts[:, 1:] &= ~mask[:, :-1]
    # At least one, so that a row whose tokens were all observed is still a turn with a reward.
    per_row = starts.sum(1).clamp(min=1)
    of_token = (per_row.cumsum(0) - per_row).unsqueeze(1) + (starts.cumsum(1) - 1).clamp(min=0)
    num_turns = int(per_row.sum())
    reward, magnitude = torch.zeros(2, num_turns, dtype=torch.float64, device=mask.device)
    rewards = inputs.rewards[rows]
    given = rewards != 0
    reward.index_add_(0, of_token[given], rewards[given].double())
    magnitude.index_add_(0, of_token[given], rewards[given].double().abs())
    num_tokens = torch.zeros_like(reward)
    if mask.any():
        first = starts.flatten().nonzero().squeeze(1)
        tokens_before = mask.flatten().cumsum(0)[first] - 1
        length = torch.cat([tokens_before[1:], mask.sum().unsqueeze(0)]) - tokens_before
        num_tokens[of_token.flatten()[first]] = length.double()
    row_of_turn = torch.repeat_interleave(rows, per_row)
    return _Turns(
        of_token=of_token,
        reward=reward,
        magnitude=magnitude,
        num_tokens=num_tokens,
        trajectory=torch.unique(inputs.trajectory_index[row_of_turn], return_inverse=True)[1],
        prompt=torch.unique(inputs.prompt_index[row_of_turn], return_inverse=True)[1],
    )


def score(inputs: AdvantageInputs, *, step_rewards: Literal["outcome", "turn_return"], gamma: float) -> Scores:
    """Return the scores that a group-relative estimator compares.

    outcome: one unit per trajectory, its score the sum of all its rewards; groups are prompts.
    turn_return: one unit per turn, its score `G_k = sum_{j >= k} gamma^(j - k) * reward_j`; groups are the k-th turns
    of a prompt's trajectories. No reward is dropped: one outside the sampled tokens counts for the turn before it.

    Raises BatchError for malformed inputs.
    """
    check_advantage_inputs(inputs)
    rows = ordered_rows(inputs)
    turns = _turns(inputs, rows)
    unit_of_token = torch.zeros(inputs.loss_mask.shape, dtype=torch.int64, device=inputs.loss_mask.device)
    if step_rewards == "outcome":
        unit_of_token[rows] = turns.trajectory[turns.of_token]
        values, magnitude = sum_by(turns.reward, turns.trajectory), sum_by(turns.magnitude, turns.trajectory)
        num_tokens = sum_by(turns.num_tokens, turns.trajectory)
        group = turns.prompt.new_zeros(len(values))
        group[turns.trajectory] = turns.prompt
    else:
        unit_of_token[rows] = turns.of_token
        values = discounted_suffix_sum(turns.reward, turns.trajectory, gamma)
        magnitude = discounted_suffix_sum(turns.magnitude, turns.trajectory, gamma)
        num_tokens = turns.num_tokens
        key = torch.stack([turns.prompt, position_in_segment(turns.trajectory)])
        group = torch.unique(key, dim=1, return_inverse=True)[1]
    return Scores(
        values=values,
        group=group,
        num_tokens=num_tokens,
        magnitude=magnitude,
        unit_of_token=unit_of_token,
        trained=inputs.loss_mask & ~inputs.is_padding.unsqueeze(1),
        reward_dtype=inputs.rewards.dtype,
    )
