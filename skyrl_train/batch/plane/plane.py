"""Where the arrays of training rows lie, and what computes with them: in this process, or (`cluster/plane.py`) elsewhere.

    loop      hold(rollouts) --> make_rows(assemble, ...) --> add_columns(estimate, batch) --> ask(batch_metrics, batch)
    in Ray    put once           computed where arrays are, and put there                       read there, numbers come back

The loop is the same in both: it plans on facts of rows, and hands functions of their tokens to the plane.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import Tensor

from skyrl_train.batch.training_batch import TrainingInputBatch
from skyrl_train.types import RolloutBatch

P = ParamSpec("P")
R = TypeVar("R")


class DataPlane:
    """What holds arrays, and does what reads them: this process, where references are the arrays themselves. Functions are
    those of modules, since elsewhere their names travel."""

    def hold(self, rollouts: RolloutBatch) -> RolloutBatch:
        """Return the rollouts, their tokens and texts where whoever reads them finds them."""
        return rollouts

    def make_rows(
        self,
        function: Callable[Concatenate[RolloutBatch, P], TrainingInputBatch],
        rollouts: RolloutBatch,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> TrainingInputBatch:
        """Return `function(rollouts, ...)`, its token columns where whoever computes with them finds them. Raises what it
        raises."""
        return function(rollouts, *args, **kwargs)

    def add_columns(
        self,
        function: Callable[Concatenate[TrainingInputBatch, P], TrainingInputBatch],
        batch: TrainingInputBatch,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> TrainingInputBatch:
        """Return `function(batch, ...)`, which gives the same rows with further columns. Raises what it raises."""
        return function(batch, *args, **kwargs)

    def ask(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return `function(...)`, whose answer is small. Raises what it raises."""
        return function(*args, **kwargs)

    def take_metrics(self) -> Mapping[str, float]:
        """Return what became of arrays since the last time, by the names of metrics."""
        return {}

    def shares(self, rollouts: RolloutBatch) -> Mapping[str, Sequence[int]]:
        """Return the numbers of the prompts whose trajectories lie together, by the name of their place."""
        return {"": range(len(rollouts.prompts))}

    def save(self, function: Callable[..., R], calls: Mapping[str, tuple[Any, ...]]) -> list[R]:
        """Return what `function`, which writes files, gives for the arguments of each place: there, all at the same time
        and beside whatever else is asked. Raises what it raises; SaveError or OSError where a disk does not take it."""
        return [function(*args) for args in calls.values()]


def added_columns(
    before: TrainingInputBatch, after: TrainingInputBatch
) -> tuple[dict[str, Tensor], TrainingInputBatch]:
    """Return the token columns of `after` that `before` lacks, or has otherwise, and `after` with the old ones alone."""
    known = before.token_columns
    added = {name: column for name, column in after.token_columns.items() if known.get(name) is not column}
    return added, replace(after, token_columns=known)
