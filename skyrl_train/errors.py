"""Every error that the project raises on purpose.

SkyrlTrainError
├── ConfigError                  the configuration; carries all violations at once
├── DataError                    a data file or row
├── CheckpointError              a checkpoint is missing, damaged or of another run
│   └── SaveError                it could not be written, as on a full disk; earlier ones are as they were
├── ModelError                   a model folder or name cannot be used
├── BatchError (ValueError)      rows, boundaries or shapes that contradict each other
├── MemoryLimitError             rows that do not fit the memory of a device
├── RankOutOfMemory              memory ran out on one of the ranks; caught where passes are computed anew
├── NonFiniteError               a loss or gradient is NaN or infinite; no weight was changed
├── DeadlineError                something did not answer in time; the name says what
├── EngineError                  the inference engine refused or broke
│   └── EngineDeadError          it will answer nothing any more; another engine may
├── ActorError                   a process of the run raised what nobody expected
│   └── ActorLostError           it died or hangs, or its node is gone: others may repeat what it did
│       └── CollectiveError      ranks could not talk to another one, which is what was lost
└── StopRequested                a signal asked for a stop, raised at the next safe point

All of them, subclasses of a user's own included, can be pickled and come out of another process as they went in.

Beside them, counts and sizes as messages write them: one form for one thing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class SkyrlTrainError(Exception):
    """Base of all errors below. `main` prints them without a traceback and exits with status 2."""

    trajectories: tuple[Any, ...] = ()
    """Pairs of a prompt and its trajectory that were complete when generating ended by this error."""

    def __reduce__(self) -> tuple[Any, ...]:
        """The class with its message and attributes: Python would call the constructor with the message alone, which is
        not what those of several errors take."""
        return _rebuilt, (type(self), self.args, dict(self.__dict__))


def _rebuilt(kind: type[SkyrlTrainError], args: tuple[Any, ...], attributes: dict[str, Any]) -> SkyrlTrainError:
    error = kind.__new__(kind, *args)
    error.args = args  # an OSError's are set by its constructor alone
    error.__dict__.update(attributes)
    return error


@dataclass(frozen=True, kw_only=True)
class Violation:
    """One thing that is wrong with a configuration, in the four parts that a reader needs."""

    field: str
    """Dotted name as typed on the command line, e.g. `trainer.train_batch_size`."""
    rule: str
    """What must hold, e.g. `must be a positive integer`."""
    value: str
    """What was given, as text."""
    remedy: str
    """What to type instead, e.g. `try trainer.train_batch_size=4`."""

    @classmethod
    def of(cls, field: str, value: object, rule: str, remedy: str) -> Violation:
        """A violation of a setting, whose value is shown as Python writes it."""
        return cls(field=field, rule=rule, value=repr(value), remedy=remedy)

    def __str__(self) -> str:
        return f"{self.field}: {self.rule}; got {self.value}. {self.remedy[:1].upper()}{self.remedy[1:]}"


class ConfigError(SkyrlTrainError):
    """All violations of a configuration, at once."""

    def __init__(self, violations: Sequence[Violation]):
        self.violations = tuple(violations)
        count = len(self.violations)
        head = f"{counted(count, 'problem')} in the configuration:"
        super().__init__("\n".join([head, *(f"  - {violation}" for violation in self.violations)]))


class DataError(SkyrlTrainError):
    """A data file is missing, or a row lacks what it needs; names the file, the row and the remedy."""


class CheckpointError(SkyrlTrainError):
    """A checkpoint cannot be used; names the folder and the reason."""


class SaveError(CheckpointError):
    """A checkpoint could not be written: the disk is full, refuses or is gone. Earlier ones are as they were, and a later
    attempt may succeed."""


class ModelError(SkyrlTrainError):
    """A model cannot be loaded; names the path and what is missing there."""


class BatchError(SkyrlTrainError, ValueError):
    """Rows, boundaries or shapes contradict each other; names the uid or the index."""


class MemoryLimitError(SkyrlTrainError):
    """What is to be computed does not fit the memory of its device; names the row's length and what to change."""


class RankOutOfMemory(SkyrlTrainError):
    """Memory ran out on this rank or another; raised on all of them. What was computed is of no use."""

    def __init__(self, reason: str):
        """`reason`: what this rank was told, empty where it happened elsewhere."""
        super().__init__(reason or "memory ran out on another rank")
        self.reason = reason


class NonFiniteError(SkyrlTrainError):
    """A loss or a gradient is not finite. Raised before any weight moves."""

    learner: str = ""
    """`policy` or `critic`, whose optimizer step was refused; empty where it is not known."""
    optimizer_steps: int = 0
    """That this learner had made in the training step before."""


class DeadlineError(SkyrlTrainError, TimeoutError):
    """`what` did not answer within `timeout_s`."""

    def __init__(self, what: str, timeout_s: float, remedy: str = ""):
        super().__init__(f"{what} did not answer within {timeout_s:g} s. {remedy}".rstrip())
        self.what = what
        self.timeout_s = timeout_s


class EngineError(SkyrlTrainError):
    """The inference engine refused a request or died."""


class EngineDeadError(EngineError):
    """This engine answers nothing any more: a process of it is gone, or it broke. Another one may answer."""


class SandboxError(SkyrlTrainError):
    """A sandbox could not be had, or a command not be started in it."""


class ActorError(SkyrlTrainError):
    """An actor died or raised what nobody expected; says which, where, in which phase, and what it wrote last."""


class ActorLostError(ActorError):
    """An actor died, gives no sign of life, or lets everybody wait: nothing says that it would happen again, so that the run
    goes on from its last checkpoint (`trainer.max_restarts`)."""

    def __init__(self, message: str, *, phase: str = ""):
        """`phase` of the run in which it was noticed: one that was lost in `start` had never worked."""
        super().__init__(message)
        self.phase = phase


class CollectiveError(ActorLostError):
    """A collective among ranks broke off, on a rank that is well: another one is gone or did not come."""


class StopRequested(SkyrlTrainError):
    """A signal asked for a stop. The checkpoint at `global_step` is written."""

    def __init__(self, signal_name: str, global_step: int):
        super().__init__(f"stopped by {signal_name} after step {global_step}")
        self.signal_name = signal_name
        self.global_step = global_step


def counted(count: int, name: str, spec: str = "") -> str:
    """Return `1 step`, `3 steps`, `2 batches`, `4 trajectories`. `spec` is the count's format, `,` say.

    Example:
        >>> counted(1, "held-out prompt"), counted(2048, "batch", ",")
        ('1 held-out prompt', '2,048 batches')
    """
    if count != 1:
        name = name[:-1] + "ies" if name.endswith("ry") else name + ("es" if name.endswith("ch") else "s")
    return f"{count:{spec}} {name}"


def every(count: int, name: str) -> str:
    """Return `every step`, `every 3 steps`."""
    return f"every {name}" if count == 1 else f"every {counted(count, name)}"


def three_digits(value: float) -> str:
    """Return a number with three digits that count, and whole ones in full: `0.0123`, `1.89`, `15.6`, `1,024`."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def byte_size(count: float) -> str:
    """Return `512 B`, `1.89 kB`, `3.93 MB`, up to TB, of powers of 1000."""
    units = ("B", "kB", "MB", "GB", "TB")
    power = 0
    while power < len(units) - 1 and abs(count) >= (1000 if power == 0 else 999.5):
        count, power = count / 1000, power + 1
    return f"{three_digits(count)} {units[power]}"
