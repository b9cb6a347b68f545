"""Checkpoints that are either whole or absent.

    checkpoints/
      latest                    text: the name of the newest checkpoint, e.g. `step_000010`
  writer                    text: who this folder is at the URL, if checkpoints are brought to one
      step_000010/
        ...                     whatever the caller wrote
        manifest.json           size and SHA-256 of every other file; written last
      .tmp-...                  a write or a removal that was cut short; taken away by the next write

A checkpoint is written under a `.tmp-` name, each file is brought to the disk (fsync), then the manifest, then the
folder is renamed and `latest` replaced. A process killed at any moment leaves the state of before or of after. Nothing
in a checkpoint is parsed before its sums are checked.

With a URL (`trainer.checkpoint_url`) each is then brought there as well (`object_store.py`), and a folder that lacks the
newest gets it from there.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from skyrl_train.errors import CheckpointError, SaveError
from skyrl_train.system.files import DISK_TIMEOUT_S, FileSums, sync_folder, write_atomically
from skyrl_train.telemetry import RunFolder
from skyrl_train.trainers.checkpoints.manifest import check_sizes, read_manifest, seal, verify
from skyrl_train.trainers.checkpoints.object_store import ObjectStore, is_url, split_url, step_of
from skyrl_train.trainers.checkpoints.state import STATE_FILE, TrainerState

LATEST = "latest"
HISTORY = "history"
"""Folder of a checkpoint at a URL: the run's record up to there."""
_WRITER = "writer"
_TEMPORARY = ".tmp-"
_REPLACED = ".tmp-replaced-"
_NAME = re.compile(r"step_(\d{6,15})")

WriteState = Callable[[Path], FileSums | None]
"""Fills a folder, and returns the sums of those of its files that are hashed and on the disk."""

