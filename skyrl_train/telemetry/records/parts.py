"""Rollouts of one step that several nodes wrote: a folder of Parquet files with an index, in place of the one file.

    train_step_000007.parquet/
      part-00000.parquet    trajectories of one node, in the order of the batch; a file as `columns.py` says
      part-00001.parquet
      _index.json           which part has which; written last

    {"format": 1, "trajectories": 8, "parts": [{"file": "part-00000.parquet", "trajectories": 6, "bytes": 51234,
                                                "sha256": "9f86...", "ranges": [[0, 4], [6, 8]]}, ...]}

`ranges` are `[start, stop)` of places among all trajectories that were written; each is in one part. Other programs read
such a folder as one table and pass over names that begin with `_`. The sums in a file's pages do not tell it from another
file: the sum of a part is SHA-256, as that of checkpoints, which takes some hundredths of the time of compressing it.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from operator import index as whole
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from skyrl_train.errors import DataError, SaveError, counted
from skyrl_train.system.files import read_json, shown, sync_folder, whole_number, write_json
from skyrl_train.telemetry.records.columns import rollout_file

T = TypeVar("T")

INDEX_FILE = "_index.json"
FORMAT = 1
_BLOCK_BYTES = 2**20


class Parts(NamedTuple):
    """The files of a step, and how their trajectories alternate in the batch."""

    files: list[Path]
    order: list[tuple[int, int]]
    """Number of a file, and how many of its trajectories come next; empty where there is one file alone."""

    def merged(self, found: Sequence[Iterator[T]]) -> Iterator[T]:
        """Yield what was `found` of each file's trajectories, in the order of the batch. Raises DataError where a file has
        not as many as the index states."""
        for number, count in self.order:
            taken = list(islice(found[number], count))
            yield from taken
            if len(taken) < count:
                raise DataError(f"{self.files[number]}: it has fewer trajectories than {INDEX_FILE} states.")
        for file, left in zip(self.files, found):
            if next(left, None) is not None:
                raise DataError(f"{file}: it has more trajectories than {INDEX_FILE} states.")


def temporary_of(path: Path) -> Path:
    """Return where a file or folder is until it is whole."""
    return path.with_name(f".{path.name}.tmp")


def part_file(folder: Path, number: int) -> Path:
    """Return the file of a part."""
    return folder / f"part-{number:05d}.parquet"


def rollouts_sum(path: Path) -> tuple[int, str]:
    """Return size in bytes and SHA-256 sum of a file; of a folder those of its index, which has the sums of its parts.
    Raises OSError."""
    digest, size = hashlib.sha256(), 0
    with (path / INDEX_FILE if path.is_dir() else path).open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()


def remove_rollouts(path: Path) -> None:
    """Remove a step's file, or its folder, which is gone at once for whoever reads. Raises OSError."""
    if path.is_dir():
        shutil.rmtree(path if path.suffix == ".tmp" else path.rename(temporary_of(path)))
    else:
        path.unlink(missing_ok=True)


def write_parts(
    folder: Path, global_step: int, places: Sequence[Sequence[int]], write: Callable[[], Sequence[tuple[int, str]]]
) -> None:
    """Have a training step written in parts, whose folder appears complete or not at all.

    Args:
        places: Of each part, ascending: its trajectories among all that are written.
        write: Calls `write_rollouts` for each `part`, on any node, and returns their `rollouts_sum`.

    Raises:
        SaveError: What was written is not here.
        OSError: The disk does not take it. What `write` raises is raised, too.
    """
    path = rollout_file(folder, purpose="train", global_step=global_step)
    temporary, parts = temporary_of(path), []
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        for number, (own, (size, sha256)) in enumerate(zip(places, write(), strict=True)):
            file = part_file(temporary, number)
            if not file.is_file() or file.stat().st_size != size:
                raise SaveError(
                    f"{file}: its node wrote {size} bytes, and they are not here: the nodes share no folder"
                )
            ends = [0, *(np.flatnonzero(np.diff(own) != 1) + 1).tolist(), len(own)]
            ranges = [[own[start], own[stop - 1] + 1] for start, stop in pairwise(ends)]
            sums = {"bytes": size, "sha256": sha256}
            parts.append({"file": file.name, "trajectories": len(own), **sums, "ranges": ranges})
        index = {"format": FORMAT, "trajectories": sum(map(len, places)), "parts": parts}
        write_json(temporary / INDEX_FILE, index)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # what another node still writes, the next start removes
        raise
    sync_folder(folder)


def read_parts(path: Path) -> Parts:
    """Return the files of a step: one alone, or the parts of a folder, whose sums were checked.

    Raises:
        DataError: The index is malformed, does not give each trajectory once, or its parts are not those in the folder.
    """
    if not path.is_dir():
        return Parts([path], [])
    index, files, ranges, end = path / INDEX_FILE, list[Path](), list[tuple[int, int, int]](), 0
    try:
        content = read_json(index)
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {shown(content['format'])}, and {FORMAT} is what this version reads")
        for number, part in enumerate(content["parts"]):
            files.append(part_file(path, number))
            if part["file"] != files[-1].name:
                raise ValueError(f"it names {shown(part['file'])} where {files[-1].name} belongs")
            own = [(whole(start), whole(stop), number) for start, stop in part["ranges"]]
            if own != sorted(own) or sum(stop - start for start, stop, _ in own) != part["trajectories"]:
                raise ValueError(f"the ranges of {part['file']} do not ascend, or are not of its trajectories")
            ranges += own
        for start, stop, _ in sorted(ranges):
            if start != end or stop <= start:
                raise ValueError(f"trajectory {min(start, end)} is listed {'twice' if start < end else 'nowhere'}")
            end = stop
        if end != (total := whole_number(content, "trajectories")) or not ranges:
            raise ValueError(f"it lists {counted(end, 'trajectory')}, and there were {total}")
        if strange := {each.name for each in path.iterdir() if each.name[0] not in "._"} - {
            file.name for file in files
        }:
            raise DataError(f"{path / min(strange)}: {INDEX_FILE} does not list it: it was put there later.")
        for file, part in zip(files, content["parts"]):
            found = rollouts_sum(file) if file.is_file() else (0, "missing")
            if found != (part["bytes"], part["sha256"]):
                stated = f"{shown(part['bytes'])} bytes, SHA-256 sum {shown(part['sha256'])}"
                raise DataError(f"{file}: {INDEX_FILE} states {stated}; got {found[0]} bytes, {found[1]}.")
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise DataError(f"{index}: no index of rollouts that can be read ({type(error).__name__}: {error}).") from error
    return Parts(files, [(number, stop - start) for start, stop, number in sorted(ranges)])
