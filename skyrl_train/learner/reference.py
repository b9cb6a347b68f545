"""The reference of a policy that trains an adapter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.errors import ModelError
from skyrl_train.interfaces import HeldState
from skyrl_train.weights import ModelWeights


class BaseOfAdapter:
    """The reference where the policy trains an adapter: the policy's own model with the adapter off, so that no second model
    is held. Implements Scorer; any other reference is a PolicyLearner without an optimizer."""

    def __init__(self, forward_base: Callable[[TrainingInputBatch], Tensor]) -> None:
        """`forward_base` is that of the policy, in this process or on ranks."""
        self._forward_base = forward_base

    def forward(self, batch: TrainingInputBatch) -> Tensor:
        """Return log-probabilities as the policy's `forward` does, of the base model."""
        return self._forward_base(batch)

    def load_weights(self, weights: ModelWeights) -> None:  # noqa: ARG002
        """Raises ModelError: the policy needs the base model as it is."""
        raise ModelError("the reference is the policy's model with the adapter off and cannot take other weights")

    def hold_state(self, *, copies: bool) -> HeldState:  # noqa: ARG002
        """Nothing is saved: the base model does not change."""
        return HeldState(is_copied=True, write=lambda folder: {})  # noqa: ARG005

    def load(self, folder: Path) -> None:
        """Nothing is loaded: the base model does not change."""

    def close(self) -> None:
        """Nothing is released: the model is the policy's."""
