"""Rules between batch sizes: pure arithmetic on the configuration."""

from __future__ import annotations

from skyrl_train.config.schema import Config
from skyrl_train.errors import Violation


def validate_batch_sizes(config: Config, *, num_train_prompts: int | None = None) -> list[Violation]:
    """Every violation of the rules between batch sizes, at once; none for a valid configuration."""
    trainer = config.trainer
    violations = []
    for field, size in (
        ("trainer.policy_mini_batch_size", trainer.policy_mini_batch_size),
        ("trainer.critic_mini_batch_size", trainer.critic_mini_batch_size),
    ):
        if field.startswith("trainer.critic") and not config.critic.model.path:
            continue
        if trainer.train_batch_size % size:
            violations.append(
                Violation(
                    field=field,
                    rule=f"must divide trainer.train_batch_size={trainer.train_batch_size}",
                    value=str(size),
                    remedy=f"Try {field}={trainer.train_batch_size}",
                )
            )
    if num_train_prompts is not None and num_train_prompts < trainer.train_batch_size:
        violations.append(
            Violation(
                field="trainer.train_batch_size",
                rule=f"must be at most the {num_train_prompts} training prompts",
                value=str(trainer.train_batch_size),
                remedy=f"Try trainer.train_batch_size={num_train_prompts}",
            )
        )
    return violations
