"""Settings of losses, advantages and filters, and what these make a run need."""

from skyrl_train.config.algorithm.settings import (
    REJECTION_CRITERIA as REJECTION_CRITERIA,
    AlgorithmConfig as AlgorithmConfig,
    FilterConfig as FilterConfig,
    NonNegative as NonNegative,
    NotAbove as NotAbove,
    OffPolicyConfig as OffPolicyConfig,
    Positive as Positive,
    Share as Share,
    estimator_reads as estimator_reads,
    is_self_taught as is_self_taught,
    loss_reads as loss_reads,
    needs_critic as needs_critic,
    needs_greedy_sample as needs_greedy_sample,
    needs_reference as needs_reference,
    reads_whole_step as reads_whole_step,
    starts_at_rollout as starts_at_rollout,
)
