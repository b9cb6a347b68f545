"""Checkpoints in a folder, each either whole or absent.

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
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TypeVar

from skyrl_train.errors import CheckpointError, SaveError
from skyrl_train.system import map_in_time
from skyrl_train.system.files import (
    DISK_TIMEOUT_S,
    FileSums,
    make_folder,
    read_json,
    shown,
    sync_folder,
    whole_number,
    write_atomically,
)

MANIFEST = "manifest.json"
LATEST = "latest"
TEMPORARY = ".tmp-"
_REPLACED = ".tmp-replaced-"
_FORMAT = 1
_READ_BYTES = 1 << 20
_NAME = re.compile(r"step_(\d{6,15})")

WriteState = Callable[[Path], FileSums | None]
"""Fills a folder, and returns the sums of those of its files that are hashed and on the disk."""
A = TypeVar("A")
T = TypeVar("T")
logger = logging.getLogger(__name__)


def checkpoint_name(step: int) -> str:
    """Return the name of the checkpoint of `step`, e.g. `step_000010`."""
    return f"step_{step:06d}"


def step_of(name: str) -> int:
    """Return the step in a checkpoint's name; -1 where it is none."""
    match = _NAME.fullmatch(name)
    return int(match.group(1)) if match else -1


def write_checkpoint(root: Path, step: int, write: WriteState, keep: int) -> Path:
    """Write the checkpoint of `step` and return its folder; the newest `keep` whole ones stay, older ones go.

    `write` fills the (empty) folder it is given, and returns the sums that it knows. An existing checkpoint of the same
    step is replaced.
    Raises SaveError where the disk refuses (no space, no permission); what was there before is as it was, and what was
    written of this one is removed.
    """
    final = root / checkpoint_name(step)
    temporary = root / f"{TEMPORARY}{final.name}"
    try:
        make_folder(root)
        clean_leftovers(root)
        temporary.mkdir()
        seal(temporary, write(temporary))
        install(temporary, final)
        clean_leftovers(root)
        prune(root, keep, final)
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


def seal(folder: Path, known: FileSums | None = None) -> None:
    """Brings every file to the disk and writes the manifest. `known`: sums of those that whoever wrote them has hashed and
    brought to the disk; they are not read again. Raises CheckpointError, and SaveError where one of these has another
    size."""
    known = known or {}
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    # One that another node has written may be found by its name before a listing has it.
    paths = {name: folder / name for name in sorted(paths.keys() | known.keys())}
    if MANIFEST in paths:
        raise CheckpointError(f"{folder}: the name {MANIFEST} is taken by what was written")

    def record(name: str) -> dict[str, object]:
        num_bytes = paths[name].stat().st_size
        if name in known:
            written_bytes, sha256 = known[name]
            if num_bytes != written_bytes:
                raise SaveError(
                    f"{folder}: {name} has {num_bytes} bytes where {written_bytes} were written. Is the folder on a file "
                    "system that all nodes share?"
                )
            return {"bytes": num_bytes, "sha256": sha256}
        descriptor = os.open(paths[name], os.O_RDWR)
        try:
            os.fsync(descriptor)  # on one of `_on_threads`
        finally:
            os.close(descriptor)
        return {"bytes": num_bytes, "sha256": sha256_of(paths[name])}

    records = _on_threads(record, list(paths), folder)
    write_atomically(
        folder / MANIFEST,
        (json.dumps({"format": _FORMAT, "files": dict(zip(paths, records))}, indent=1) + "\n").encode(),
    )
    for subfolder in sorted({folder, *(path.parent for path in paths.values())}):
        sync_folder(subfolder)


def install(temporary: Path, final: Path) -> None:
    """Give a whole checkpoint its name, beside `temporary`, and have `latest` name it."""
    root = final.parent
    if final.exists():
        os.rename(final, root / f"{_REPLACED}{final.name}")
    os.rename(temporary, final)
    sync_folder(root)
    write_atomically(root / LATEST, f"{final.name}\n".encode())


def clean_leftovers(root: Path) -> None:
    """Removes what writes that were cut short left behind, and puts back a checkpoint that was about to be replaced.

    For the process that writes to `root`, at its start; a reader must not call it.
    """
    for leftover in sorted(root.glob(f"{TEMPORARY}*")):
        target = root / leftover.name.removeprefix(_REPLACED)
        if leftover.name.startswith(_REPLACED) and not target.exists():
            os.rename(leftover, target)
        elif leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


def prune(root: Path, keep: int, newest: Path) -> None:
    """Removes all but `keep` whole checkpoints from `newest` on. A damaged one is removed with those older than it. Raises
    OSError."""
    whole = 0
    candidates = _candidates(root, [])
    if newest not in candidates:
        raise FileNotFoundError(f"{newest} was deleted as soon as it was written")
    for folder in candidates[candidates.index(newest) :]:
        if whole >= keep:
            doomed = root / f"{TEMPORARY}remove-{folder.name}"
            os.rename(folder, doomed)
            shutil.rmtree(doomed)
            continue
        with suppress(CheckpointError):
            check_sizes(folder)
            whole += 1


