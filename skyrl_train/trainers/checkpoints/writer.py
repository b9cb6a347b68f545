"""A run writes its checkpoints, beside its steps where the host's memory has room for copies of the models.

    loop      step 10 | hold | step 11 | step 12 | step 13 ...        `timing/checkpoint` is the time of `hold`
    thread            | write, hash, seal, upload |                   `timing/background/checkpoint` is this one's

One save is under way at most: the next one waits for it (`timing/wait/checkpoint`), and so does whatever reads a checkpoint
or ends the run. What became of it is told to the loop, behind one of its next steps. Without copies the loop waits for the
disk itself.

A disk that is full now may have room after the next step. What fails is therefore warned about and tried again after each
step, and ends the run after `trainer.max_failed_saves` steps in a row, or where no step follows. The weights of the last
finished step are exported then, if there is room for them.

A folder that was deleted or replaced holds nothing that could be continued, and writing into its successor would hide that:
the run is saved beside it under another name and ends.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from skyrl_train.config import LoopConfig
from skyrl_train.errors import DeadlineError, SaveError, SkyrlTrainError
from skyrl_train.interfaces import HeldState, Learner
from skyrl_train.system import WorkerThread
from skyrl_train.system.files import write_json
from skyrl_train.telemetry import HeldFolder, RunFolder
from skyrl_train.telemetry.logs import RunConsole
from skyrl_train.trainers.checkpoints.store import CheckpointStore
from skyrl_train.trainers.observers import Observers
from skyrl_train.trainers.step_timer import StepTimer

JOIN_TIMEOUT_S = 2 * 3600.0
"""For a save that is under way: the disk, a URL and the ranks have shorter deadlines of their own for each of its calls."""
_TRIES = 1000
"""Names for a folder beside a lost one."""

Hold = Callable[..., HeldState]
"""`hold(copies=...)` gives the state of the run, models included, after the step in question."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """What became of a save."""

    step: int
    paths: Mapping[CheckpointStore, Path]
    """The checkpoint in each store that took it."""
    errors: Sequence[Exception]
    """Of the stores that did not."""
    seconds: float


class CheckpointWriter:
    """Writes checkpoints of one run on a thread, one at a time."""

    def __init__(self) -> None:
        self._thread = WorkerThread("checkpoint")
        self._step = 0
        self._under_way: Future[Written] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way."""
        return self._under_way is not None and not self._under_way.done()

    @property
    def is_idle(self) -> bool:
        """Whether no save is under way, and of none it is unknown what became of it."""
        return self._under_way is None

    def begin(self, step: int, held: HeldState, stores: Sequence[CheckpointStore]) -> Written | None:
        """Have the state of `step` written to the stores, in their order, and return at once; where it is no copy, write it,
        and return what became of that. The save before has been collected. Raises OSError."""
        assert self.is_idle, "what became of the save before is not known"
        finishes = {store: store.begin(step) for store in stores}

        def write() -> Written:
            started, paths, errors = time.monotonic(), {}, []
            for store, finish in finishes.items():
                try:
                    paths[store] = finish(held.write)
                except Exception as error:  # of any kind: it is raised in the loop
                    errors.append(error)
            return Written(step=step, paths=paths, errors=errors, seconds=time.monotonic() - started)

        if not held.is_copied:
            return write()
        self._step, self._under_way = step, self._thread.submit(write)
        return None

    def collect(self, *, waits: bool) -> Written | None:
        """Return what became of the save that was under way, once; None where there is none, or where it goes on and nobody
        `waits`."""
        pending = self._under_way
        if pending is None or (not waits and not pending.done()):
            return None
        self._under_way = None
        try:
            return pending.result(JOIN_TIMEOUT_S)
        except FutureTimeoutError:
            error = DeadlineError(f"the checkpoint of step {self._step}", JOIN_TIMEOUT_S, "Is the disk reachable?")
            return Written(step=self._step, paths={}, errors=[error], seconds=JOIN_TIMEOUT_S)

    def close(self) -> None:
        """End the thread, behind what it does."""
        self._thread.close(0.0)