logger = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of a run, one folder each in `root`, of which the newest `keep` stay; and those at a URL."""

    def __init__(self, root: Path, *, keep: int, url: str = "", timeout_s: float = DISK_TIMEOUT_S) -> None:
        """`url`: where each checkpoint is brought as well, if it is not empty. `timeout_s`: deadline of moving one."""
        self._root, self._keep, self._timeout_s = root, keep, timeout_s
        self._remote = self._store(url) if url else None
        self.fetched: Path | None = None
        """The checkpoint that came from a URL last; what it knows of its run's record is in `history/`."""

    def check(self) -> None:
        """Raises SaveError where there is a URL and it cannot be written to."""
        if self._remote is not None:
            self._remote.check()

    def begin(self, step: int) -> Callable[[WriteState], Path]:
        """Returns what writes the checkpoint of `step`, on any thread, and returns its folder, as `write_checkpoint` does.
        What of the run's record belongs to it is read now. It raises SaveError also where the URL does not take the
        checkpoint; the local one is there then. Raises OSError."""
        record = {} if self._remote is None else RunFolder(self._root.parent).record(is_same_run=True)

        def finish(write: WriteState) -> Path:
            def write_with_history(folder: Path) -> FileSums | None:
                known = write(folder)
                if self._remote is not None:
                    (folder / HISTORY).mkdir()
                    for name, content in record.items():
                        (folder / HISTORY / name).write_bytes(content)
                return known

            path = write_checkpoint(self._root, step, write_with_history, self._keep)
            if self._remote is not None:
                self._upload(path)
            return path

        return finish

    def write(self, step: int, write: WriteState) -> Path:
        """Write the checkpoint of `step` at once, and return its folder. Raises as `begin` and what that returns."""
        return self.begin(step)(write)

    def clean(self) -> None:
        """Removes what a write that was cut short left behind, as `clean_leftovers` does."""
        if self._root.is_dir():
            with suppress(OSError):  # a disk that lets nothing be changed can still be read
                clean_leftovers(self._root)

    def tidy(self, newest: Path | None = None) -> None:
        """Removes what a run that was killed had no time for: checkpoints older than the `keep` that end with `newest`, by
        default the newest that can be used."""
        self.clean()
        with suppress(OSError, CheckpointError):
            local = latest_checkpoint(self._root, require_usable) if newest is None else newest
            if len(_candidates(self._root, [])) > self._keep and local is not None:
                _prune(self._root, self._keep, local)

    def take_over(self, checkpoint: Path | None) -> None:
        """Has the URL, if there is one, hold what a run that goes on from `checkpoint` of this folder, or begins, has: later
        ones are set aside there, and this one is brought there where it is not. Raises SaveError."""
        if self._remote is None:
            return
        step = -1 if checkpoint is None else TrainerState.read(checkpoint).global_step
        there = self._remote.claim(self._writer(), after=step)
        if checkpoint is not None and self._remote.name_of(checkpoint) not in there.checkpoints:
            self._upload(checkpoint)

    def latest(self) -> Path | None:
        """Return the newest checkpoint that can be used, as `latest_checkpoint` does. Where there is a URL, that is the
        newest of this folder and of the URL, or of the URL alone where another folder has written there since; it is
        brought here. Raises CheckpointError."""
        if self._remote is None:
            return latest_checkpoint(self._root, require_usable)
        local, damaged = None, None
        try:
            local = latest_checkpoint(self._root, require_usable)
        except CheckpointError as error:
            damaged = error
        there = self._remote.pointer()
        is_own = local is not None and there.writer in ("", self._writer())
        newer = [
            name
            for name in there.checkpoints
            if local is None or not is_own or step_of(name) > TrainerState.read(local).global_step
        ]
        found = self._fetch(self._remote, newer, self._root, has_other=local is not None, known=local)
        if found is None and damaged is not None:
            raise damaged
        return found or local

    def find(self, place: str) -> Path:
        """Return the checkpoint at `place`, or the newest whole one of the run whose output folder (or `checkpoints/`), or
        URL, it is. One of another run's URL is brought to `origin/` of this run's folder. Raises CheckpointError."""
        if is_url(place):
            return self._find_at_url(place)
        path = Path(place).expanduser()
        if not path.is_dir():
            raise CheckpointError(
                f"trainer.resume_path={path} is not a folder. Give a run's output folder or a checkpoint"
            )
        for root in (path / "checkpoints", path):
            if root.is_dir() and (found := latest_checkpoint(root, require_usable)) is not None:
                return found
        require_usable(path)
        return path

    def _find_at_url(self, place: str) -> Path:
        url, name = split_url(place)
        for each in (f"{url}/{self._root.name}", url):
            is_own = self._remote is not None and self._remote.url == each
            store = self._remote if is_own and self._remote else self._store(each)
            names = [name] if name and each == url else [] if name else store.pointer().checkpoints
            root = self._root if is_own else RunFolder(self._root.parent).origin
            if not is_own:
                shutil.rmtree(root, ignore_errors=True)
            if (found := self._fetch(store, names, root, has_other=False)) is not None:
                return found
        raise CheckpointError(f"trainer.resume_path={place}: there is no checkpoint")

    def _fetch(
        self, store: ObjectStore, names: Sequence[str], root: Path, *, has_other: bool, known: Path | None = None
    ) -> Path | None:
        """The first of `names` that is whole, brought to `root` unless it is the one `known`; where all are damaged or gone,
        what lies beside them. None where there is none.

        Raises CheckpointError where all are damaged, unless the run `has_other` checkpoints; SaveError where the store
        does not answer, which says nothing of what it holds.
        """
        problems: list[str] = []

        def candidates() -> Iterator[str]:
            yield from names
            if problems:
                yield from store.beside(names)

        for name in candidates():
            if known is not None and store.name_of(known) == name:
                return known
            temporary = root / f"{_TEMPORARY}{name}"
            try:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
                store.download(name, temporary)
                require_usable(temporary)
                if TrainerState.read(temporary).global_step != step_of(name):
                    raise CheckpointError(f"{store.url}/{name}: {STATE_FILE} is of another step")
            except CheckpointError as error:
                shutil.rmtree(temporary, ignore_errors=True)
                if isinstance(error, SaveError):
                    raise
                problems.append(str(error).replace(str(temporary), f"{store.url}/{name}"))
                continue
            for problem in problems:
                logger.warning("checkpoint passed over: %s", problem)
            self.fetched = _install(root, temporary, root / checkpoint_name(step_of(name)))
            return self.fetched
        if problems and not has_other:
            raise _none_whole(store.url, problems)
        for problem in problems:
            logger.warning("checkpoint passed over: %s", problem)
        return None

    def _upload(self, folder: Path) -> None:
        assert self._remote is not None, "there is a URL"
        try:
            self._remote.upload(folder, writer=self._writer())
        except SaveError as error:
            raise SaveError(f"{error}. {folder} is whole") from error

    def _store(self, url: str) -> ObjectStore:
        return ObjectStore(url, keep=self._keep, timeout_s=self._timeout_s)

    def _writer(self) -> str:
        """The identity of this folder, which one that takes its place elsewhere does not have."""
        path = self._root / _WRITER
        if not path.is_file():
            write_atomically(path, f"{uuid4().hex}\n".encode())
        return path.read_text(encoding="ascii", errors="replace").strip()


def require_usable(folder: Path) -> None:
    """Raises CheckpointError unless the checkpoint verifies, and its state is one that a run may have written and is of the
    step in the folder's name."""
    verify(folder)
    step, match = TrainerState.read(folder).global_step, _NAME.fullmatch(folder.name)
    if match and int(match.group(1)) != step:
        raise CheckpointError(
            f"{folder}: {STATE_FILE} is of global_step {step}: the folder was renamed. It was {checkpoint_name(step)}"
        )


def checkpoint_name(step: int) -> str:
    """Return the name of the checkpoint of `step`, e.g. `step_000010`."""
    return f"step_{step:06d}"


