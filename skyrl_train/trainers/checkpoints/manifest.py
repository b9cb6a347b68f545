"""A checkpoint's manifest: which files it has, of which sizes and SHA-256 sums. What verifies may be parsed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import TypeVar

from skyrl_train.errors import CheckpointError, SaveError
from skyrl_train.system import map_in_time
from skyrl_train.system.files import (
    DISK_TIMEOUT_S,
    FileSums,
    read_json,
    shown,
    sync_folder,
    whole_number,
    write_atomically,
)

MANIFEST = "manifest.json"
FORMAT = 1
_READ_BYTES = 1 << 20

A = TypeVar("A")
T = TypeVar("T")


def verify(folder: Path) -> None:
    """Raises CheckpointError unless every file is there, no other is, and sizes and SHA-256 sums agree."""
    files = read_manifest(folder)
    check_sizes(folder, files)

    def check(name: str) -> None:
        if sha256_of(folder / name) != files[name][1]:
            raise CheckpointError(
                f"{folder}: {name} does not have the SHA-256 sum that {MANIFEST} states: one of the two was damaged"
            )

    _on_threads(check, list(files), folder)


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
        if name not in known:
            _fsync_file(paths[name])
            return {"bytes": num_bytes, "sha256": sha256_of(paths[name])}
        if num_bytes != known[name][0]:
            raise SaveError(
                f"{folder}: {name} has {num_bytes} bytes where {known[name][0]} were written. Is the folder on a file "
                "system that all nodes share?"
            )
        return {"bytes": num_bytes, "sha256": known[name][1]}

    records = _on_threads(record, list(paths), folder)
    write_atomically(
        folder / MANIFEST,
        (json.dumps({"format": FORMAT, "files": dict(zip(paths, records))}, indent=1) + "\n").encode(),
    )
    for subfolder in sorted({folder, *(path.parent for path in paths.values())}):
        sync_folder(subfolder)


def read_manifest(folder: Path) -> dict[str, tuple[int, str]]:
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


def check_sizes(folder: Path, files: dict[str, tuple[int, str]]) -> None:
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


def sha256_of(path: Path) -> str:
    """Return the SHA-256 sum of a file, in hexadecimal digits."""
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
