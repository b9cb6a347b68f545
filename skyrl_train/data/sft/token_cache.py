"""Tokenised sources on disk, each under the hash of all that it was made from, so that nothing can be stale.

    CACHE/
      3f9c.../                 the key: source bytes, tokenizer, format settings, library versions
        input_ids.bin          int32
        loss_mask.bin          one byte each
        offsets.bin            int64
        meta.json              sizes and BLAKE2b sums of the three
      .making-3f9c...-x        a run that is writing, or was cut short

An entry is written under a name of its own and renamed into place when it is whole. Runs that make the same entry at
the same time do the work twice and keep one result; no run ever waits for another, or reads half an entry. A damaged
entry is made again. Entries may be deleted at any time.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_train.data.sft.token_store import TokenStore
from skyrl_train.system.files import bring_to_disk, cache_folder, sync_folder, write_json

FORMAT = 1
"""To be raised whenever the same row would be tokenised or masked in another way."""
_META = "meta.json"
_COLUMNS: dict[str, Any] = {"input_ids": np.int32, "loss_mask": np.bool_, "offsets": np.int64}
_MAKING = ".making-"
_ATTEMPTS = 3
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY)
"""Why a folder cannot be renamed to one that is there."""
_LEFTOVER_AGE_S = 7 * 24 * 3600.0
_READ_BYTES = 1 << 20

Examples = Iterable[tuple[Sequence[int], Sequence[bool]]]
"""Token ids and loss mask of each example."""

logger = logging.getLogger(__name__)


def default_folder() -> Path:
    """The entries' folder where `data.cache_dir` states none."""
    return cache_folder("tokens")


def cached(folder: Path, key: str, make: Callable[[], Examples]) -> TokenStore:
    """Return the entry `key` of the cache, made now where it is missing or damaged. Raises OSError where the disk
    refuses.
    """
    entry = folder / key
    for _ in range(_ATTEMPTS):
        problem = _problem(entry)
        if problem:
            if entry.exists():
                logger.warning("token cache: %s %s; it is made again", entry, problem)
            folder.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(folder)
            _make(entry, make)
        try:
            return _open(entry)
        except FileNotFoundError:
            continue  # deleted, or just being replaced, by another process
    raise OSError(f"{entry} disappears as often as it is made")


def _make(entry: Path, make: Callable[[], Examples]) -> None:
    """Make an entry. There may be none afterwards, where another process made or removed it or what it is made in."""
    temporary = Path(tempfile.mkdtemp(prefix=f"{_MAKING}{entry.name}-", dir=entry.parent))
    lock = _locked(temporary)
    try:
        _write(temporary, make())
        try:
            os.rename(temporary, entry)
        except OSError:  # there is one by now: another run's, or the damaged one
            if _problem(entry):
                with suppress(FileNotFoundError):
                    os.rename(entry, temporary / "damaged")
                os.rename(temporary, entry)
                shutil.rmtree(entry / "damaged", ignore_errors=True)
        sync_folder(entry.parent)
    except OSError as error:
        # Without a file that the examples come from there is nothing to try again.
        if error.errno not in _TAKEN and (error.errno != errno.ENOENT or temporary.exists()):
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """Return a descriptor that locks a folder until it is closed, or its process ends, however that is; None where the file
    system has no locks. Raises BlockingIOError where another holds it, FileNotFoundError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return descriptor


def _remove_leftovers(folder: Path) -> None:
    """Remove what runs that were killed left. By age, too: the lock of a run on another machine may not show here, and
    clocks may be set."""
    for leftover in folder.glob(f"{_MAKING}*"):
        try:
            newest = max(path.stat().st_mtime for path in [leftover, *leftover.iterdir()])
        except OSError:
            continue
        if time.time() - newest > _LEFTOVER_AGE_S:
            with suppress(BlockingIOError, FileNotFoundError):
                lock = _locked(leftover)
                shutil.rmtree(leftover, ignore_errors=True)
                if lock is not None:
                    os.close(lock)


def _write(folder: Path, examples: Examples) -> None:
    """Stream the examples to the three files, then writes `meta.json`."""
    length = 0
    with (
        (folder / "input_ids.bin").open("wb") as ids_file,
        (folder / "loss_mask.bin").open("wb") as mask_file,
        (folder / "offsets.bin").open("wb") as offsets_file,
    ):
        offsets_file.write(np.int64(0).tobytes())
        for ids, mask in examples:
            length += len(ids)
            ids_file.write(np.asarray(ids, dtype=np.int32).tobytes())
            mask_file.write(np.asarray(mask, dtype=np.bool_).tobytes())
            offsets_file.write(np.int64(length).tobytes())
        for file in (ids_file, mask_file, offsets_file):
            file.flush()
            bring_to_disk(file.fileno(), folder)
    files = {name: {"bytes": _file(folder, name).stat().st_size, "blake2b": _digest(folder, name)} for name in _COLUMNS}
    write_json(folder / _META, {"format": FORMAT, "files": files})


def _problem(entry: Path) -> str:
    """Say why the entry cannot be used; nothing where it can."""
    try:
        files = json.loads((entry / _META).read_text())["files"]
        for name in _COLUMNS:
            size = _file(entry, name).stat().st_size
            if size != files[name]["bytes"] or _digest(entry, name) != files[name]["blake2b"]:
                return f"has a damaged {name}.bin"
    except FileNotFoundError:
        return "is not whole"
    except (ValueError, KeyError, TypeError):
        return f"has a damaged {_META}"
    return ""


def _open(entry: Path) -> TokenStore:
    def mapped(name: str) -> NDArray[Any]:
        path = _file(entry, name)
        if not path.stat().st_size:  # nothing cannot be mapped
            return np.empty(0, dtype=_COLUMNS[name])
        return np.memmap(path, dtype=_COLUMNS[name], mode="r")

    # Offsets are looked at for every batch: in memory.
    return TokenStore(input_ids=mapped("input_ids"), loss_mask=mapped("loss_mask"), offsets=np.array(mapped("offsets")))


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.bin"


def _digest(folder: Path, name: str) -> str:
    digest = hashlib.blake2b()
    with _file(folder, name).open("rb", buffering=0) as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
