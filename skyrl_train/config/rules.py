"""Rules that a field's type carries, e.g. `Annotated[int, Range(1)]`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal


@dataclass(frozen=True)
class Range:
    """A closed interval; `exclusive_min` leaves its lower end out. None is unbounded."""

    min: float | None = None
    max: float | None = None
    exclusive_min: bool = False

    def holds(self, value: float) -> bool:
        """False for values outside and for NaN."""
        if self.min is not None and not (value > self.min if self.exclusive_min else value >= self.min):
            return False
        return self.max is None or value <= self.max

    def __str__(self) -> str:
        low = "" if self.min is None else f"{'greater than' if self.exclusive_min else 'at least'} {self.min:g}"
        high = "" if self.max is None else f"at most {self.max:g}"
        return " and ".join(part for part in (low, high) if part)


PositiveInt = Annotated[int, Range(1)]
NonNegativeInt = Annotated[int, Range(0)]
NonNegativeFloat = Annotated[float, Range(0.0)]
PositiveFloat = Annotated[float, Range(0.0, exclusive_min=True)]
Fraction = Annotated[float, Range(0.0, 1.0)]
Seconds = Annotated[float, Range(0.0, exclusive_min=True)]
LayoutName = Literal["padded", "packed", "prefix_shared"]
LayoutChoice = Literal["padded", "packed", "prefix_shared", "auto"]
