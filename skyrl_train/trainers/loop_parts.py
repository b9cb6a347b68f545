"""What the loops of all trainers share: when something is due, a whole export, and the last words of a failed step."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from skyrl_train.errors import NonFiniteError
from skyrl_train.interfaces import Learner


def is_due(step: int, interval: int) -> bool:
    """Whether `step` is one of every `interval`; never for 0."""
    return interval > 0 and step % interval == 0


def export_whole(learner: Learner, folder: Path) -> None:
    """Replaces the export in `folder` by one that is whole at any moment."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    for leftover in (temporary, folder):
        if leftover.exists():
            shutil.rmtree(leftover)
    learner.export_hf(temporary)
    os.rename(temporary, folder)


@contextmanager
def naming_last_checkpoint(last_checkpoint: Callable[[], Path | None]) -> Iterator[None]:
    """Adds to a NonFiniteError where the run can go on from."""
    try:
        yield
    except NonFiniteError as error:
        checkpoint = last_checkpoint()
        kept = f"The last checkpoint is {checkpoint}" if checkpoint else "There is no checkpoint"
        raise NonFiniteError(f"{error} {kept}; it was not touched by this step.") from error