def verify(folder: Path) -> None:
    """Raises CheckpointError unless every file is there, no other is, and sizes and SHA-256 sums agree."""
    files = check_sizes(folder)

    def check(name: str) -> None:
        if sha256_of(folder / name) != files[name][1]:
            raise CheckpointError(
                f"{folder}: {name} does not have the SHA-256 sum that {MANIFEST} states: one of the two was damaged"
            )

    _on_threads(check, list(files), folder)


def check_sizes(folder: Path) -> dict[str, tuple[int, str]]:
    """Cheap part of `verify`: the right files of the right sizes. Returns what `read_manifest` does."""
    files = read_manifest(folder)
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
    return files


def read_manifest(folder: Path) -> dict[str, tuple[int, str]]:
    """File name to (bytes, SHA-256). Raises CheckpointError."""
    path = folder / MANIFEST
    try:
        content = read_json(path)
        found_format = whole_number(content, "format")
        if found_format != _FORMAT:
            raise CheckpointError(
                f"{folder}: {MANIFEST} is of format {found_format}; this version reads format {_FORMAT}"
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


def sha256_of(path: Path) -> str:
    """Return the SHA-256 sum of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def latest_checkpoint(root: Path, require: Callable[[Path], None] = verify) -> Path | None:
    """Return the newest checkpoint under `root` that is whole, or None where there is none at all. `require` raises
    CheckpointError for one that is not.

    Prefers the one that `latest` names, then older ones, newest first. Only reads, so a running trainer's folder may be
    looked at. Raises CheckpointError where there are checkpoints but none is whole.
    """
    problems: list[str] = []

    def whole(folder: Path) -> Path:
        require(folder)
        return folder

    return first_whole(root, _candidates(root, problems), whole, problems)


def first_whole(
    place: object, candidates: Iterable[A], load: Callable[[A], T], problems: list[str], *, has_other: bool = False
) -> T | None:
    """Return what `load` makes of the first candidate for which it raises no CheckpointError; None where there is none. Each
    that is passed over is among the `problems`, which are warned about.

    Raises CheckpointError where all are damaged, unless there are others than those under `place`; SaveError as `load` does:
    it says nothing of what a store holds.
    """
    found, is_any_damaged = None, False
    for candidate in candidates:
        try:
            found = load(candidate)
            break
        except SaveError:
            raise
        except CheckpointError as error:
            problems.append(str(error))
            is_any_damaged = True
    if found is None and is_any_damaged and not has_other:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise CheckpointError(
            f"no checkpoint under {place} is whole:\n{listed}\n"
            "Restore one from a copy, or start over with trainer.resume_mode=none"
        )
    for problem in problems:
        logger.warning("checkpoint passed over: %s", problem)
    return found


def oldest_step(root: Path) -> int | None:
    """Return the step of the oldest checkpoint under `root`, whole or not; None where there is none, or none yet that a loss
    of power leaves: `latest` names one once its name is on the disk, so that one that is being written does not count."""
    try:
        named = step_of(_read_latest(root))
    except OSError:
        return None
    oldest = min((step_of(folder.name.removeprefix(_REPLACED)) for folder in _candidates(root, [])), default=None)
    return None if oldest is None or oldest > named else oldest


def _candidates(root: Path, problems: list[str]) -> list[Path]:
    """Checkpoint folders, the one to try first in front: `latest`, then those before it, then those after it.

    A step after `latest` belongs to a run that was rewound, or to a write that was cut short before `latest` moved.
    """
    folders: dict[int, Path] = {}
    for prefix in ("", _REPLACED):
        for folder in root.glob(f"{prefix}step_*"):
            step = step_of(folder.name.removeprefix(_REPLACED))
            if step >= 0 and folder.is_dir():
                folders.setdefault(step, folder)
    named = max(folders, default=0)
    if (root / LATEST).exists():
        text = _read_latest(root)
        if step_of(text) in folders:
            named = step_of(text)
        else:
            problems.append(f"{root / LATEST} names {text[:80]!r}, which is not there")
    return [folders[step] for step in sorted(folders, key=lambda step: (step > named, -step))]


def _read_latest(root: Path) -> str:
    return (root / LATEST).read_text(encoding="utf-8", errors="replace").strip()


def _on_threads(function: Callable[[A], T], items: Sequence[A], folder: Path) -> list[T]:
    """Reads or syncs several files at a time. Raises DeadlineError where the disk does not answer."""
    disk = f"the disk of {folder}"
    return map_in_time(function, items, num_threads=4, what=disk, timeout_s=DISK_TIMEOUT_S, remedy="Is it reachable?")
