"""How anything is written: files that are either whole or absent whenever the process is killed."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from skyrl_train.system.files.text import shown
from skyrl_train.system.threads import in_time

_MAX_DEPTH = 64
"""Levels of what is read; the deepest that is written has seven."""
_NESTED = (dict, list)
_FLAT = frozenset({int, float, str, bool, type(None)})
"""With those, all types that JSON is read as."""
_MAX_COUNT = 2**53
"""The largest whole number that every reader of JSON takes as it is."""
DISK_TIMEOUT_S = 1800.0
"""Deadline of a disk: what was written is there by then, or the disk is gone."""
FileSums = Mapping[str, tuple[int, str]]
"""Size in bytes and SHA-256 sum in hexadecimal digits of files, by their names within a folder."""
_BLOCK_BYTES = 1 << 20
_OWNERS_ALONE = struct.pack("<I" + "HHI" * 3, 2, 1, 7, 2**32 - 1, 4, 0, 2**32 - 1, 32, 0, 2**32 - 1)
"""An access list of Linux, version 2: the owner (1) may all (7), the group (4) and others (32) nothing."""


def cache_folder(kind: str) -> Path:
    """Return the folder of what is made once and kept for later runs: `kind` in `$SKYRL_TRAIN_CACHE`, or in `skyrl_train` in
    the user's cache folder."""
    own = os.environ.get("SKYRL_TRAIN_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "skyrl_train"
    return (Path(own) if own else home).expanduser() / kind


def keep_private(folder: Path) -> None:
    """Have a new folder, which holds no more than a log, and all that any process makes in it be the owner's alone: 0700 and
    0600, whatever the umask. Where the file system inherits no access lists, nobody else can enter the folder."""
    begun = list(folder.iterdir())
    if all(path.suffix == ".log" for path in begun):
        with suppress(OSError, AttributeError):  # another owner's; not Linux
            folder.chmod(0o700)
            for path in begun:
                path.chmod(0o600)
            os.setxattr(folder, "system.posix_acl_default", _OWNERS_ALONE)


def bring_to_disk(descriptor: int, path: Path) -> None:
    """`fsync` of the open file or folder at `path`, on a thread of its own: a disk that is gone never answers.

    Raises OSError; DeadlineError, which is one, where the disk does not answer in time.
    """
    own = os.dup(descriptor)

    def sync() -> None:
        try:
            os.fsync(own)
        finally:
            os.close(own)

    in_time(sync, what=f"the disk of {path}", timeout_s=DISK_TIMEOUT_S, remedy="Is it reachable?")


def sync_folder(folder: Path) -> None:
    """Makes creations, renames and removals in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        bring_to_disk(descriptor, folder)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Makes a folder, where it is not there, whose name survives a power cut: what is synced in a folder is lost with the
    name of the folder. Raises OSError."""
    missing = list(takewhile(lambda each: not each.exists(), (folder, *folder.parents)))
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing or [folder]:  # one that is there may have been made a moment before a kill
        with suppress(PermissionError):  # of a parent that is somebody else's
            sync_folder(each.parent)


def sync_tree(folder: Path) -> None:
    """Makes every file and every name in and below `folder` survive a power cut."""
    for path in [*folder.rglob("*"), folder]:
        sync_folder(path)  # which does for files what it does for folders


def write_atomically(path: Path, content: bytes) -> None:
    """Writes beside `path`, syncs, and renames into place: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            bring_to_disk(file.fileno(), path)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)  # half of a file on a full disk helps nobody
        raise
    sync_folder(path.parent)


def write_hashed(path: Path, content: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Writes a new file and brings it to the disk; returns its size in bytes and the SHA-256 sum of what was handed to the
    disk, which is not read again. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=_BLOCK_BYTES) as file:
        for each in content:
            whole = memoryview(each).cast("B")
            for start in range(0, len(whole), _BLOCK_BYTES):
                block = whole[start : start + _BLOCK_BYTES]
                digest.update(block)
                file.write(block)
            size += len(whole)
        file.flush()
        bring_to_disk(file.fileno(), path)
    return size, digest.hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Indented JSON with sorted keys, atomically. Raises ValueError for NaN and infinities."""
    text = json.dumps(value, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False)
    write_atomically(path, f"{text}\n".encode())


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises OSError, and ValueError for whatever else is wrong with it."""
    return parse_strict_json(path.read_bytes())


def parse_strict_json(text: bytes | str) -> Any:
    """What `json.loads` makes of a text that another program may have written.

    Raises ValueError, as for any other text that is not JSON, for bytes that are not UTF-8, for NaN and infinities, for
    numbers of more digits than Python converts, and for nesting that would exhaust the stack of whoever walks it.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    try:
        content = _DECODER.decode(text)
    except RecursionError:
        raise ValueError(f"nested deeper than {_MAX_DEPTH} levels") from None
    level = [content] if isinstance(content, _NESTED) else []
    for _ in range(_MAX_DEPTH):
        values = (value.values() if isinstance(value, dict) else value for value in level)
        # Most lists are of tokens, which are passed over without a look at each.
        nested = (entries for entries in values if not _FLAT.issuperset(map(type, entries)))
        level = [each for entries in nested for each in entries if isinstance(each, _NESTED)]
        if not level:
            return content
    raise ValueError(f"nested deeper than {_MAX_DEPTH} levels")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)  # `json.loads` would make one for each text


def whole_number(content: Mapping[str, Any], name: str) -> int:
    """The entry `name`, a count: a whole number that JSON states exactly. Raises ValueError naming it, KeyError."""
    value = content[name]
    if type(value) is not int or not 0 <= value <= _MAX_COUNT:
        raise ValueError(f"{name} must be a whole number from 0 to 2**53; got {shown(value)}")
    return value


def finite_number(content: Mapping[str, Any], name: str) -> float:
    """The entry `name`. Raises ValueError naming it where it is no finite number, KeyError."""
    value = content[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{name} must be a finite number; got {shown(value)}")
    return float(value)
