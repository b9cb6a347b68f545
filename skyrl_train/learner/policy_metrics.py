"""How far the policy that is trained is from what sampled its tokens, and why."""

from __future__ import annotations

import torch

from skyrl_train.algorithms.losses import PolicyLossInputs, log_ratio_ledger, masked
from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.steps import Ages, token_ages
from skyrl_train.config.algorithm import AlgorithmConfig, loss_reads
from skyrl_train.telemetry import Max, Mean, StepMetrics, later

DECLARED_METRICS = """
policy/rollout_logprob_diff{,_max} | nats | Mean and largest difference of trainer's and engine's log-probability, in
    the update. | with engine log-probabilities | SkyRL `policy/rollout_train_logprobs_abs_diff_mean`
"""


def rollout_difference(inputs: PolicyLossInputs) -> StepMetrics:
    """How far the engine that sampled is from the model that trains; near 0 where weights were synced right."""
    if inputs.rollout_logprobs is None:
        return {}
    difference = masked(inputs.old_logprobs - inputs.rollout_logprobs, inputs.loss_mask).abs()
    return {
        "policy/rollout_logprob_diff": Mean(later(difference.sum()), later(inputs.loss_mask.sum())),
        "policy/rollout_logprob_diff_max": Max(later(difference.amax()) if difference.numel() else 0.0),
    }


def ledger_metrics(
    inputs: PolicyLossInputs, rows: TrainingInputBatch, algorithm: AlgorithmConfig, ages: Ages
) -> StepMetrics:
    """`off_policy/{numerics,staleness,drift,unattributed}_*`: why the policy differs from what sampled; by the age of the
    tokens, too, where the weights of the update did not sample all of them.

    Without a column `old_logprobs` there is no drift, since the step is the batch's first; but losses that never read
    it are spared the column in later steps, too, and then nothing can be told apart.
    """
    if inputs.rollout_logprobs is None:
        return {}
    unread = algorithm.proximal == "behaviour" or "old_logprobs" not in loss_reads(algorithm).columns
    unknown = "old_logprobs" not in rows and unread
    flat_age = token_ages(rows)
    # Ages have no column of their own: under the name of the
    # versions that they follow from they are padded like them, by 0.
    token_age = None if flat_age is None else rows.with_columns(weight_version=flat_age).padded("weight_version")
    stale = torch.full_like(inputs.loss_mask, unknown)
    ledger = log_ratio_ledger(
        logprobs=inputs.logprobs.detach(),
        old_logprobs=inputs.old_logprobs,
        rollout_logprobs=inputs.rollout_logprobs,
        loss_mask=inputs.loss_mask,
        is_stale=stale if token_age is None else stale | (token_age != 0),
    )
    found = ledger.metrics(inputs.loss_mask)
    if token_age is None:
        return found
    found |= ledger.metrics_by_age(inputs.loss_mask, token_age, ages.found, knows_drift=not unknown)
    if ages.fresh_behind_updates and not unknown:
        found |= ledger.metrics_behind_updates(inputs.loss_mask, token_age)
    return found
