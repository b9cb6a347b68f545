"""The trained tokens of each trajectory as one sequence of actions, whether it is one row or one row per turn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_train.algorithms.checks import describe_row
from skyrl_train.algorithms.inputs import AdvantageInputs
from skyrl_train.errors import BatchError


@dataclass(frozen=True, kw_only=True)
class Actions:
    """Trained tokens, trajectory after trajectory, in the order in which they were sampled."""

    rows: Tensor
    """`[actions]` int64: row of each, and its position there."""
    positions: Tensor
    trajectory: Tensor
    """`[actions]` int64: equal within a trajectory."""
    rewards: Tensor
    """`[actions]` float64: rewards since this action and before the next."""

    def gather(self, column: Tensor) -> Tensor:
        """`[rows, len]` to `[actions]` float64."""
        return column[self.rows, self.positions].double()

    def scatter(self, values: Tensor, like: Tensor) -> Tensor:
        """`[actions]` to a new `[rows, len]` of the shape and dtype of `like`, 0 elsewhere."""
        result = torch.zeros_like(like)
        result[self.rows, self.positions] = values.to(like.dtype)
        return result


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
    _refuse(inputs, rows[1:][same & (step[1:] == step[:-1])], "is in the batch twice: a step has one row")
    prompt = inputs.prompt_index[rows]
    _refuse(inputs, rows[1:][same & (prompt[1:] != prompt[:-1])], "belongs to another prompt than the row before it")
    ends = torch.cat([~same, same.new_ones(1)])
    _refuse(
        inputs,
        rows[ends & ~inputs.is_last_step[rows]],
        "is the last row of its trajectory here but is not marked is_last_step; all its rows are needed together",
    )
    return rows


def _refuse(inputs: AdvantageInputs, rows: Tensor, why: str) -> None:
    if rows.numel():
        raise BatchError(f"{describe_row(inputs, int(rows[0]))} {why}")


def actions_of(inputs: AdvantageInputs) -> Actions:
    """The actions of checked inputs.

    A reward belongs to the last action at or before it (observation tokens are no actions), or to the trajectory's
    first action where none is before it, so that none is lost; a trajectory without actions has nothing to credit.
    Raises BatchError as `ordered_rows` does.
    """
    rows = ordered_rows(inputs)
    mask = inputs.loss_mask[rows]
    width = mask.shape[1]
    row_of_action, positions = mask.nonzero(as_tuple=True)
    trajectory = torch.unique(inputs.trajectory_index[rows], return_inverse=True)[1]
    num_actions = len(row_of_action)
    rewards = torch.zeros(num_actions, dtype=torch.float64, device=mask.device)
    if num_actions:
        counts = torch.bincount(trajectory, weights=mask.sum(1).double()).long()
        first = (counts.cumsum(0) - counts)[trajectory].unsqueeze(1)
        action = torch.maximum(mask.flatten().cumsum(0).view(-1, width) - 1, first)
        credited = (counts[trajectory] > 0).unsqueeze(1).expand(mask.shape)
        rewards.index_add_(0, action[credited], inputs.rewards[rows].double()[credited])
    return Actions(
        rows=rows[row_of_action],
        positions=positions,
        trajectory=trajectory[row_of_action],
        rewards=rewards,
    )


def position_in_segment(segment: Tensor) -> Tensor:
    """0, 1, 2, ... within each run of equal numbers: `[7, 7, 9]` gives `[0, 1, 0]`."""
    index = torch.arange(len(segment), device=segment.device)
    if len(segment) == 0:
        return index
    starts = torch.ones_like(segment, dtype=torch.bool)
    starts[1:] = segment[1:] != segment[:-1]
    return index - torch.where(starts, index, 0).cummax(0).values


def next_in_segment(values: Tensor, segment: Tensor) -> Tensor:
    """Each element's successor within its run of equal numbers in `segment`, 0 at the end of a run; both `[n]`."""
    result = torch.zeros_like(values)
    if len(values) > 1:
        result[:-1] = torch.where(segment[1:] == segment[:-1], values[1:], 0.0)
    return result


def discounted_suffix_sum(values: Tensor, segment: Tensor, factor: float) -> Tensor:
    """`y_t = x_t + factor * y_(t+1)` within each run of equal numbers in `segment`; both `[n]`.

    By doubling: after step k, `y_t` covers `2^k` terms, so a segment of n takes log2(n) vector operations.
    """
    result, stride = values.clone(), 1
    longest = int(position_in_segment(segment).max()) + 1 if len(values) else 0
    while stride < longest:
        shifted = torch.where(segment[stride:] == segment[:-stride], result[stride:], 0.0)
        result = torch.cat([result[:-stride] + factor**stride * shifted, result[-stride:]])
        stride *= 2
    return result
