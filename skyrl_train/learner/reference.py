"""The reference where the policy trains an adapter: its own model with the adapter off, so that no second model is held.

Any other reference is a `PolicyLearner` without an optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from skyrl_train.batch.training_batch import TrainingInputBatch
from skyrl_train.errors import ModelError


class BaseOfAdapter:
    """Scores with the policy's model, its adapter off. Implements Scorer."""

    def __init__(self, forward_base: Callable[[TrainingInputBatch], Tensor]) -> None:
        """`forward_base` is that of the policy, in this process or on ranks."""
        self._forward_base = forward_base

    def forward(self, batch: TrainingInputBatch) -> Tensor:
        """Return log-probabilities as the policy's `forward` does, of the base model."""
        return self._forward_base(batch)

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:  # noqa: ARG002
        """Raises ModelError: the policy needs the base model as it is."""
        raise ModelError("the reference is the policy's model with the adapter off and cannot take other weights")

    def save(self, folder: Path) -> None:
        """Nothing is saved: the base model does not change."""

    def load(self, folder: Path) -> None:
        """Nothing is loaded: the base model does not change."""

    def close(self) -> None:
        """Nothing is released: the model is the policy's."""
