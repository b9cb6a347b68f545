"""Rewards beside a trajectory's own: of its prompt's greedy sample, and its components. From rollouts to columns."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from skyrl_train.batch.training_batch import TrainingInputBatch, component_column
from skyrl_train.config.algorithm import AlgorithmConfig, needs_greedy_sample
from skyrl_train.errors import BatchError
from skyrl_train.types import Failure, Outcome, RolloutBatch, Trajectory


def with_greedy_rewards(rollouts: RolloutBatch, greedy: RolloutBatch) -> RolloutBatch:
    """`rollouts` with the reward of each prompt's one trajectory of `greedy` on every trajectory of the prompt.

    Where the greedy sample failed, its reward is unknown and the prompt's trajectories fail too, with its reason: a
    failure never becomes a reward. Raises BatchError where the two are not of the same prompts.
    """
    if greedy.n_samples_per_prompt != 1 or [p.uid for p in greedy.prompts] != [p.uid for p in rollouts.prompts]:
        raise BatchError("greedy samples must be one for each prompt of the rollouts, in the same order")
    baselines = [sample for sample in greedy.trajectories for _ in range(rollouts.n_samples_per_prompt)]
    pairs = zip(rollouts.trajectories, baselines, strict=True)
    return replace(rollouts, trajectories=tuple(_with_baseline(*pair) for pair in pairs))


def _with_baseline(trajectory: Trajectory, greedy: Trajectory) -> Trajectory:
    if trajectory.failed:
        return trajectory
    if greedy.failure is None:
        return replace(trajectory, greedy_reward=greedy.reward)
    message = f"the greedy sample of its prompt failed: {greedy.failure.message}"
    failure = Failure(kind=greedy.failure.kind, message=message, turn_index=greedy.failure.turn_index)
    return replace(trajectory, outcome=Outcome.FAILED, failure=failure)


def with_reward_columns(
    batch: TrainingInputBatch, rollouts: RolloutBatch, config: AlgorithmConfig
) -> TrainingInputBatch:
    """The batch assembled from `rollouts` with the row columns of rewards that the configured estimator reads.

    Raises BatchError naming the trajectory where one does not have them.
    """
    columns: dict[str, Tensor] = {}
    if needs_greedy_sample(config):
        missing = "no reward of a greedy sample: it was recorded by another advantage_estimator"
        columns["greedy_rewards"] = _per_row(batch, rollouts, [t.greedy_reward for t in rollouts.trajectories], missing)
    for name in config.reward_components:
        values = [trajectory.metrics.get(name) for trajectory in rollouts.trajectories]
        known = sorted({key for trajectory in rollouts.trajectories for key in trajectory.metrics})
        missing = f"no metric {name!r} that is a finite number, which reward_components names; its environment reports "
        columns[component_column(name)] = _per_row(batch, rollouts, values, missing + (", ".join(known) or "none"))
    return batch.with_columns(**columns) if columns else batch


def _per_row(batch: TrainingInputBatch, rollouts: RolloutBatch, values: list[float | None], missing: str) -> Tensor:
    """`[num_rows]` float32; 0 for failed trajectories and dummy rows."""
    for trajectory, value in zip(rollouts.trajectories, values, strict=True):
        if not trajectory.failed and (value is None or not math.isfinite(value)):
            raise BatchError(f"trajectory {trajectory.prompt_uid}/{trajectory.sample_index} has {missing}")
    known = [0.0 if t.failed or value is None else value for t, value in zip(rollouts.trajectories, values)]
    trajectory_of_row = batch["trajectory_index"].long()
    found = torch.tensor(known, dtype=torch.float32)[trajectory_of_row.clamp(min=0)]
    return torch.where(batch["is_padding"], 0.0, found)
