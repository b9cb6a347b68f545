"""The trained tokens of each trajectory as one sequence of actions, whether it is one row or one row per turn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_train.algorithms.inputs import AdvantageInputs
from skyrl_train.algorithms.losses.checks import describe_row
from skyrl_train.errors import BatchError


@dataclass(frozen=True, kw_only=True)
class Actions:
    """Trained tokens, trajectory after trajectory, in the order in which they were sampled."""

    index: Tensor
    """`[actions]` int64: `row * len + position` of each."""
    trajectory: Tensor
    """`[actions]` int64: equal within a trajectory."""
    rewards: Tensor
    """`[actions]` float64: rewards since this action and before the next."""

    def gather(self, column: Tensor) -> Tensor:
        """Take the actions from a column: `[rows, len]` to `[actions]` float64."""
        return column.flatten().index_select(0, self.index).double()

    def scatter(self, values: Tensor, like: Tensor) -> Tensor:
        """Put actions into a column: `[actions]` to a new `[rows, len]` of the shape and dtype of `like`, 0 elsewhere."""
        result = torch.zeros_like(like).flatten()
        return result.index_copy_(0, self.index, values.to(like.dtype)).view(like.shape)


def ordered_rows(inputs: AdvantageInputs) -> Tensor:
    """Return the indices of the rows that are not padding, by trajectory and step.

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
    """Return the actions of checked inputs.

    A reward belongs to the last action at or before it (observation tokens are no actions), or to the trajectory's
    first action where none is before it, so that none is lost; a trajectory without actions has nothing to credit.
    Raises BatchError as `ordered_rows` does.
    """
    rows = ordered_rows(inputs)
    mask = inputs.loss_mask[rows]
    width = max(mask.shape[1], 1)
    position = mask.flatten().nonzero().squeeze(1)
    row = torch.div(position, width, rounding_mode="floor")
    trajectory = torch.unique(inputs.trajectory_index[rows], return_inverse=True)[1]
    rewards = torch.zeros(len(position), dtype=torch.float64, device=mask.device)
    if len(position):
        counts = torch.bincount(trajectory, weights=mask.sum(1).double()).long()
        first = counts.cumsum(0) - counts
        given = inputs.rewards[rows].flatten()
        credited = (given != 0).nonzero().squeeze(1)
        its_trajectory = trajectory[torch.div(credited, width, rounding_mode="floor")]
        action = torch.maximum(mask.flatten().cumsum(0)[credited] - 1, first[its_trajectory])
        has_action = counts[its_trajectory] > 0
        rewards.index_add_(0, action[has_action], given[credited][has_action].double())
    return Actions(index=position + (rows[row] - row) * width, trajectory=trajectory[row], rewards=rewards)


def position_in_segment(segment: Tensor) -> Tensor:
    """Return 0, 1, 2, ... within each run of equal numbers: `[7, 7, 9]` gives `[0, 1, 0]`."""
    index = torch.arange(len(segment), device=segment.device)
    if len(segment) == 0:
        return index
    starts = torch.ones_like(segment, dtype=torch.bool)
    starts[1:] = segment[1:] != segment[:-1]
    return index - torch.where(starts, index, 0).cummax(0).values


def next_in_segment(values: Tensor, segment: Tensor) -> Tensor:
    """Return each element's successor within its run of equal numbers in `segment`, 0 at the end of a run; both `[n]`."""
    result = torch.zeros_like(values)
    if len(values) > 1:
        result[:-1] = torch.where(segment[1:] == segment[:-1], values[1:], 0.0)
    return result


BLOCK = 64
"""Elements that `discounted_suffix_sum` adds up one after the other; blocks run side by side."""


def discounted_suffix_sum(values: Tensor, segment: Tensor, factor: float) -> Tensor:
    """`y_t = x_t + factor * y_(t+1)` within each run of equal numbers in `segment`; both `[n]`.

    Each run is cut into blocks of 64, which are summed side by side; their totals are then carried from block to block
    by doubling, and each element gets what its block is followed by.
    """
    if len(values) == 0:
        return values.clone()
    slot = position_in_segment(segment) % BLOCK
    first = slot == 0
    block = first.cumsum(0) - 1
    num_blocks = int(block[-1]) + 1
    # Blocks lie side by side as columns, so that one addition per slot serves all blocks of all runs.
    position = slot * num_blocks + block
    sums = values.new_zeros(BLOCK * num_blocks).index_copy_(0, position, values).view(BLOCK, num_blocks)
    for row in reversed(range(BLOCK - 1)):
        sums[row] += factor * sums[row + 1]
    # Row 0 now holds each block's total. A run's blocks follow one another, so that the same sum over totals, with the
    # discount of a whole block, says what comes after each.
    block_segment = segment[first]
    following = next_in_segment(_doubled(sums[0], block_segment, factor**BLOCK), block_segment)
    # An element in slot s is `BLOCK - s` steps away from what follows its block.
    powers = factor ** torch.arange(BLOCK, 0, -1, dtype=values.dtype, device=values.device)
    return torch.addcmul(sums, powers.unsqueeze(1), following).flatten().index_select(0, position)


def _doubled(values: Tensor, segment: Tensor, factor: float) -> Tensor:
    """Return the same sum as `discounted_suffix_sum`; after step k, `y_t` covers `2^k` terms."""
    result, stride = values.clone(), 1
    longest = int(position_in_segment(segment).max()) + 1
    while stride < longest:
        # Every `y_t` covers `stride` terms: adding the one that starts where they end doubles that.
        shifted = torch.where(segment[stride:] == segment[:-stride], result[stride:], 0.0)
        result[:-stride] += factor**stride * shifted
        stride *= 2
    return result
