"""What a run leaves behind in OUTPUT_DIR, and where: the names of its files, and moving an older run out of the way."""

from __future__ import annotations

import fcntl
import os
import platform
import shlex
import shutil
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_train.errors import SkyrlTrainError
from skyrl_train.system.files import bring_to_disk, keep_private, make_folder, sync_folder
from skyrl_train.telemetry.logs.redaction import redact_text

STATE_FILE = "trainer_state.json"
"""In a checkpoint: what it knows beside the models (`trainers/checkpoints/state.py`)."""
_GIT_TIMEOUT_S = 5.0


class _Inside:
    """A path within the run's folder."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, folder: RunFolder, owner: type[RunFolder]) -> Path:
        return folder.root / self.name


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run. Nothing is created before `create`."""

    root: Path

    # Beside `run.log`, which every run appends to: what the console showed, Python's logging, errors with their tracebacks.
    complete_file = _Inside("complete.json")  # written last: the run has nothing left to do
    checkpoints = _Inside("checkpoints")  # the last few, verified by sums
    capsules = _Inside("capsules")  # all it takes to execute the last `trainer.capsules` steps again (docs/capsules.md)
    best = _Inside("best")  # supervised: the checkpoint with the lowest held-out loss
    metrics_file = _Inside("metrics.jsonl")  # one record a step
    rollouts = _Inside(
        "rollouts"
    )  # every trajectory, Parquet, a file a step; `failed_step_N` of one that ended by an error
    segments = _Inside("segments")  # `placement.rollouts=engines`: what engines made for the step that runs
    images = _Inside("images")  # those that the run used, by their sums
    journal = _Inside("journal")  # `trainer.max_staleness`: each turn, group and batch of the stream, before it is used
    samples = _Inside("samples")  # supervised: answers at each evaluation, JSON lines
    evaluation_file = _Inside("evaluation.json")  # each evaluation on the held-out prompts
    learning_curve_file = _Inside("learning_curve.png")  # reward, accuracy and response length over steps
    timeline_file = _Inside("timeline.jsonl")  # what ran when, a line a step
    timeline_image = _Inside("timeline.png")  # drawn of it at the end
    export = _Inside("export")  # the final policy in Hugging Face format
    profiles = _Inside("profiles")  # `trainer.profile_steps`: traces and snapshots of memory
    tensorboard = _Inside("tensorboard")  # this and the next three where those trackers are on
    wandb = _Inside("wandb")
    trackio = _Inside("trackio")
    mlflow = _Inside("mlflow")
    config_file = _Inside("config.yaml")  # the resolved configuration, secrets redacted
    plan_file = _Inside("plan.json")  # every size that was derived from it
    environment_file = _Inside("environment.json")  # command, versions and commit that it was made with
    fork_file = _Inside("fork.json")  # a run that began at another's checkpoint: which, and every setting that changed
    memory_file = _Inside("memory.json")  # micro-batches that size themselves: probes and budgets
    restarts_file = _Inside("restarts.jsonl")  # on Ray: each time it went on by itself after a worker was lost, and why
    origin = _Inside("origin")  # the checkpoint that the run began at, where it came from another run's URL

    def create(self, *, private: bool = False) -> None:
        """Makes the folder, `private` for its owner alone where it is new. Raises SkyrlTrainError where that is impossible,
        before any time is spent on models."""
        try:
            make_folder(self.root)
            if private:
                keep_private(self.root)
        except OSError as error:
            raise SkyrlTrainError(
                f"output_dir={self.root} cannot be made ({error.strerror}). Choose another with output_dir=..."
            ) from error
        if not os.access(self.root, os.W_OK | os.X_OK):
            raise SkyrlTrainError(f"output_dir={self.root} is not writable. Choose another with output_dir=...")

    def _files(self) -> list[Path]:
        """Return all that a run writes, beginning with what marks it as finished; the checkpoint it began at is none."""
        names = [each.name for each in vars(RunFolder).values() if isinstance(each, _Inside)]
        return [self.root / name for name in names if name != "origin"]

    def holds_a_run(self) -> bool:
        """True where a run left results: a step's metrics, a rollout, an answer or a checkpoint."""
        results = (self.metrics_file, self.rollouts, self.journal, self.samples, self.checkpoints, self.evaluation_file)
        return any(path.stat().st_size if path.is_file() else path.is_dir() and any(path.iterdir()) for path in results)

    def record(self, *, is_same_run: bool) -> dict[str, bytes]:
        """Returns metrics, evaluations and origin as they are now, by the names of their files, for a run that goes on from
        this one, so that its curves are whole; for one that `is_same_run` what was measured and how often it began again,
        too."""
        own = (self.memory_file, self.restarts_file) if is_same_run else ()
        files = (self.metrics_file, self.evaluation_file, self.fork_file, *own)
        return {path.name: path.read_bytes() for path in files if path.is_file()}

    def set_aside(self) -> Path | None:
        """Moves the files of the run that is here to `previous-N/`; None where there is none. Nothing is deleted."""
        if not self.holds_a_run():
            return None
        return self._move_to_previous(self._files())

    def discard(self) -> None:
        """Removes what a run left that is begun again in the same way: it will write the same once more. Budgets that were
        measured stay, and so do the identity of its curves at a tracker and what was generated for a stream; and what tells
        that it is the same run, since this may be cut short."""
        kept = (self.wandb, self.trackio, self.mlflow, self.journal, self.memory_file, self.config_file, self.plan_file)
        for path in self._files():
            if path in kept:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            elif path.is_file():
                path.unlink()

    def set_aside_checkpoints_after(self, step: int) -> Path | None:
        """Moves checkpoints of later steps to `previous-N/`, so that going back to `step` cannot resume past it."""
        later = [folder for folder in self.checkpoints.glob("step_*") if _step_of(folder) > step]
        return self._move_to_previous(later) if later else None

    def _move_to_previous(self, paths: Sequence[Path]) -> Path:
        number = 1
        while (target := self.root / f"previous-{number}").exists():
            number += 1
        for path in paths:
            if path.exists():
                destination = target / path.relative_to(self.root)
                destination.parent.mkdir(parents=True, exist_ok=True)
                path.rename(destination)
        sync_folder(self.root)
        return target

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes from writing here at the same time. The system lets go when the process dies.

        Raises SkyrlTrainError naming the process that holds the folder.
        """
        with ExitStack() as stack:
            try:
                folder = os.open(self.root, os.O_RDONLY)
                stack.callback(os.close, folder)
                file = stack.enter_context((self.root / ".lock").open("a+"))
            except OSError as error:
                raise SkyrlTrainError(
                    f"output_dir={self.root} cannot be locked ({error.strerror}). Choose another with output_dir=..."
                ) from error
            for descriptor in (file.fileno(), folder):  # the folder, too: somebody may delete the file meanwhile
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    file.seek(0)
                    raise SkyrlTrainError(
                        f"{self.root} is being written by another run (process {file.read().strip() or 'unknown'}). "
                        "Wait for it, stop it, or choose another output_dir=..."
                    ) from error
                except OSError:
                    pass  # a file system without locks; the check is a courtesy
            with suppress(
                OSError
            ):  # what follows from names that a killed process gave just before must not outlast them
                bring_to_disk(folder, self.root)
            with suppress(OSError):  # who holds the lock is a courtesy, too
                os.truncate(file.fileno(), 0)
                os.write(file.fileno(), f"{os.getpid()}\n".encode())
            yield


class HeldFolder:
    """A run's folder that stays open, so that its removal shows, and that of its files, whatever takes its name."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._descriptor = os.open(folder.root, os.O_RDONLY)
        self._is_prepared = folder.config_file.exists()
        self._amounts: dict[Path, int] = {}
        weakref.finalize(self, os.close, self._descriptor)

    def is_there(self) -> bool:
        """Whether the path still leads to this folder, with what was in it from the start."""
        try:
            is_same = os.path.samestat(os.fstat(self._descriptor), os.stat(self._folder.root))
        except OSError:  # gone, or its file system is
            return False
        return is_same and (self._folder.config_file.exists() or not self._is_prepared)

    def take_lost(self) -> list[Path]:
        """Return what of the run's record has been deleted or cut since the last look. A few files of `rollouts/` are no
        loss: who needs none may delete them, as `rollouts.keep_last` does."""
        folder = self._folder
        files = (folder.metrics_file, folder.evaluation_file, folder.timeline_file, folder.root / "run.log")
        before, self._amounts = (
            self._amounts,
            {path: _amount(path) for path in (*files, folder.rollouts, folder.journal)},
        )
        return [
            path for path, amount in self._amounts.items() if amount * (1 if path in files else 2) < before.get(path, 0)
        ]


def _amount(path: Path) -> int:
    """Bytes of a file, entries of a folder; 0 where there is neither."""
    try:
        return sum(1 for _ in path.iterdir()) if path.is_dir() else path.stat().st_size
    except OSError:
        return 0


def _step_of(folder: Path) -> int:
    """Step of `step_000010`; -1 for a name that has none."""
    digits = folder.name.removeprefix("step_")
    return int(digits) if digits.isdigit() else -1


def environment_of_run(code: Path, versions: Mapping[str, str], arguments: Sequence[str] = sys.argv) -> dict[str, Any]:
    """Return the content of `environment.json` for the code in a folder and the versions of its libraries; null for what is
    not known, such as the commit of code that is in no repository."""
    commit, dirty, _ = git_commit(code).partition("-dirty")
    return {
        "command": redact_text(shlex.join([Path(arguments[0]).name, *arguments[1:]])) if arguments else None,
        "git_commit": commit or None,
        "git_dirty": bool(dirty) if commit else None,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version for name, version in versions.items() if name != "python"},
    }


def git_commit(code: Path) -> str:
    """Return the commit of the code in a folder, with `-dirty` where files differ from it; empty where git knows none, is
    not there or does not answer."""
    command = ["git", "-C", str(code), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
