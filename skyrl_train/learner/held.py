"""What learners of all roles do with the model that they hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from skyrl_train.learner.engine import ModelEngine
from skyrl_train.model.lora import adapter_tensors, merged_weights
from skyrl_train.telemetry.metrics import StepMetrics


class HoldsModel:
    """The part of a `Learner` that knows nothing of losses."""

    def __init__(self, engine: ModelEngine) -> None:
        self.engine = engine

    def optim_step(self) -> StepMetrics:
        """Clips, steps, zeroes the gradients, advances the schedule. Raises NonFiniteError before any weight moves."""
        return self.engine.optim_step()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full parameters under their Hugging Face names, tied ones once, an adapter merged; detached."""
        yield from merged_weights(self.engine.model, self.engine.strategy.full)

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The adapter by itself, under names of its own; detached. Nothing where there is none."""
        for name, parameter in adapter_tensors(self.engine.model).items():
            yield name, parameter.detach()

    def save(self, folder: Path) -> None:
        """Model, optimizer and schedule. Raises CheckpointError."""
        self.engine.save(folder)

    def load(self, folder: Path) -> None:
        """Exact inverse of `save`. Raises CheckpointError."""
        self.engine.load(folder)

    def close(self) -> None:
        """Nothing to release: memory goes with the object."""
