"""What a loss reads of other rows, computed once over the closed mini-batch, before it is split.

Rows of one trajectory, and tokens of one mini-batch, may be computed in different micro-batches and on different ranks.
A statistic over them becomes a column here, on the controller, and travels with the rows, so that how the rows are cut
cannot change the gradient. Some need the policy as it is at this optimizer step: one more pass over the mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from skyrl_train.algorithms.inputs import PolicyLossInputs
from skyrl_train.algorithms.ratios import Turns, sequences_of_flat
from skyrl_train.algorithms.sequence_losses import SEQUENCE_STATISTICS
from skyrl_train.batch.training_batch import TrainingInputBatch
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.telemetry.metrics import StepMetrics

ScoreStep = Callable[[Literal["logprobs"], TrainingInputBatch], Tensor]
"""`(what, rows) -> [num_tokens]` of the policy as it is now, at positions with `loss_mask`."""


def with_step_columns(
    batch: TrainingInputBatch, config: AlgorithmConfig, score: ScoreStep
) -> tuple[TrainingInputBatch, StepMetrics]:
    """The closed mini-batch's rows with the columns that the configured loss reads of other rows; as they are where it
    reads none. `score` is called only where the policy has to be evaluated.

    `sequence_log_ratio` (float64): the statistic of each token's trajectory, with `sequence_unit=trajectory` and
    trajectories of several rows. It is 0 without `old_logprobs`: the policy is then the old one. Raises BatchError.
    """
    if not _reads_split_trajectories(batch, config):
        return batch, {}
    statistic = torch.zeros(batch.num_tokens, dtype=torch.float64)
    if "old_logprobs" in batch:
        inputs = _flat_inputs(batch, score("logprobs", batch))
        found = SEQUENCE_STATISTICS[config.policy_loss](inputs, trajectories_of(batch), config)
        statistic = found.squeeze(0)
    return batch.with_columns(sequence_log_ratio=statistic), {}


def has_split_trajectories(batch: TrainingInputBatch) -> bool:
    """Whether a trajectory has several rows here, or rows elsewhere."""
    parts = (batch["step_index"] > 0) | ~batch["is_last_step"]
    return bool((parts & ~batch["is_padding"]).any())


def lacks_sequence_column(batch: TrainingInputBatch, config: AlgorithmConfig) -> bool:
    """Whether the configured loss would read whole trajectories from rows that do not hold them whole."""
    return _reads_split_trajectories(batch, config) and "sequence_log_ratio" not in batch


def trajectories_of(batch: TrainingInputBatch) -> Turns:
    """The trained tokens of each trajectory as one sequence, `[1, num_tokens]`."""
    owner = torch.repeat_interleave(batch["trajectory_index"].long(), batch.lengths)
    return sequences_of_flat(trained_tokens(batch), owner)


def trained_tokens(batch: TrainingInputBatch) -> Tensor:
    """`[num_tokens]` bool: tokens with loss of rows that are not padding."""
    return batch["loss_mask"] & ~torch.repeat_interleave(batch["is_padding"], batch.lengths)


def _reads_split_trajectories(batch: TrainingInputBatch, config: AlgorithmConfig) -> bool:
    reads = config.sequence_unit == "trajectory" and config.policy_loss in SEQUENCE_STATISTICS
    return reads and has_split_trajectories(batch)


def _flat_inputs(batch: TrainingInputBatch, logprobs: Tensor) -> PolicyLossInputs:
    """All rows as one, `[1, num_tokens]`, in float64."""

    def column(name: str) -> Tensor:
        return batch[name].double().unsqueeze(0)

    return PolicyLossInputs(
        logprobs=logprobs.double().unsqueeze(0),
        old_logprobs=column("old_logprobs"),
        advantages=column("advantages"),
        loss_mask=trained_tokens(batch).unsqueeze(0),
    )
