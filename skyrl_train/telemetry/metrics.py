"""Metrics whose reduction is part of their type, so that partial results from micro-batches and ranks merge exactly.

Example: `{"loss/policy": Mean(total=-1.5, weight=3.0)} ` merged with `{"loss/policy": Mean(total=-0.5, weight=1.0)}`
gives `Mean(total=-2.0, weight=4.0)`, whose value is -0.5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Mean:
    """A weighted mean: `total` is the sum of weight times value."""

    total: float
    weight: float

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else 0.0

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)


@dataclass(frozen=True)
class Sum:
    """A total over micro-batches and ranks."""

    value: float

    def merge(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)


@dataclass(frozen=True)
class Max:
    """The largest anywhere."""

    value: float

    def merge(self, other: Max) -> Max:
        return Max(max(self.value, other.value))


@dataclass(frozen=True)
class Min:
    """The smallest anywhere."""

    value: float

    def merge(self, other: Min) -> Min:
        return Min(min(self.value, other.value))


@dataclass(frozen=True)
class Last:
    """A value that is the same everywhere or of which the newest counts (a learning rate, say)."""

    value: float

    def merge(self, other: Last) -> Last:
        return other


Metric = Mean | Sum | Max | Min | Last
StepMetrics = Mapping[str, Metric]
"""Name (`group/name`) to metric."""


def merge_metrics(parts: Iterable[StepMetrics]) -> dict[str, Metric]:
    """Merges by name. Raises TypeError where one name carries two kinds of reduction."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            if name not in merged:
                merged[name] = metric
            elif type(merged[name]) is not type(metric):
                raise TypeError(f"metric {name}: {type(merged[name]).__name__} merged with {type(metric).__name__}")
            else:
                merged[name] = merged[name].merge(metric)  # type: ignore[arg-type]
    return merged


def to_values(metrics: StepMetrics) -> dict[str, float]:
    """Plain numbers, in sorted order of their names."""
    return {name: metrics[name].value for name in sorted(metrics)}