def write_checkpoint(root: Path, step: int, write: WriteState, keep: int) -> Path:
    """Writes the checkpoint of `step` and returns its folder; the newest `keep` whole ones stay, older ones go.

    `write` fills the (empty) folder it is given, and returns the sums that it knows. An existing checkpoint of the same
    step is replaced.
    Raises SaveError where the disk refuses (no space, no permission); what was there before is as it was, and what was
    written of this one is removed.
    """
    final = root / checkpoint_name(step)
    temporary = root / f"{_TEMPORARY}{final.name}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        clean_leftovers(root)
        temporary.mkdir()
        seal(temporary, write(temporary))
        _install(root, temporary, final)
        clean_leftovers(root)
        _prune(root, keep, final)
        sync_folder(root)
    except (OSError, CheckpointError) as error:
        with suppress(OSError):
            clean_leftovers(root)
        if isinstance(error, CheckpointError):
            raise
        raise SaveError(
            f"{final}: could not be written: {error}. Earlier checkpoints are untouched; make room or choose another "
            "output folder"
        ) from error
    return final


def _install(root: Path, temporary: Path, final: Path) -> Path:
    """Gives a whole checkpoint its name, which it returns, and has `latest` name it."""
    if final.exists():
        os.rename(final, root / f"{_REPLACED}{final.name}")
    os.rename(temporary, final)
    sync_folder(root)
    write_atomically(root / LATEST, f"{final.name}\n".encode())
    return final


def clean_leftovers(root: Path) -> None:
    """Removes what writes that were cut short left behind, and puts back a checkpoint that was about to be replaced.

    For the process that writes to `root`, at its start; a reader must not call it.
    """
    for leftover in sorted(root.glob(f"{_TEMPORARY}*")):
        target = root / leftover.name.removeprefix(_REPLACED)
        if leftover.name.startswith(_REPLACED) and not target.exists():
            os.rename(leftover, target)
        elif leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


def latest_checkpoint(root: Path, require: Callable[[Path], None] | None = None) -> Path | None:
    """The newest checkpoint under `root` that is whole, or None where there is none at all. `require`, by default `verify`,
    raises CheckpointError for one that is not.

    Prefers the one that `latest` names, then older ones, newest first. Each one that is passed over is reported as a
    warning with the reason. Only reads, so a running trainer's folder may be looked at. Raises CheckpointError where
    there are checkpoints but none is whole.
    """
    problems: list[str] = []
    candidates = _candidates(root, problems)
    for folder in candidates:
        try:
            (require or verify)(folder)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            logger.warning("checkpoint passed over: %s", problem)
        return folder
    if candidates:
        raise _none_whole(root, problems)
    for problem in problems:
        logger.warning("checkpoint passed over: %s", problem)
    return None


def oldest_step(root: Path) -> int | None:
    """Return the step of the oldest checkpoint under `root`, whole or not; None where there is none, or none yet that a loss
    of power leaves: `latest` names one once its name is on the disk, so that one that is being written does not count."""
    try:
        match = _NAME.fullmatch((root / LATEST).read_text(encoding="utf-8", errors="replace").strip())
    except OSError:
        return None
    names = [folder.name.removeprefix(_REPLACED) for folder in _candidates(root, [])]
    oldest = min((int(name.removeprefix("step_")) for name in names), default=None)
    return None if oldest is None or match is None or oldest > int(match.group(1)) else oldest


def _none_whole(place: object, problems: Sequence[str]) -> CheckpointError:
    listed = "\n".join(f"  - {problem}" for problem in problems)
    return CheckpointError(
        f"no checkpoint under {place} is whole:\n{listed}\n"
        "Restore one from a copy, or start over with trainer.resume_mode=none"
    )


def _candidates(root: Path, problems: list[str]) -> list[Path]:
    """Checkpoint folders, the one to try first in front: `latest`, then those before it, then those after it.

    A step after `latest` belongs to a run that was rewound, or to a write that was cut short before `latest` moved.
    """
    folders: dict[int, Path] = {}
    for prefix in ("", _REPLACED):
        for folder in root.glob(f"{prefix}step_*"):
            match = _NAME.fullmatch(folder.name.removeprefix(_REPLACED))
            if match and folder.is_dir():
                folders.setdefault(int(match.group(1)), folder)
    named = max(folders, default=0)
    if (root / LATEST).exists():
        text = (root / LATEST).read_text(encoding="utf-8", errors="replace").strip()
        match = _NAME.fullmatch(text)
        if match and int(match.group(1)) in folders:
            named = int(match.group(1))
        else:
            problems.append(f"{root / LATEST} names {text[:80]!r}, which is not there")
    return [folders[step] for step in sorted(folders, key=lambda step: (step > named, -step))]


def _prune(root: Path, keep: int, newest: Path) -> None:
    """Removes all but `keep` whole checkpoints from `newest` on. A damaged one is removed with those older than it. Raises
    OSError."""
    whole = 0
    candidates = _candidates(root, [])
    if newest not in candidates:
        raise FileNotFoundError(f"{newest} was deleted as soon as it was written")
    for folder in candidates[candidates.index(newest) :]:
        if whole >= keep:
            doomed = root / f"{_TEMPORARY}remove-{folder.name}"
            os.rename(folder, doomed)
            shutil.rmtree(doomed)
            continue
        try:
            check_sizes(folder, read_manifest(folder))
        except CheckpointError:
            continue
        whole += 1
