"""What becomes of a run that cannot write: its disk is full, refuses, or its folder is gone.

A disk that is full now may have room after the next step. What fails is therefore warned about and tried again after each
step, and ends the run after `trainer.max_failed_saves` steps in a row, or where no step follows. The weights of the last
finished step are exported then, if there is room for them.

A folder that was deleted or replaced holds nothing that could be continued, and writing into its successor would hide that:
the run is saved beside it under another name and ends.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from skyrl_train.errors import SaveError, SkyrlTrainError
from skyrl_train.interfaces import Learner
from skyrl_train.telemetry import HeldFolder, RunFolder
from skyrl_train.telemetry.logs import RunConsole
from skyrl_train.trainers.checkpoints.resume import mark_complete

_TRIES = 1000
"""Names for a folder beside a lost one."""


class Saves:
    """Counts the steps at which something could not be written, and ends the run where that goes on."""

    def __init__(self, folder: RunFolder, console: RunConsole, *, max_failures: int, policy: Learner) -> None:
        """`max_failures`: steps in a row; the last of them ends the run. `policy`: whose weights are exported then."""
        self._folder, self._console, self._policy = folder, console, policy
        self._max_failures = max_failures
        self._held = HeldFolder(folder)
        self._problems: list[str] = []
        self._num_failures = 0

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Wraps what writes; that it could not is said when the step is settled."""
        try:
            yield
        except (OSError, SaveError) as error:
            self._problems.append(str(error))

    def complete(self, step: int) -> None:
        """Marks the run as complete after its last step. Raises SaveError where that cannot be written, or the folder that
        the run began in is gone."""
        if not self._held.is_there():
            raise SaveError(
                f"output_dir={self._folder.root} was deleted or replaced after step {step}, the last: what it held is lost"
            )
        try:
            mark_complete(self._folder, step)
        except OSError as error:
            raise SaveError(
                f"{self._folder.complete_file} could not be written: {error}. Make room; the same command ends the run then"
            ) from error

    @property
    def has_failed(self) -> bool:
        """Whether something could not be written since the last step was settled, or at that step."""
        return bool(self._problems) or self._num_failures > 0

    def settle(
        self,
        step: int,
        rescue: Callable[[RunFolder], Path],
        *,
        can_retry: bool,
        weights_of: int | None = None,
    ) -> None:
        """Called when all of a finished step was attempted. `rescue(folder)` saves the run there, and returns the place.

        `can_retry`: another attempt follows. `weights_of`: the step that the policy's weights are of, if it is a later one.
        Raises SaveError where the run ends.
        """
        if not self._held.is_there():
            raise SaveError(self._rescued(step if weights_of is None else weights_of, rescue))
        for path in self._held.take_lost():
            self._console.warn(f"{path} was deleted or cut: what it held is lost, and the run goes on without that")
        problems, self._problems = self._problems, []
        self._num_failures = self._num_failures + 1 if problems else 0
        if not problems:
            return
        listed = "; ".join(dict.fromkeys(problems))
        if can_retry and self._num_failures < self._max_failures:
            self._console.warn(
                f"step {step} could not be written in full ({self._num_failures} of at most "
                f"trainer.max_failed_saves={self._max_failures} steps in a row): {listed}. It is tried again after "
                "the next step"
            )
            return
        whose = "Its weights" if weights_of is None else f"The weights of step {weights_of}"
        raise SaveError(f"step {step} could not be written in full: {listed}. {self._exported(whose)}")

    def _exported(self, whose: str) -> str:
        try:
            export_whole(self._policy, self._folder.export)
        except (OSError, SkyrlTrainError) as error:
            return f"{whose} could not be exported either: {error}"
        return f"{whose} are in {self._folder.export}"

    def _rescued(self, step: int, rescue: Callable[[RunFolder], Path]) -> str:
        """Saves the run in a new folder beside the one that is gone, or among temporary files; says where."""
        lost = self._folder.root.absolute()
        said = f"output_dir={lost} was deleted or replaced while the run was writing to it"
        for parent in (lost.parent, Path(tempfile.gettempdir())):
            try:
                fresh = RunFolder(_fresh_folder(parent, f"{lost.name}-rescued"))
                place = rescue(fresh)
                export_whole(self._policy, fresh.export)
            except (OSError, SkyrlTrainError) as error:
                said += f"; {parent}: {error}"
                continue
            return (
                f"{said}. Step {step} is saved in {place}, its weights are in {fresh.export}. Go on with "
                f"trainer.resume_mode=from_path trainer.resume_path={place}"
            )
        return f"{said}. Nothing could be saved elsewhere"


def export_whole(policy: Learner, folder: Path) -> None:
    """Replaces the export in `folder` by one that is whole at any moment. Raises SaveError where the disk refuses, with what
    could not be finished removed, and what the policy raises."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    for leftover in (temporary, folder):
        if leftover.exists():
            shutil.rmtree(leftover)
    try:
        policy.export_hf(temporary)
        temporary.rename(folder)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise SaveError(f"{folder}: the model could not be exported: {error}") from error
        raise


def _fresh_folder(parent: Path, name: str) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    for number in range(1, _TRIES):
        folder = parent / f"{name}-{number}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise SaveError(f"{parent} has {_TRIES} folders of that name")
