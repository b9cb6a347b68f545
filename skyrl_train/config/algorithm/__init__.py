"""Settings of losses, advantages, filters and micro-batching, and what these make a run need."""

from skyrl_train.config.algorithm.earlier import EARLIER, as_now, for_hydra, in_parts
from skyrl_train.config.algorithm.micro_batching import MicroBatchConfig
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
    "EARLIER",
    "REJECTION_CRITERIA",
    "AlgorithmConfig",
    "FilterConfig",
    "MicroBatchConfig",
    "NonNegative",
    "NotAbove",
    "OffPolicyConfig",
    "Positive",
    "Share",
    "as_now",
    "estimator_reads",
    "for_hydra",
    "in_parts",
    "is_self_taught",
    "loss_reads",
    "needs_critic",
    "needs_greedy_sample",
    "needs_reference",
    "reads_whole_step",
    "starts_at_rollout",
]
