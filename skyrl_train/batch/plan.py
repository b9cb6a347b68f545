"""Every size that follows from the configuration, computed once and frozen."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_train.config.schema import Config
from skyrl_train.config.validate_batch import validate_batch_sizes
from skyrl_train.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """What one training batch and the whole run consist of. "Step" alone is a training batch."""

    num_prompts_per_batch: int
    num_samples_per_batch: int
    """Trajectories that one training batch generates."""
    num_prompts_per_step: int
    """Prompts in one optimizer step of the policy."""
    num_samples_per_step: int
    """Trajectories in one optimizer step of the policy."""
    batches_per_epoch: int
    """Whole training batches in one pass over the prompts."""
    total_steps: int
    """Training batches in the run."""
    optimizer_steps_per_batch: int
    """Of the policy, over all update epochs."""
    total_optimizer_steps: int
    """Of the policy, in the run: what its learning rate is scheduled over."""
    critic_optimizer_steps_per_batch: int
    """0 where there is no critic."""
    critic_total_optimizer_steps: int


def plan_batches(config: Config, *, num_train_prompts: int) -> BatchPlan:
    """The plan of a run over `num_train_prompts` prompts. Raises ConfigError with every violation."""
    violations = validate_batch_sizes(config, num_train_prompts=num_train_prompts)
    if violations:
        raise ConfigError(violations)
    trainer = config.trainer
    batches_per_epoch, _ = divmod(num_train_prompts, trainer.train_batch_size)
    total_steps = trainer.total_steps or trainer.epochs * batches_per_epoch
    mini_batches, _ = divmod(trainer.train_batch_size, trainer.policy_mini_batch_size)
    critic_mini_batches, _ = divmod(trainer.train_batch_size, trainer.critic_mini_batch_size)
    steps_per_batch = mini_batches * trainer.update_epochs_per_batch
    critic_steps_per_batch = critic_mini_batches * trainer.update_epochs_per_batch if config.critic.model.path else 0
    return BatchPlan(
        num_prompts_per_batch=trainer.train_batch_size,
        num_samples_per_batch=trainer.train_batch_size * config.generator.n_samples_per_prompt,
        num_prompts_per_step=trainer.policy_mini_batch_size,
        num_samples_per_step=trainer.policy_mini_batch_size * config.generator.n_samples_per_prompt,
        batches_per_epoch=batches_per_epoch,
        total_steps=total_steps,
        optimizer_steps_per_batch=steps_per_batch,
        total_optimizer_steps=total_steps * steps_per_batch,
        critic_optimizer_steps_per_batch=critic_steps_per_batch,
        critic_total_optimizer_steps=total_steps * critic_steps_per_batch,
    )
