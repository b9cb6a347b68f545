"""What a step gave when it was executed again beside what it gave the first time.

On the placement that made it a step on a CPU gives every bit again. On another one sums are taken in another order, so that
what may differ is bounded: a column, a metric and a tensor each by the rounding of the type that forwards compute in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_train.batch import TrainingInputBatch

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Differences that count as rounding; all 0 demands every bit."""

    column: float
    """Absolute, of a token's number, such as a log-probability."""
    metric: float
    """Of a metric, as a share of 0.1 and its size."""
    change: float
    """Of the weights, as a share of how far the step moved them."""
    moment: float
    """Of the optimizer's state, as a share of its length."""

    @property
    def is_exact(self) -> bool:
        """Whether every bit is demanded."""
        return not any((self.column, self.metric, self.change, self.moment))


EXACT = Bounds(column=0.0, metric=0.0, change=0.0, moment=0.0)
FLOAT32 = Bounds(column=1e-4, metric=1e-3, change=1e-3, moment=1e-4)
BFLOAT16 = Bounds(column=0.25, metric=0.25, change=0.25, moment=0.01)
_METRIC_FLOOR = 0.1
OF_LAYOUT = ("layout/", "memory/")
"""Metrics of how the rows were cut, which is another matter on each placement."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One line of the table."""

    what: str
    count: int
    """Numbers that were compared."""
    largest: float
    """The largest difference, in the unit that its bound has; infinite where shapes or names differ."""
    bound: float
    where: str = ""
    """What has the largest difference; empty where there is none."""

    @property
    def holds(self) -> bool:
        """Whether the difference is within its bound."""
        return self.largest <= self.bound


def compare_batches(found: TrainingInputBatch, recorded: TrainingInputBatch, bounds: Bounds) -> list[Comparison]:
    """Compare rows and columns, one comparison a column."""
    names = sorted({*recorded.token_columns, *recorded.row_columns})
    lines = []
    for name in names:
        if name not in found:
            lines.append(_missing(f"batch {name}", bounds.column))
            continue
        mine, theirs = found[name], recorded[name]
        bound = bounds.column if theirs.is_floating_point() else 0.0
        largest, row = _difference(mine, theirs)
        lines.append(
            Comparison(
                what=f"batch {name}",
                count=theirs.numel(),
                largest=largest,
                bound=bound,
                where=f"index {row}" if largest else "",
            )
        )
    return lines


def compare_metrics(
    found: Mapping[str, float], recorded: Mapping[str, float | None], bounds: Bounds
) -> list[Comparison]:
    """Compare the metrics that were made again, in one line; those of the layout only where every bit is demanded."""
    names = [name for name in sorted(found) if name in recorded]
    if not bounds.is_exact:
        names = [name for name in names if not name.startswith(OF_LAYOUT)]
    differences = {name: _of_metrics(found[name], recorded[name], exact=bounds.is_exact) for name in names}
    worst = max(names, key=lambda name: differences[name], default="")
    largest = differences.get(worst, math.inf)
    return [
        Comparison(
            what="metrics",
            count=len(names),
            largest=largest,
            bound=bounds.metric,
            where=f"{worst}: {found[worst]!r}, recorded {recorded[worst]!r}" if largest and worst else "",
        )
    ]


def _of_metrics(found: float, recorded: float | None, *, exact: bool) -> float:
    if recorded is None or not math.isfinite(found):
        return 0.0 if recorded is None and not math.isfinite(found) else math.inf
    difference = abs(found - recorded)
    return difference if exact else difference / (_METRIC_FLOOR + abs(recorded))


def compare_tensors(
    what: str, found: Tensors, recorded: Tensors, bound: float, *, before: Tensors | None = None
) -> Comparison:
    """Compare a model's tensors: the length of the difference over that of `recorded`, or over that of what the step changed
    where their values `before` it are given. A bound of 0 demands every bit, and names the largest difference."""
    before = before or {}
    if {name: (t.shape, t.dtype) for name, t in found.items()} != {n: (t.shape, t.dtype) for n, t in recorded.items()}:
        return _missing(what, bound)
    largest, worst, difference, size = 0.0, "", 0.0, 0.0
    for name, theirs in recorded.items():
        own, _ = _difference(found[name], theirs)
        if own > largest:
            largest, worst = own, name
        difference += float((found[name].double() - theirs.double()).square().sum())
        moved = theirs.double() - before[name].double() if name in before else theirs.double()
        size += float(moved.square().sum())
    relative = math.sqrt(difference / size) if size else (0.0 if not difference else math.inf)
    return Comparison(
        what=what,
        count=sum(each.numel() for each in recorded.values()),
        largest=relative if bound else largest,
        bound=bound,
        where=f"{worst}, by {largest:.2g}" if worst else "",
    )


def _difference(found: Tensor, recorded: Tensor) -> tuple[float, int]:
    """The largest absolute difference, and its index in the flat tensors; numbers that are not finite equal their like."""
    if found.shape != recorded.shape or found.dtype != recorded.dtype:
        return math.inf, 0
    if not found.numel():
        return 0.0, 0
    mine, theirs = found.flatten().double(), recorded.flatten().double()
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    difference = torch.where(same, 0.0, (mine - theirs).abs().nan_to_num(nan=math.inf))
    index = int(difference.argmax())
    return float(difference[index]), index


def _missing(what: str, bound: float) -> Comparison:
    return Comparison(what=what, count=0, largest=math.inf, bound=bound, where="names, shapes or types differ")


def table(lines: Sequence[Comparison]) -> str:
    """The comparisons as a table, the largest difference behind it."""
    head = f"{'compared':<28}{'numbers':>12}{'largest difference':>22}{'bound':>10}"
    rows = [
        f"{line.what:<28}{line.count:>12,}{line.largest:>22.3g}{line.bound:>10.2g}"
        f"  {'ok' if line.holds else 'DIFFERS'}{'  ' + line.where if line.where else ''}"
        for line in lines
    ]
    return "\n".join([head, *rows])
