"""Trajectories, turns and the groups they are compared in, found from the columns of a batch.

A turn is a maximal run of trained tokens in a row, so that a trajectory kept in one row and the same trajectory with
one row per turn have the same turns. Turns are ordered by trajectory, then by step, then by position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from skyrl_train.algorithms.checks import check_advantage_inputs, describe_row
from skyrl_train.algorithms.inputs import AdvantageInputs
from skyrl_train.algorithms.reduce import rounding_tolerance
from skyrl_train.errors import BatchError


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What is compared: one score per unit (a trajectory, or a turn), each unit in one group."""

    values: Tensor
    """`[units]` float64."""
    group: Tensor
    """`[units]` int64, 0 .. groups - 1."""
    num_tokens: Tensor
    """`[units]` float64: trained tokens."""
    magnitude: Tensor
    """`[units]` float64: sum of absolute rewards behind the score, against which rounding is judged."""
    unit_of_token: Tensor
    """`[rows, len]` int64: the unit of a trained token; meaningless elsewhere."""
    trained: Tensor
    """`[rows, len]` bool: trained tokens of rows that are not padding."""
    reward_dtype: torch.dtype

    def per_group(self, values: Tensor) -> Tensor:
        """Sum of a unit quantity over each unit's group, given back per unit."""
        return group_sum(values, self.group)[self.group]

    def group_size(self) -> Tensor:
        """`[units]` float64."""
        return self.per_group(torch.ones_like(self.values))

    def differs(self) -> Tensor:
        """`[units]` bool: the unit's group has at least two units whose scores differ by more than rounding."""
        num_groups = int(self.group.max()) + 1 if self.group.numel() else 0
        empty = self.values.new_zeros(num_groups)
        highest = empty.scatter_reduce(0, self.group, self.values, "amax", include_self=False)
        lowest = empty.scatter_reduce(0, self.group, self.values, "amin", include_self=False)
        magnitude = empty.scatter_reduce(0, self.group, self.magnitude, "amax", include_self=False)
        return ((highest - lowest) > rounding_tolerance(magnitude, self.reward_dtype))[self.group]

    def to_tokens(self, unit_values: Tensor) -> Tensor:
        """`[rows, len]` in the rewards' dtype: each trained token gets its unit's value, others 0."""
        if unit_values.numel() == 0:
            return torch.zeros_like(self.trained, dtype=self.reward_dtype)
        return torch.where(self.trained, unit_values[self.unit_of_token], 0.0).to(self.reward_dtype)


def group_sum(values: Tensor, group: Tensor) -> Tensor:
    """`[groups]`: sum of `values` `[units]` by group."""
    num_groups = int(group.max()) + 1 if group.numel() else 0
    return values.new_zeros(num_groups).index_add(0, group, values)


def ordered_rows(inputs: AdvantageInputs) -> Tensor:
    """Indices of the rows that are not padding, by trajectory and step.

    Raises BatchError where a trajectory belongs to two prompts, has one step twice, or lacks its last step.
    """
    rows = (~inputs.is_padding).nonzero().squeeze(1)
    rows = rows[torch.argsort(inputs.step_index[rows], stable=True)]
    rows = rows[torch.argsort(inputs.trajectory_index[rows], stable=True)]
    if rows.numel() == 0:
        return rows
    trajectory, step = inputs.trajectory_index[rows], inputs.step_index[rows]
    same = trajectory[1:] == trajectory[:-1]
    twice = same & (step[1:] == step[:-1])
    if bool(twice.any()):
        row = int(rows[1:][twice][0])
        raise BatchError(f"{describe_row(inputs, row)} is in the batch twice: a step of a trajectory has one row")
    prompt = inputs.prompt_index[rows]
    strayed = same & (prompt[1:] != prompt[:-1])
    if bool(strayed.any()):
        row = int(rows[1:][strayed][0])
        raise BatchError(f"{describe_row(inputs, row)}: the trajectory's other rows belong to another prompt")
    ends = torch.cat([~same, same.new_ones(1)])
    unfinished = ends & ~inputs.is_last_step[rows]
    if bool(unfinished.any()):
        row = int(rows[unfinished][0])
        raise BatchError(
            f"{describe_row(inputs, row)} is the last row of its trajectory here but is not marked is_last_step:"
            " advantages need all rows of a trajectory together"
        )
    return rows


