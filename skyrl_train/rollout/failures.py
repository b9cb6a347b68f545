"""The one place where something that broke becomes a `Failure`: data with a reason, never a number."""

from __future__ import annotations

from skyrl_train.types import Failure, FailureKind


class Broken(Exception):
    """A guarded call (environment or engine) broke one trajectory. Raised at the boundary, caught by the agent loop.

    Whatever else is raised in the loop is a programming error and propagates.
    """

    def __init__(self, kind: FailureKind, message: str):
        super().__init__(message)
        self.kind = kind
        self.message = message

    def to_failure(self, turn_index: int) -> Failure:
        return Failure(kind=self.kind, message=self.message, turn_index=turn_index)


def describe(error: BaseException) -> str:
    """`ValueError: unknown city 'Oz'`, in one line of at most 500 characters."""
    text = " ".join(str(error).split())
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return line if len(line) <= 500 else line[:497] + "..."
