"""Which forward passes a configuration needs, of which model, and when the gradients of backward passes are summed."""

from __future__ import annotations

from skyrl_train.config.algorithm import estimator_reads, loss_reads, reads_whole_step
from skyrl_train.config.schema import Config, TrainerConfig


def needs_old_logprobs(trainer: TrainerConfig) -> bool:
    """Whether the policy has to score a batch before it is updated on it.

    Not where each batch is one optimizer step: the old policy is then the one that is differentiated, and each ratio is
    1 by construction. Not where the loss never reads them, or is given those of the engine. Always where rewards,
    advantages or weights over the whole step are made of them.
    """
    algorithm = trainer.algorithm
    if algorithm.kl_reward_coef > 0 or "old_logprobs" in estimator_reads(algorithm).columns:
        return True
    if algorithm.off_policy.enabled and reads_whole_step(algorithm):
        return True
    if algorithm.use_rollout_logprobs or "old_logprobs" not in loss_reads(algorithm).columns:
        return False
    one_step = trainer.policy_mini_batch_size == trainer.train_batch_size and trainer.update_epochs_per_batch == 1
    return not one_step or trainer.docs_per_step > 0


def reference_is_base(config: Config) -> bool:
    """Whether the reference is the model under the policy's adapter, so that none of its own is held: not where another
    model is named, or where it becomes the policy on the way."""
    own = config.reference.model.path == "policy" and not config.trainer.algorithm.ref_update_interval
    return config.model.lora.rank > 0 and own


WHOLE_GRADIENTS_SHARE = 0.1
"""Of a device's memory: so much the gradient of a whole model may take where `strategy.gradient_sync=auto` keeps it."""


def sums_once_a_step(gradient_sync: str, *, gradient_bytes: int, device_bytes: int) -> bool:
    """Whether ranks of a sharded model sum gradients with the last micro-batch of an optimizer step alone.

    Args:
        gradient_sync: `strategy.gradient_sync`.
        gradient_bytes: Of all trained parameters, whole.
        device_bytes: Memory of one rank's device; 0 where it is not known.
    """
    if gradient_sync != "auto":
        return gradient_sync == "step"
    return gradient_bytes <= WHOLE_GRADIENTS_SHARE * device_bytes
