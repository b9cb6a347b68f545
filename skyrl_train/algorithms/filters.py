"""Which rollouts are trained on, and rewards of those that were cut off: whole trajectories, step-wise or not.

Order: `shape_rewards` on the rollouts, dynamic sampling (`dynamic_sampling.py`), assembly, `mask_rows` on the batch,
`with_sample_counts` on the batch with its advantages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from skyrl_train.algorithms.estimate import advantage_inputs, groups_of_whole_prompts
from skyrl_train.algorithms.groups import score
from skyrl_train.batch import TrainingInputBatch, rounding_tolerance
from skyrl_train.config.algorithm import AlgorithmConfig, FilterConfig
from skyrl_train.errors import BatchError
from skyrl_train.parts import ROLLOUT_FILTERS
from skyrl_train.registry import PartSpec, part_name
from skyrl_train.system import derive_seed
from skyrl_train.types import Outcome, RolloutBatch, StopReason, Trajectory, Turn


def is_cut_off(trajectory: Trajectory) -> bool:
    """Whether a length limit ended the trajectory: its last response stopped at its length, or the context is full."""
    if trajectory.failed or not trajectory.turns:
        return False
    return trajectory.turns[-1].stop_reason is StopReason.LENGTH or trajectory.outcome is Outcome.CONTEXT_FULL


def longest_response(trajectory: Trajectory) -> int:
    """Return the number of tokens of its longest turn: the length limit is one of turns."""
    return max((turn.num_response_tokens for turn in trajectory.turns), default=0)


def soft_overlong_penalty(num_tokens: int, config: FilterConfig) -> float:
    """0 up to the soft zone, then falling linearly to `-overlong_penalty` at `overlong_max_length`, and that beyond.

    DAPO, arXiv:2503.14476, equation 13, whose soft zone is the last fifth (4,096 of 20,480 tokens), penalty 1.
    """
    zone = config.overlong_soft_share * config.overlong_max_length
    if zone == 0:
        return 0.0
    overshoot = num_tokens - (config.overlong_max_length - zone)
    return -config.overlong_penalty * min(max(overshoot / zone, 0.0), 1.0)


def shape_rewards(rollouts: RolloutBatch, config: FilterConfig) -> RolloutBatch:
    """Return rollouts with changed turn rewards; failed trajectories stay as they are.

    `zero_reward_on_non_stop`, `non_stop_scale`, `non_stop_penalty`: where a trajectory's last response did not end by itself
    (`stop_reason` is not `stop`) all its rewards become 0, or are multiplied, and its last turn's gets the penalty
    (ProRL, arXiv:2505.24864; OpenRLHF's `stop_properly_penalty_coef`). `overlong_soft_share`: the soft penalty for the
    longest turn is then added to the last turn's reward. `reward_clip_low` and `_high` bound the total last.
    """
    shaped = tuple(_shape(trajectory, config) for trajectory in rollouts.trajectories)
    return rollouts if shaped == rollouts.trajectories else replace(rollouts, trajectories=shaped)


def _shape(trajectory: Trajectory, config: FilterConfig) -> Trajectory:
    if trajectory.failed or not trajectory.turns:
        return trajectory
    turns = list(trajectory.turns)
    if turns[-1].stop_reason is not StopReason.STOP:
        scale = 0.0 if config.zero_reward_on_non_stop else config.non_stop_scale
        turns = turns if scale == 1 else [turn.with_reward(scale * turn.reward) for turn in turns]
        turns[-1] = _plus(turns[-1], -config.non_stop_penalty)
    turns[-1] = _plus(turns[-1], soft_overlong_penalty(longest_response(trajectory), config))
    total = sum(turn.reward for turn in turns)
    low, high = config.reward_clip_low, config.reward_clip_high
    bounded = min(max(total, -math.inf if low is None else low), math.inf if high is None else high)
    if bounded != total:
        turns[-1] = _plus(turns[-1], bounded - total)
    same = all(one is other for one, other in zip(turns, trajectory.turns))
    return trajectory if same else replace(trajectory, turns=tuple(turns))


def _plus(turn: Turn, reward: float) -> Turn:
    return turn.with_reward(turn.reward + reward) if reward else turn


def differing_prompts(rollouts: RolloutBatch) -> tuple[bool, ...]:
    """Return, for each prompt, whether two of its trajectories that did not fail have rewards that differ by more than
    rounding.

    Differences within rounding count as for the advantages, which see float32 rewards: what is equal there is equal here.
    """
    found = []
    for index in range(len(rollouts.prompts)):
        start = index * rollouts.n_samples_per_prompt
        group = [t for t in rollouts.trajectories[start : start + rollouts.n_samples_per_prompt] if not t.failed]
        rewards = [trajectory.reward for trajectory in group]
        size = max((sum(abs(turn.reward) for turn in trajectory.turns) for trajectory in group), default=0.0)
        tolerance = float(rounding_tolerance(torch.tensor(size, dtype=torch.float64), torch.float32))
        found.append(len(rewards) > 1 and max(rewards) - min(rewards) > tolerance)
    return tuple(found)


def mask_rows(batch: TrainingInputBatch, rollouts: RolloutBatch, config: AlgorithmConfig) -> TrainingInputBatch:
    """Return the batch assembled from `rollouts`, with `loss_mask` False on the trajectories that the filters leave out.

    `overlong`: trajectories that a length limit cut off (DAPO, arXiv:2503.14476, section 3.4); their rewards still
    count in their group. `zero_variance`: prompts whose trajectories all have the same outcome. Done before
    mini-batches are closed, so what is left out is in no denominator. What the policy sampled stays in `response_mask`, by
    which turns are found. Raises BatchError where the batch is not of these rollouts.
    """
    left_out = torch.zeros(batch.num_rows, dtype=torch.bool)
    if config.filters.overlong:
        left_out |= _rows_of(batch, [is_cut_off(trajectory) for trajectory in rollouts.trajectories])
    if config.filters.zero_variance:
        left_out |= zero_variance_rows(batch, config)
    for spec in config.filters.keep:
        left_out |= _rows_of(batch, _left_out_by(spec, rollouts))
    if not bool(left_out.any()):
        return batch
    loss_mask = batch["loss_mask"]
    trained = loss_mask & ~torch.repeat_interleave(left_out, batch.lengths)
    if "response_mask" in batch:
        return batch.with_columns(loss_mask=trained)
    return batch.with_columns(loss_mask=trained, response_mask=loss_mask)


def _left_out_by(spec: PartSpec, rollouts: RolloutBatch) -> list[bool]:
    """Whether a filter leaves each trajectory out. Raises BatchError where a custom one does not answer for each of them."""
    keeps = list(ROLLOUT_FILTERS.resolve(spec)(rollouts))
    if len(keeps) != len(rollouts.trajectories) or not all(isinstance(keep, bool) for keep in keeps):
        raise BatchError(
            f"filter {part_name(spec)!r} must say True or False of each of {len(rollouts.trajectories)} trajectories; got "
            f"{len(keeps)} answers"
        )
    return [not keep for keep in keeps]


def _rows_of(batch: TrainingInputBatch, chosen: Sequence[bool]) -> Tensor:
    """Return `[num_rows]` bool: the rows of chosen trajectories."""
    is_chosen = torch.tensor(chosen, dtype=torch.bool)
    trajectory = batch["trajectory_index"].long()
    real = ~batch["is_padding"]
    if bool((trajectory[real] >= len(chosen)).any()):
        highest = int(trajectory[real].max())
        raise BatchError(f"trajectory {highest} of the batch is not among the {len(chosen)} rollouts")
    return real & is_chosen[torch.where(real, trajectory, 0)]


def zero_variance_rows(batch: TrainingInputBatch, config: AlgorithmConfig) -> Tensor:
    """Return `[num_rows]` bool: rows of prompts with one trajectory or with equal outcomes; False for padding."""
    result = torch.zeros(batch.num_rows, dtype=torch.bool)
    for rows in groups_of_whole_prompts(batch["prompt_index"], batch.lengths):
        part = batch.take(rows)
        inputs = advantage_inputs(part, config)
        scores = score(inputs, step_rewards="outcome", gamma=1.0)
        if scores.values.numel():
            result[rows] = ~inputs.is_padding & ~scores.differs()[scores.unit_of_token[:, 0]]
    return result


SMALLEST_WEIGHT = 1e-8
"""So that a batch of scores that are all 0 can be drawn from."""


def with_sample_counts(batch: TrainingInputBatch, config: FilterConfig, *, seed: int) -> TrainingInputBatch:
    """Return the batch with `sample_count` (int32, equal on all rows of a trajectory), as many draws as there are
    trajectories that did not fail; as it is where nothing is resampled.

    Trajectories are drawn again by their scores, so that those whose reward is to be trusted count more: PF-PPO (Policy
    Filtration for RLHF to Mitigate Noise in Reward Models, arXiv:2409.06957). One that is drawn k times is trained as k
    copies of itself would be, in its own mini-batch: loss weights and denominators count it so often. Drawn once over the
    training batch, before it is cut; a function of seed and step alone.
    """
    real = ~batch["is_padding"]
    if config.resample == "none" or not bool(real.any()):
        return batch
    _, number = torch.unique(batch["trajectory_index"][real], return_inverse=True)
    row_of_token = torch.repeat_interleave(torch.arange(batch.num_rows), batch.lengths)
    per_row = torch.zeros(batch.num_rows, dtype=torch.float64).index_add_(0, row_of_token, batch["rewards"].double())
    scores = torch.zeros(int(number.max()) + 1, dtype=torch.float64).index_add_(0, number, per_row[real])
    generator = torch.Generator().manual_seed(derive_seed(seed, "resample", batch.metadata.global_step))
    drawn = torch.multinomial(sampling_weights(scores, config), len(scores), replacement=True, generator=generator)
    counts = torch.zeros(batch.num_rows, dtype=torch.int32)
    counts[real] = torch.bincount(drawn, minlength=len(scores)).int()[number]
    return batch.with_columns(sample_count=counts)


def sampling_weights(scores: Tensor, config: FilterConfig) -> Tensor:
    """Return how likely each trajectory is drawn, up to a factor; `[trajectories]` float64, as verl has them.

    pow: `|score|^resample_power`. max_min: the highest and the lowest alone. max_random: the highest 0.4, others 0.1.
    """
    if config.resample == "pow":
        weights = scores.abs() ** config.resample_power
    elif config.resample == "max_min":
        weights = ((scores == scores.max()) | (scores == scores.min())).double()
    else:
        weights = torch.where(scores == scores.max(), 0.4, 0.1).double()
    return weights + SMALLEST_WEIGHT