def score(inputs: AdvantageInputs, *, step_rewards: Literal["outcome", "turn_return"], gamma: float) -> Scores:
    """The scores that a group-relative estimator compares.

    outcome: one unit per trajectory, its score the sum of all its rewards; groups are prompts.
    turn_return: one unit per turn, its score `G_k = sum_{j >= k} gamma^(j - k) * reward_j`; groups are the k-th turns
    of a prompt's trajectories. No reward is dropped: one outside the trained tokens counts for the turn before it.

    Raises BatchError for malformed inputs.
    """
    check_advantage_inputs(inputs)
    rows = ordered_rows(inputs)
    mask = inputs.loss_mask[rows]
    starts = mask.clone()
    starts[:, 1:] &= ~mask[:, :-1]
    run = starts.cumsum(1)
    turns_per_row = run[:, -1].clamp(min=1) if mask.shape[1] else run.new_ones(len(rows))
    first_turn = turns_per_row.cumsum(0) - turns_per_row
    turn_of_token = first_turn.unsqueeze(1) + (run - 1).clamp(min=0)
    num_turns = int(turns_per_row.sum())
    rewards = inputs.rewards[rows].double()

    def per_turn(values: Tensor) -> Tensor:
        return values.new_zeros(num_turns).index_add(0, turn_of_token.flatten(), values.flatten())

    reward, magnitude, num_tokens = per_turn(rewards), per_turn(rewards.abs()), per_turn(mask.double())
    row_of_turn = torch.repeat_interleave(torch.arange(len(rows)), turns_per_row)
    trajectory = torch.unique(inputs.trajectory_index[rows][row_of_turn], return_inverse=True)[1]
    prompt = torch.unique(inputs.prompt_index[rows][row_of_turn], return_inverse=True)[1]
    unit_of_token = torch.zeros(inputs.loss_mask.shape, dtype=torch.int64)
    if step_rewards == "outcome":
        unit_of_token[rows] = trajectory[turn_of_token]
        prompt_of_trajectory = prompt.new_zeros(int(trajectory.max()) + 1 if num_turns else 0)
        prompt_of_trajectory[trajectory] = prompt
        values, group = group_sum(reward, trajectory), prompt_of_trajectory
        magnitude, num_tokens = group_sum(magnitude, trajectory), group_sum(num_tokens, trajectory)
    else:
        unit_of_token[rows] = turn_of_token
        values = discounted_suffix_sum(reward, trajectory, gamma)
        magnitude = discounted_suffix_sum(magnitude, trajectory, gamma)
        group = torch.unique(torch.stack([prompt, position_in_segment(trajectory)]), dim=1, return_inverse=True)[1]
    return Scores(
        values=values,
        group=group,
        num_tokens=num_tokens,
        magnitude=magnitude,
        unit_of_token=unit_of_token,
        trained=inputs.loss_mask & ~inputs.is_padding.unsqueeze(1),
        reward_dtype=inputs.rewards.dtype,
    )


def position_in_segment(segment: Tensor) -> Tensor:
    """0, 1, 2, ... within each run of equal numbers: `[7, 7, 9]` gives `[0, 1, 0]`."""
    index = torch.arange(len(segment))
    starts = torch.ones_like(segment, dtype=torch.bool)
    starts[1:] = segment[1:] != segment[:-1]
    return index - torch.where(starts, index, 0).cummax(0).values if len(segment) else index


def discounted_suffix_sum(values: Tensor, segment: Tensor, factor: float) -> Tensor:
    """`y_t = x_t + factor * y_(t+1)` within each run of equal numbers in `segment`; both `[n]`.

    By doubling: after step k, `y_t` covers `2^k` terms, so a segment of n takes log2(n) vector operations.
    """
    result, segment_length, stride = values.clone(), 0, 1
    if len(values):
        segment_length = int(position_in_segment(segment).max()) + 1
    while stride < segment_length:
        within = segment[stride:] == segment[:-stride]
        shifted = torch.where(within, result[stride:], 0.0)
        result = torch.cat([result[:-stride] + factor**stride * shifted, result[-stride:]])
        stride *= 2
    return result