class Saves:
    """Saves one run: its checkpoints, and at its end its export. Counts the steps at which something could not be written,
    and ends the run where that goes on."""

    def __init__(
        self,
        *,
        folder: RunFolder,
        store: CheckpointStore,
        last_checkpoint: Path | None,
        last_step: int,
        policy: Learner,
        trainer: LoopConfig,
        console: RunConsole,
        timer: StepTimer,
        observers: Observers,
        flush_record: Callable[[], None],
    ) -> None:
        """`last_checkpoint`: the one that the run goes on from, of `last_step`. `policy`: whose weights are exported where
        the run cannot go on. `flush_record` brings the record to the disk, which a checkpoint follows."""
        self._folder, self._store, self._policy, self._flush_record = folder, store, policy, flush_record
        self._console, self._timer, self._observers = console, timer, observers
        self._max_failures, self._copies = trainer.max_failed_saves, trainer.background_checkpoints
        self._writer, self._held = CheckpointWriter(), HeldFolder(folder)
        self._problems: list[str] = []
        self._num_failures = 0
        self.last_checkpoint, self.last_step = last_checkpoint, last_step

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Wraps what writes; that it could not is said when the step is settled."""
        try:
            yield
        except (OSError, SaveError) as error:
            self._problems.append(str(error))

    @property
    def has_failed(self) -> bool:
        """Whether something could not be written since the last step was settled, or at that step."""
        return bool(self._problems) or self._num_failures > 0

    @property
    def is_last_lost(self) -> bool:
        """Whether the last checkpoint was deleted. Behind a save that is under way it may have been, as too old."""
        return self._writer.is_idle and self.last_checkpoint is not None and not self.last_checkpoint.is_dir()

    def save(self, step: int, hold: Hold, stores: Sequence[CheckpointStore], *, can_retry: bool = False) -> None:
        """The checkpoint of `step` in each of `stores`, after the records that belong to it; without any, what became of the
        records alone. `can_retry`: another attempt follows. Raises SaveError where that ends the run.

        The run waits for one that nothing follows, and for one in the place of one that failed.
        """
        if stores:
            with self.attempt():
                self._flush_record()
                copies = self._copies and can_retry and not self.has_failed
                with self._timer.phase("checkpoint"), self._console.phase("checkpoint"):
                    held = hold(copies=copies)
                    if copies and not held.is_copied:
                        self._copies = False
                        self._console.warn(
                            "the memory of a host has no room for a copy of the models: the run waits while its checkpoints "
                            "are written, as with trainer.background_checkpoints=false"
                        )
                    written = self._writer.begin(step, held, stores)
                if written is not None:
                    self._note(written)
        self._settle(step, hold, can_retry=can_retry)

    def collect(self, step: int, hold: Hold, *, waits: bool) -> None:
        """Takes note of the save that was under way, if it is done or has to be. One that failed counts as the step of its
        own that it is. `step`: the one that the models are of by now. Raises SaveError where that ends the run."""
        if waits and self._writer.is_busy:
            with self._timer.phase("checkpoint"), self._console.phase("checkpoint"), self._timer.wait("checkpoint"):
                written = self._writer.collect(waits=True)
        else:
            written = self._writer.collect(waits=False)
        if written is not None:
            self._timer.add("background/checkpoint", written.seconds)
            with self.attempt():
                self._note(written)
            if written.errors:
                self._settle(written.step, hold, can_retry=True, weights_of=step)

    def close(self) -> None:
        """Waits for the save that is under way."""
        if (written := self._writer.collect(waits=True)) is not None:
            try:
                self._note(written)
            except Exception as error:  # there is an error already, or the signal's end of the run
                self._console.warn(f"the checkpoint of step {written.step} could not be written: {error}")
        self._writer.close()

    def complete(self, step: int) -> None:
        """Marks the run as complete after its last step. Raises SaveError where that cannot be written, or the folder that
        the run began in is gone."""
        if not self._held.is_there():
            raise SaveError(
                f"output_dir={self._folder.root} was deleted or replaced after step {step}, the last: what it held is lost"
            )
        try:
            write_json(self._folder.complete_file, {"global_step": step})
        except OSError as error:
            raise SaveError(
                f"{self._folder.complete_file} could not be written: {error}. Make room; the same command ends the run then"
            ) from error

    def _note(self, written: Written) -> None:
        """Tells of checkpoints that are there. Raises what kept the first other one from being."""
        for store, path in written.paths.items():
            if store is self._store:
                self.last_checkpoint, self.last_step = path, written.step
            self._observers.tell("checkpoint", written.step, path=path)
        for error in written.errors:
            raise error

    def _settle(self, step: int, hold: Hold, *, can_retry: bool, weights_of: int | None = None) -> None:
        """Called when all of a finished step was attempted. `weights_of`: the step that the models are of, if it is a later
        one. Raises SaveError where the run ends."""
        if not self._held.is_there():
            raise SaveError(self._rescued(step if weights_of is None else weights_of, hold))
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
        try:
            export_whole(self._policy, self._folder.export)
            exported = f"{whose} are in {self._folder.export}"
        except (OSError, SkyrlTrainError) as error:
            exported = f"{whose} could not be exported either: {error}"
        raise SaveError(f"step {step} could not be written in full: {listed}. {exported}")

    def _rescued(self, step: int, hold: Hold) -> str:
        """Saves the run in a new folder beside the one that is gone, or among temporary files; says where."""
        lost = self._folder.root.absolute()
        said = f"output_dir={lost} was deleted or replaced while the run was writing to it"
        for parent in (lost.parent, Path(tempfile.gettempdir())):
            try:
                fresh = RunFolder(_fresh_folder(parent, f"{lost.name}-rescued"))
                place = CheckpointStore(fresh.checkpoints, keep=1).write(step, hold(copies=False).write)
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
    try:
        for leftover in (temporary, folder):
            if leftover.exists():
                shutil.rmtree(leftover)
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
