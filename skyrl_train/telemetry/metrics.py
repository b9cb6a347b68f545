"""Metrics whose reduction is part of their type, so that partial results from micro-batches and ranks merge exactly.

Example: `{"loss/policy": Mean(total=-1.5, weight=3.0)} ` merged with `{"loss/policy": Mean(total=-0.5, weight=1.0)}`
gives `Mean(total=-2.0, weight=4.0)`, whose value is -0.5.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from torch import Tensor


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
class _Single:
    value: float


class Sum(_Single):
    """A total over micro-batches and ranks."""

    def merge(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)


class Max(_Single):
    """The largest value of all micro-batches and ranks."""

    def merge(self, other: Max) -> Max:
        return Max(max(self.value, other.value))


class Min(_Single):
    """The smallest value of all micro-batches and ranks."""

    def merge(self, other: Min) -> Min:
        return Min(min(self.value, other.value))


class Last(_Single):
    """A value that is the same everywhere or of which the newest counts (a learning rate, say)."""

    def merge(self, other: Last) -> Last:
        return other


Metric = Mean | Sum | Max | Min | Last
StepMetrics = Mapping[str, Metric]
"""Name (`group/name`) to metric."""


def later(scalar: Tensor) -> float:
    """The number of a scalar; of one on a device the scalar itself, until `merge_metrics` reads all of them: reading each at
    once would make the host wait for the device each time."""
    scalar = scalar.detach()
    return float(scalar) if scalar.device.type == "cpu" else cast("float", scalar)


def _read_back(parts: Sequence[StepMetrics]) -> list[dict[str, Metric]]:
    """The metrics with all that `later` left in them as numbers, in one transfer.

    A Min or Max that is not a number is one of no tokens, and is left out.
    """
    waiting = [
        value
        for part in parts
        for metric in part.values()
        for value in vars(metric).values()
        if not isinstance(value, (int, float))
    ]
    if not waiting:
        return [dict(part) for part in parts]
    import torch

    read = iter(torch.stack([cast("Tensor", value).double() for value in waiting]).tolist())

    def plain(metric: Metric) -> Metric:
        numbers = [value if isinstance(value, (int, float)) else next(read) for value in vars(metric).values()]
        return type(metric)(*numbers)

    found = [{name: plain(metric) for name, metric in part.items()} for part in parts]
    return [
        {name: each for name, each in part.items() if not (isinstance(each, (Min, Max)) and math.isnan(each.value))}
        for part in found
    ]


def merge_metrics(parts: Iterable[StepMetrics]) -> dict[str, Metric]:
    """Merges by name, and reads back what `later` left on a device. Raises TypeError where one name carries two kinds of
    reduction."""
    merged: dict[str, Metric] = {}
    for part in _read_back(list(parts)):
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
