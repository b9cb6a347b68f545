"""Checkpoints that are either whole or absent.

    checkpoints/
      latest                    text: the name of the newest checkpoint, e.g. `step_000010`
      step_000010/
        ...                     whatever the caller wrote
        manifest.json           size and SHA-256 of every other file; written last
      .tmp-...                  a write or a removal that was cut short; taken away by the next write

A checkpoint is written under a `.tmp-` name, each file is brought to the disk (fsync), then the manifest, then the
folder is renamed and `latest` replaced. A process killed at any moment leaves the state of before or of after. Nothing
in a checkpoint is parsed before its sums are checked.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TypeVar

from skyrl_train.errors import CheckpointError, SaveError
from skyrl_train.telemetry.files import (
    DISK_TIMEOUT_S,
    read_json,
    shown,
    sync_folder,
    whole_number,
    write_atomically,
)
from skyrl_train.threads import map_in_time
from skyrl_train.trainers.state import STATE_FILE, TrainerState

MANIFEST = "manifest.json"
LATEST = "latest"
FORMAT = 1
_TEMPORARY = ".tmp-"
_REPLACED = ".tmp-replaced-"
_NAME = re.compile(r"step_(\d{6,15})")
_READ_BYTES = 1 << 20

A = TypeVar("A")
T = TypeVar("T")
logger = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of a run, one folder each in `root`, of which the newest `keep` stay."""

    def __init__(self, root: Path, *, keep: int) -> None:
        self._root = root
        self._keep = keep

    def write(self, step: int, write: Callable[[Path], None]) -> Path:
        """Write the checkpoint of `step` and return its folder, as `write_checkpoint` does."""
        return write_checkpoint(self._root, step, write, self._keep)

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
            if len(_candidates(self._root, [])) > self._keep and (newest := newest or self.latest()) is not None:
                _prune(self._root, self._keep, newest)

    def latest(self) -> Path | None:
        """Return the newest checkpoint that can be used, as `latest_checkpoint` does."""
        return latest_checkpoint(self._root, require_usable)

    def find(self, path: Path) -> Path:
        """Return the checkpoint at `path`, or the newest whole one of the run whose output folder (or `checkpoints/`) it
        is. Raises CheckpointError."""
        if not path.is_dir():
            raise CheckpointError(
                f"trainer.resume_path={path} is not a folder. Give a run's output folder or a checkpoint"
            )
        for root in (path / "checkpoints", path):
            if root.is_dir() and (found := latest_checkpoint(root, require_usable)) is not None:
                return found
        require_usable(path)
        return path


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


def write_checkpoint(root: Path, step: int, write: Callable[[Path], None], keep: int) -> Path:
    """Writes the checkpoint of `step` and returns its folder; the newest `keep` whole ones stay, older ones go.

    `write` fills the (empty) folder it is given. An existing checkpoint of the same step is replaced.
    Raises SaveError where the disk refuses (no space, no permission); what was there before is as it was, and what was
    written of this one is removed.
    """
    final = root / checkpoint_name(step)
    temporary = root / f"{_TEMPORARY}{final.name}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        clean_leftovers(root)
        temporary.mkdir()
        write(temporary)
        _seal(temporary)
        if final.exists():
            os.rename(final, root / f"{_REPLACED}{final.name}")
        os.rename(temporary, final)
        sync_folder(root)
        write_atomically(root / LATEST, f"{final.name}\n".encode())
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
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise CheckpointError(
            f"no checkpoint under {root} is whole:\n{listed}\n"
            "Restore one from a copy, or start over with trainer.resume_mode=none"
        )
    for problem in problems:
        logger.warning("checkpoint passed over: %s", problem)
    return None


def verify(folder: Path) -> None:
    """Raises CheckpointError unless every file is there, no other is, and sizes and SHA-256 sums agree."""
    files = _read_manifest(folder)
    _check_sizes(folder, files)

    def check(name: str) -> None:
        if _sha256(folder / name) != files[name][1]:
            raise CheckpointError(
                f"{folder}: {name} does not have the SHA-256 sum that {MANIFEST} states: one of the two was damaged"
            )

    _on_threads(check, list(files), folder)


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
    """Removes all but `keep` whole checkpoints from `newest` on. A damaged one is removed with those older than it."""
    whole = 0
    candidates = _candidates(root, [])
    for folder in candidates[candidates.index(newest) :]:
        if whole >= keep:
            doomed = root / f"{_TEMPORARY}remove-{folder.name}"
            os.rename(folder, doomed)
            shutil.rmtree(doomed)
            continue
        try:
            _check_sizes(folder, _read_manifest(folder))
        except CheckpointError:
            continue
        whole += 1


def _seal(folder: Path) -> None:
    """Brings every file to the disk and writes the manifest."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in paths]
    if MANIFEST in names:
        raise CheckpointError(f"{folder}: the name {MANIFEST} is taken by what was written")

    def record(path: Path) -> dict[str, object]:
        _fsync_file(path)
        return {"bytes": path.stat().st_size, "sha256": _sha256(path)}

    records = _on_threads(record, paths, folder)
    write_atomically(
        folder / MANIFEST,
        (json.dumps({"format": FORMAT, "files": dict(zip(names, records))}, indent=1) + "\n").encode(),
    )
    for subfolder in {folder, *(path.parent for path in paths)}:
        sync_folder(subfolder)


def _read_manifest(folder: Path) -> dict[str, tuple[int, str]]:
    """File name to (bytes, SHA-256). Raises CheckpointError."""
    path = folder / MANIFEST
    try:
        content = read_json(path)
        found_format = whole_number(content, "format")
        if found_format != FORMAT:
            raise CheckpointError(
                f"{folder}: {MANIFEST} is of format {found_format}; this version reads format {FORMAT}"
            )
        files = {}
        for name, entry in content["files"].items():
            if not isinstance(entry["sha256"], str):
                raise ValueError(f"sha256 of {shown(name)} is {shown(entry['sha256'])}")
            files[name] = (whole_number(entry, "bytes"), entry["sha256"])
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: no {MANIFEST}: the checkpoint was not finished, or the file was deleted"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder}: {MANIFEST} cannot be read ({type(error).__name__}: {error}): it was damaged"
        ) from error
    for name in files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise CheckpointError(f"{folder}: {MANIFEST} names {name!r}, which lies outside the checkpoint")
    return files


def _check_sizes(folder: Path, files: dict[str, tuple[int, str]]) -> None:
    """Cheap part of `verify`: the right files of the right sizes."""
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {MANIFEST}
    for name, (num_bytes, _) in files.items():
        if name not in present:
            raise CheckpointError(f"{folder}: {shown(name)}, which {MANIFEST} states, is missing")
        found = (folder / name).stat().st_size
        if found != num_bytes:
            raise CheckpointError(
                f"{folder}: {name} has {found} bytes; {MANIFEST} states {num_bytes}: one of the two was damaged"
            )
    for name in sorted(present - set(files)):
        raise CheckpointError(f"{folder}: {name} is not in {MANIFEST}: it was put there later")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _fsync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)  # on one of `_on_threads`
    finally:
        os.close(descriptor)


def _on_threads(function: Callable[[A], T], items: Sequence[A], folder: Path) -> list[T]:
    """Reads or syncs several files at a time. Raises DeadlineError where the disk does not answer."""
    disk = f"the disk of {folder}"
    return map_in_time(function, items, num_threads=4, what=disk, timeout_s=DISK_TIMEOUT_S, remedy="Is it reachable?")
