"""Facts that a field's type carries: its range, and whether a run may go on from a checkpoint after it changed.

    batch_size: Forks[PositiveInt] = 32

is a setting of at least 1 whose change makes another run. A section carries a class too, which holds for those of its
fields that state none: `eval_sampling: Free[SamplingConfig]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar

T = TypeVar("T")


class Resume(Enum):
    """What a changed setting means to a run that goes on from a checkpoint; the value is its name in the reference."""

    FREE = "free"
    """Nothing that is learnt depends on it: what is shown, kept or evaluated, deadlines, addresses, checks."""
    LAYOUT = "layout"
    """It moves work between ranks, engines and micro-batches: rounding differs, and nothing else. The run says so."""
    FORKS = "forks"
    """It makes another run of it, which may begin at the checkpoint (`trainer.resume_mode=fork`)."""
    FIXED = "fixed"
    """Shapes of the saved tensors, or what token ids mean, follow from it: no run can begin there with another value."""


class ForksWhere(Enum):
    """Where a setting that may otherwise change makes another run of it."""

    SCHEDULE_ENDS = "a learning-rate schedule ends with the run"
    DOCUMENTS_CLOSE_STEPS = "`trainer.docs_per_step` closes the steps"


@dataclass(frozen=True)
class Interchangeable:
    """Values of a setting that forks between which a change is a matter of layout."""

    values: tuple[Any, ...]
    reason: str


@dataclass(frozen=True)
class ReadWith:
    """On a section: nothing in it is read while `setting` of it is 0 or empty."""

    setting: str
    """Relative to the section."""


Free = Annotated[T, Resume.FREE]
LayoutOnly = Annotated[T, Resume.LAYOUT]
Forks = Annotated[T, Resume.FORKS]
Fixed = Annotated[T, Resume.FIXED]
EndsSchedule = Annotated[T, Resume.FREE, ForksWhere.SCHEDULE_ENDS]
"""Moves the end of the run, with which the learning rate may end."""
CutsRows = Annotated[T, Resume.LAYOUT, ForksWhere.DOCUMENTS_CLOSE_STEPS]
"""Decides which rows are computed together, and with that when a step has its documents."""


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


@dataclass(frozen=True)
class Most:
    """The largest value with which anything could work: beyond it a slip of the hand is refused."""

    value: float
    why: str
    """Completes `must be at most ...: `."""

    def holds(self, value: float) -> bool:
        return value <= self.value

    def __str__(self) -> str:
        return f"at most {self.value:g}: {self.why}"


@dataclass(frozen=True)
class Usual:
    """The largest value that somebody is likely to mean: beyond it the run, and its plan, say so."""

    value: float
    why: str


ANY_RUN = Most(10**9, "no run gets through more")
ANY_CLUSTER = Most(100_000, "no cluster has room for more")
ANY_BATCH = Most(10**7, "no step holds more")
PositiveInt = Annotated[int, Range(1), ANY_RUN]
NonNegativeInt = Annotated[int, Range(0), ANY_RUN]
PositiveCount = Annotated[int, Range(1), ANY_CLUSTER]
"""Of processes, devices or nodes."""
NonNegativeCount = Annotated[int, Range(0), ANY_CLUSTER]
BatchSize = Annotated[int, Range(1), ANY_BATCH]
"""Of prompts, samples or rows."""
NonNegativeFloat = Annotated[float, Range(0.0)]
PositiveFloat = Annotated[float, Range(0.0, exclusive_min=True)]
Fraction = Annotated[float, Range(0.0, 1.0)]
Seconds = Annotated[float, Range(0.0, exclusive_min=True), Most(10**9, "nobody waits for 30 years")]
LayoutName = Literal["padded", "packed", "prefix_shared"]
LayoutChoice = Literal["padded", "packed", "prefix_shared", "auto"]
