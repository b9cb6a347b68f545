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
from skyrl_train.algorithms.losses.policy import sequence_weights, with_proximal
from skyrl_train.algorithms.losses.ratios import Turns, sequences_of_flat
from skyrl_train.algorithms.losses.sequence import statistic_of
from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.steps import copies_of_tokens, tokens_with_loss
from skyrl_train.config.algorithm import AlgorithmConfig, reads_whole_step
from skyrl_train.telemetry import Mean, Metric, StepMetrics

DECLARED_METRICS = """
policy/entropy_threshold | nats | Entropy from which tokens are trained. | with `entropy_quantile`
policy/high_entropy_fraction | share | Tokens above it. | with `entropy_quantile`
"""

ScoreStep = Callable[[Literal["logprobs", "entropy"], TrainingInputBatch], Tensor]
"""`(what, rows) -> [num_tokens]` of the policy as it is now, at positions with `loss_mask`."""


def with_step_columns(
    batch: TrainingInputBatch, config: AlgorithmConfig, score: ScoreStep
) -> tuple[TrainingInputBatch, StepMetrics]:
    """Return the closed mini-batch's rows with the columns that the configured loss reads of other rows; as they are
    where it reads none. `score` is called only where the policy has to be evaluated.

    `sequence_log_ratio` (float64): the statistic of each token's trajectory, with `sequence_unit=trajectory` and
    trajectories of several rows. It is 0 without `old_logprobs`: the policy is then the old one. `policy_weights`
    (float64): factors on the policy's token losses, 0 for what is left out. Raises BatchError.
    """
    columns: dict[str, Tensor] = {}
    metrics: dict[str, Metric] = {}
    statistic = statistic_of(config) if _reads_split_trajectories(batch, config) else None
    weighs = _weighs_step(batch, config)
    current: Tensor | None = None
    has_old = config.proximal == "behaviour" or "old_logprobs" in batch
    if (statistic is not None and has_old) or (weighs and config.off_policy.negative_kl_max > 0):
        current = score("logprobs", batch)
    if statistic is not None:
        columns["sequence_log_ratio"] = torch.zeros(batch.num_tokens, dtype=torch.float64)
        if current is not None and has_old:
            inputs = _flat_inputs(batch, config, current)
            columns["sequence_log_ratio"] = statistic(inputs, trajectories_of(batch), config).squeeze(0)
    if weighs:
        sequences = trajectories_of(batch) if config.sequence_unit == "trajectory" else _turns_of(batch)
        inputs, copies = _flat_inputs(batch, config, current), copies_of_tokens(batch)
        weights, metrics = sequence_weights(inputs, sequences, config, copies=copies)
        columns["policy_weights"] = weights.squeeze(0)
    if config.entropy_quantile > 0:
        kept, share = high_entropy(
            score("entropy", batch), tokens_with_loss(batch), config.entropy_quantile, copies=copies_of_tokens(batch)
        )
        columns["policy_weights"] = torch.where(kept, columns["policy_weights"], 0.0)
        metrics |= share
    return (batch.with_columns(**columns), metrics) if columns else (batch, metrics)


def high_entropy(
    entropy: Tensor, mask: Tensor, quantile: float, *, copies: Tensor | None = None
) -> tuple[Tensor, dict[str, Metric]]:
    """Return, of tokens `[tokens]`, those of `mask` whose entropy is at least the quantile of all of them, linearly
    interpolated. `copies`, integers of the same shape: how often the quantile counts each, once unless given.

    Beyond the 80/20 Rule, arXiv:2506.01939, equations 4 and 5, whose rho is `1 - quantile`.
    """
    counted = entropy[mask] if copies is None else entropy[mask].repeat_interleave(copies[mask])
    ordered = counted.double().sort().values
    if not ordered.numel():
        return mask, {}
    position = quantile * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    threshold = float(torch.lerp(ordered[below], ordered[above], position - below))
    kept = mask & (entropy.double() >= threshold)
    return kept, {
        "policy/entropy_threshold": Mean(threshold, 1.0),
        "policy/high_entropy_fraction": Mean(float(kept.sum()), float(mask.sum())),
    }


def has_split_trajectories(batch: TrainingInputBatch) -> bool:
    """Whether a trajectory has several rows here, or rows elsewhere."""
    parts = (batch["step_index"] > 0) | ~batch["is_last_step"]
    return bool((parts & ~batch["is_padding"]).any())


def missing_step_column(batch: TrainingInputBatch, config: AlgorithmConfig) -> str:
    """Return the column that the configured loss needs and these rows lack; empty where there is none."""
    if _reads_split_trajectories(batch, config) and "sequence_log_ratio" not in batch:
        return "sequence_log_ratio"
    return "policy_weights" if _weighs_step(batch, config) and "policy_weights" not in batch else ""


def trajectories_of(batch: TrainingInputBatch) -> Turns:
    """Return the trained tokens of each trajectory as one sequence, `[1, num_tokens]`."""
    owner = torch.repeat_interleave(batch["trajectory_index"].long(), batch.lengths)
    return sequences_of_flat(tokens_with_loss(batch), owner)


def _reads_split_trajectories(batch: TrainingInputBatch, config: AlgorithmConfig) -> bool:
    reads = config.sequence_unit == "trajectory" and statistic_of(config) is not None
    return reads and has_split_trajectories(batch)


def _weighs_step(batch: TrainingInputBatch, config: AlgorithmConfig) -> bool:
    """Whether the weights of the rows' tokens depend on other rows."""
    if config.entropy_quantile > 0 or config.off_policy.batch_normalize:
        return True
    return reads_whole_step(config) and has_split_trajectories(batch)


def _turns_of(batch: TrainingInputBatch) -> Turns:
    """Return the turns of all rows, `[1, num_tokens]`."""
    mask = tokens_with_loss(batch)
    starts = mask.clone()
    starts[1:] &= ~mask[:-1]
    first = batch.row_offsets[:-1]
    starts[first] = mask[first]
    return sequences_of_flat(mask, starts.cumsum(0))


def _flat_inputs(batch: TrainingInputBatch, config: AlgorithmConfig, current: Tensor | None) -> PolicyLossInputs:
    """All rows as one, `[1, num_tokens]`, in float64. What is not there is not read: the policy as it is now where no
    statistic of it is taken, and the old one where it is the same."""

    def column(name: str, default: Tensor) -> Tensor:
        return batch.token_columns.get(name, default).double().unsqueeze(0)

    nothing = torch.zeros(batch.num_tokens, dtype=torch.float64)
    now = nothing if current is None else current
    rollout = column("rollout_logprobs", nothing) if "rollout_logprobs" in batch else None
    inputs = PolicyLossInputs(
        logprobs=now.double().unsqueeze(0),
        old_logprobs=column("old_logprobs", now),
        advantages=column("advantages", nothing),
        loss_mask=tokens_with_loss(batch).unsqueeze(0),
        rollout_logprobs=rollout,
    )
    return with_proximal(inputs, config)
