"""Settings of losses, advantages and filters, and what these make a run need."""

from skyrl_train.config.algorithm.settings import (
    REJECTION_CRITERIA,
    AlgorithmConfig,
    FilterConfig,
    NonNegative,
    NotAbove,
    OffPolicyConfig,
    Positive,
    Share,
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
    "NonNegative",
    "NotAbove",
    "OffPolicyConfig",
    "Positive",
    "Share",
    "estimator_reads",
    "is_self_taught",
    "loss_reads",
    "needs_critic",
    "needs_greedy_sample",
    "needs_reference",
    "reads_whole_step",
    "starts_at_rollout",
]
