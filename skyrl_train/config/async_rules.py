"""Rules of asynchronous reinforcement learning: rollouts that are made while the learner updates."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl_train.config.fields import Rule
from skyrl_train.config.schema import TrainerConfig
from skyrl_train.errors import Violation


def _serial(trainer: TrainerConfig) -> Iterator[Violation]:
    """The loop waits for the rollouts of each step: nothing would make older ones."""
    if trainer.max_staleness > 0:
        yield Violation.of(
            "trainer.max_staleness",
            trainer.max_staleness,
            "must be 0: rollouts are not made yet while the learner updates, so that none would be older",
            "set trainer.max_staleness=0",
        )


ASYNC_RULES: tuple[Rule, ...] = (_serial,)
"""One for what is decided together."""
