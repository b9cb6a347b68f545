"""Token ids and loss masks of many examples, back to back: in memory, or mapped from files.

TokenStore      one source, as it was tokenised
ExampleSet      the examples of several sources that are trained on, each cut to a longest length
cached          a store on disk, under the hash of all that it was made from, so that nothing can be stale:

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from skyrl_train.batch import ranges
from skyrl_train.images import Image, ImageSpan, ImageSpans
from skyrl_train.system.files import bring_to_disk, cache_folder, sync_folder, write_json

Ints = NDArray[np.int64]
Examples = Iterable[tuple[Sequence[int], Sequence[bool]]]
"""Token ids and loss mask of each example."""

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

logger = logging.getLogger(__name__)


class PlacedReference(NamedTuple):
    """An image among an example's tokens, by its reference: what it looks like is read when it is trained on."""

    start: int
    num_tokens: int
    reference: str


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenStore:
    """Example i is the tokens `offsets[i]` to `offsets[i + 1] - 1`."""

    input_ids: NDArray[np.int32]
    """`[tokens]`."""
    loss_mask: NDArray[np.bool_]
    """`[tokens]`: True where the token is trained on. Never an example's first, which nothing predicts."""
    offsets: Ints
    """`[examples + 1]`."""
    images: tuple[tuple[PlacedReference, ...], ...] = ()
    """Of each example its images; empty where no example has any."""

    @property
    def lengths(self) -> Ints:
        """The tokens of each example, int64 `[examples]`."""
        return np.diff(self.offsets)

    def first_cut_image(self, max_length: int) -> int | None:
        """Return the first example of which an image is not within so many tokens."""
        ends = (placed[-1].start + placed[-1].num_tokens if placed else 0 for placed in self.images)
        return next((row for row, end in enumerate(ends) if end > max_length), None)


@dataclass(frozen=True, kw_only=True)
class SourcePart:
    """What is used of one source."""

    name: str
    store: TokenStore
    rows: Ints
    """`[kept]`: example numbers in the store."""
    max_length: int
    """Tokens; longer examples are cut there."""


class ExampleSet:
    """Examples of one or several sources under one numbering: those of the first source, then the second, and so on."""

    def __init__(self, parts: Sequence[SourcePart], read_image: Callable[[str], Image] | None = None) -> None:
        """`read_image` gives the image of a reference, where stores have some."""
        self.parts = tuple(parts)
        self._read_image = read_image
        self.lengths: Ints = _concatenate(
            [np.minimum(part.store.lengths[part.rows], part.max_length) for part in self.parts]
        )
        """`[examples]`, tokens of each as they are trained on."""
        self._first: Ints = np.cumsum([0, *[len(part.rows) for part in self.parts]])

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def source_sizes(self) -> tuple[int, ...]:
        """How many examples each source has."""
        return tuple(len(part.rows) for part in self.parts)

    def name(self, index: int) -> str:
        """`train-17`: the source and the row in it, stable between runs."""
        part, row = self._locate(index)
        return f"{part.name}-{row}"

    def gather(self, indices: Ints) -> TokenStore:
        """Return the tokens of the examples `indices`, in that order."""
        lengths = self.lengths[indices]
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        input_ids = np.empty(int(offsets[-1]), dtype=np.int32)
        loss_mask = np.empty(len(input_ids), dtype=np.bool_)
        source_of = np.searchsorted(self._first, indices, side="right") - 1
        for number, part in enumerate(self.parts):
            chosen = np.flatnonzero(source_of == number)
            if not len(chosen):
                continue
            rows = part.rows[indices[chosen] - self._first[number]]
            source = ranges(part.store.offsets[rows], lengths[chosen])
            target = ranges(offsets[chosen], lengths[chosen])
            input_ids[target] = part.store.input_ids[source]
            loss_mask[target] = part.store.loss_mask[source]
        return TokenStore(input_ids=input_ids, loss_mask=loss_mask, offsets=offsets)

    def images(self, indices: Ints) -> tuple[ImageSpans, ...]:
        """Return the images of each of the examples `indices`; nothing where no source has any."""
        read = self._read_image
        if read is None or not any(part.store.images for part in self.parts):
            return ()
        found: list[ImageSpans] = []
        for index in indices.tolist():
            part, row = self._locate(index)
            placed = part.store.images[row] if part.store.images else ()
            found.append(tuple(ImageSpan(each.start, read(each.reference)) for each in placed))
        return tuple(found)

    def _locate(self, index: int) -> tuple[SourcePart, int]:
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        part = self.parts[number]
        return part, int(part.rows[index - self._first[number]])


def store_of(examples: Examples) -> TokenStore:
    """Return a store in memory, made of token ids and loss masks."""
    pairs = list(examples)
    return TokenStore(
        input_ids=_concatenate([np.asarray(ids, dtype=np.int32) for ids, _ in pairs], np.int32),
        loss_mask=_concatenate([np.asarray(mask, dtype=np.bool_) for _, mask in pairs], np.bool_),
        offsets=np.cumsum([0, *[len(ids) for ids, _ in pairs]], dtype=np.int64),
    )


def _concatenate(parts: Sequence[NDArray[Any]], dtype: Any = np.int64) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)


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
    write_json(folder / _META, {"format": FORMAT, "files": {name: _facts(folder, name) for name in _COLUMNS}})


def _facts(folder: Path, name: str) -> dict[str, int | str]:
    path = _file(folder, name)
    return {"bytes": path.stat().st_size, "blake2b": digest_of_file(path, "blake2b")}


def _problem(entry: Path) -> str:
    """Say why the entry cannot be used; nothing where it can."""
    try:
        files = json.loads((entry / _META).read_text())["files"]
        for name in _COLUMNS:
            if _facts(entry, name) != files[name]:
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


def digest_of_file(path: Path, algorithm: str) -> str:
    """Return the digest of a file's bytes, by an algorithm of `hashlib`."""
    digest = hashlib.new(algorithm)
    with path.open("rb", buffering=0) as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
