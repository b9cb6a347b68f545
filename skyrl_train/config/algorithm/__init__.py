"""Settings of losses, advantages, filters and micro-batching, and what these make a run need."""

from skyrl_train.config.algorithm.micro_batching import MicroBatchConfig
from skyrl_train.config.algorithm.settings import (
    REJECTION_CRITERIA,
    AlgorithmConfig,
    FilterConfig,
    OffPolicyConfig,
    estimator_reads,
    is_self_taught,
    loss_reads,
    needs_critic,
    needs_greedy_sample,
    needs_reference,
    reads_whole_step,
    starts_at_rollout,
)

__all__ = [
    "REJECTION_CRITERIA",
    "AlgorithmConfig",
    "FilterConfig",
    "MicroBatchConfig",
    "OffPolicyConfig",
    "estimator_reads",
    "is_self_taught",
    "loss_reads",
    "needs_critic",
    "needs_greedy_sample",
    "needs_reference",
    "reads_whole_step",
    "starts_at_rollout",
]
