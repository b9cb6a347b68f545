"""Carries the policy's weights to an engine in the same process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from torch import Tensor


class LoadsWeights(Protocol):
    """An engine that takes weights directly, e.g. `HFEngine`."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """All of them or none. Raises EngineError."""
        ...


class InlineTransport:
    """Implements `WeightTransport` where learner and engine share a process."""

    def __init__(self, engine: LoadsWeights) -> None:
        self._engine = engine

    def sync(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Raises EngineError where the weights do not fit the engine's model; it then keeps what it has."""
        self._engine.load_weights(weights, version)


class NoTransport:
    """Implements `WeightTransport` where nothing answers with the weights: replay has no engine."""

    def sync(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Leaves the weights where they are."""
