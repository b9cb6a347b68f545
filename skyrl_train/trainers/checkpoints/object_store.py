"""A run's checkpoints under a URL that fsspec knows: `s3://bucket/run`, `gs://...`, `file:///mnt/...`.

    URL/checkpoints/                    URL/best/ of supervised training alike
      latest                          JSON: which folder writes here, the checkpoints that are kept, newest first, and those
                                      that a run which went back to an earlier step, or began again, has set aside
      step_000010-8d31c8f2a90b6e57/   a checkpoint, named by its step and by the SHA-256 sum of its manifest
        ...
        manifest.json                 size and SHA-256 of every other file

An object store replaces single objects and nothing else: it has no renames, its listings lag behind, and calls may fail,
hang, or take effect after they were given up. The order of writes is therefore files, manifest, `latest`, removals, and
no object that `latest` leads to is written again with another content. Whatever is cut off, `latest` leads to whole
checkpoints; what nothing leads to is removed by a later save. Where `latest` itself is damaged, a listing finds them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from skyrl_train.errors import CheckpointError, SaveError
from skyrl_train.system import map_in_time
from skyrl_train.system.files import parse_strict_json, shown, write_atomically
from skyrl_train.trainers.checkpoints.manifest import MANIFEST, read_manifest

LATEST = "latest"
_PROBE = ".probe"
FORMAT = 1
_NAME = re.compile(r"step_(\d{6,15})-([0-9a-f]{16})")
_NUM_TRANSFERS = 4
_BRIEF_S = 60.0
"""Deadline of a call that moves next to nothing."""

A = TypeVar("A")
R = TypeVar("R")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Pointer:
    """The content of `latest`."""

    writer: str = ""
    """The identity of the output folder that writes here."""
    checkpoints: tuple[str, ...] = ()
    """Newest first."""
    set_aside: tuple[str, ...] = ()
    """Never removed."""


def is_url(path: str) -> bool:
    """Return whether a path is one for fsspec."""
    return "://" in path


def split_url(url: str) -> tuple[str, str]:
    """Return the URL of a run, and the name of the one checkpoint that is meant, or an empty one."""
    base, _, name = url.rstrip("/").rpartition("/")
    return (base, name) if _NAME.fullmatch(name) else (url.rstrip("/"), "")


def object_name(step_name: str, manifest: bytes) -> str:
    """Return the name under a URL of a checkpoint with this manifest: what differs never has the same."""
    return f"{step_name}-{hashlib.sha256(manifest).hexdigest()[:16]}"


def step_of(name: str) -> int:
    """Return the step in an `object_name`; -1 where it is none."""
    match = _NAME.fullmatch(name)
    return int(match.group(1)) if match else -1


class _Objects:
    """The objects under a URL. Each call has a deadline; it raises FileNotFoundError where something is not there, SaveError
    for whatever else a store's library raises."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """`timeout_s`: deadline of moving one checkpoint, and the longest that any other call has."""
        self._url, self._timeout_s = url, timeout_s

    def read(self, name: str) -> bytes:
        """Return the content of an object."""
        return self._brief(f"reading of {name}", lambda: bytes(self._fs.cat_file(self._path(name))))

    def put(self, name: str, content: bytes) -> None:
        """Write an object, which replaces one of that name."""
        what = f"upload of {name}"
        try:
            self._brief(what, lambda: self._fs.pipe_file(self._path(name), content))
        except FileNotFoundError as error:  # the bucket is not there
            raise SaveError(self._failed(what, error)) from error

    def remove(self, name: str) -> None:
        """Remove one object."""
        self._brief(f"removal of {name}", lambda: self._fs.rm_file(self._path(name)))

    def remove_all(self, name: str) -> None:
        """Remove every object below a name."""

        def remove(name: str) -> None:
            self._fs.invalidate_cache()
            self._fs.rm(self._path(name), recursive=True)

        self._calls(f"removal of {name}", remove, [name], self._timeout_s)

    def names(self) -> list[str]:
        """Return the first parts of all names, as far as a listing shows them."""

        def names() -> list[str]:
            self._fs.invalidate_cache()
            try:
                return [str(path).rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._path(""), detail=False)]
            except FileNotFoundError:
                return []

        return self._brief("listing", names)

    def send(self, what: str, folder: Path, files: Sequence[str], name: str) -> None:
        """Write local files below a name, several at a time."""
        self._calls(
            what,
            lambda file: self._fs.put_file(str(folder / file), self._path(f"{name}/{file}")),
            files,
            self._timeout_s,
        )

    def fetch(self, what: str, name: str, files: Sequence[str], folder: Path) -> None:
        """Bring objects below a name to a local folder, several at a time."""

        def get(file: str) -> None:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            self._fs.get_file(self._path(f"{name}/{file}"), str(folder / file))

        self._calls(what, get, files, self._timeout_s)

    @property
    def _fs(self) -> Any:
        return self._opened[0]

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        """The file system, and the path of the URL in it."""
        from fsspec.core import url_to_fs

        options = {"auto_mkdir": True} if self._url.startswith(("file://", "local://")) else {}
        fs, path = url_to_fs(self._url, **options)
        return fs, str(path).rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._opened[1]}/{name}".rstrip("/")

    def _brief(self, what: str, call: Callable[[], R]) -> R:
        return self._calls(what, lambda _: call(), [None], min(_BRIEF_S, self._timeout_s))[0]

    def _calls(self, what: str, call: Callable[[A], R], items: Sequence[A], timeout_s: float) -> list[R]:
        name = f"{self._url} ({what})"
        try:
            return map_in_time(call, items, num_threads=_NUM_TRANSFERS, what=name, timeout_s=timeout_s)
        except FileNotFoundError:
            raise
        except Exception as error:  # each store's library raises its own
            raise SaveError(self._failed(what, error)) from error

    def _failed(self, what: str, error: Exception) -> str:
        return (
            f"{self._url}: {what} failed: {type(error).__name__}: {error}. Check the name, the "
            "credentials and the network; what was there before is untouched"
        )


class ObjectStore:
    """Checkpoints under `url`, of which the newest `keep` stay."""

    def __init__(self, url: str, *, keep: int, timeout_s: float) -> None:
        """`timeout_s`: deadline of moving one checkpoint, and the longest that any other call has."""
        self.url = url.rstrip("/")
        self._keep = keep
        self._objects = _Objects(self.url, timeout_s)

    def check(self) -> None:
        """Writes an object and removes it. Raises SaveError, as for a name or credentials that are wrong."""
        self._objects.put(_PROBE, b"written to see whether it can be\n")
        self._objects.remove(_PROBE)

    def pointer(self) -> Pointer:
        """Return the content of `latest`; where that is damaged or missing, what a listing finds. Raises SaveError."""
        try:
            return _parsed(self._objects.read(LATEST))
        except FileNotFoundError:
            found = self._found()
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("%s/%s is damaged (%s); checkpoints are found by listing", self.url, LATEST, error)
            found = self._found()
        return Pointer(checkpoints=tuple(sorted(found, key=step_of, reverse=True)))

    def beside(self, names: Sequence[str]) -> list[str]:
        """Return what a listing finds beside these checkpoints and those set aside, newest first. Raises SaveError.

        A write of `latest` that was given up may take effect after later ones, when what it leads to is gone.
        """
        known = {*names, *self.pointer().set_aside}
        return sorted((name for name in self._found() if name not in known), key=step_of, reverse=True)

    def claim(self, writer: str, *, after: int) -> Pointer:
        """Takes the URL for the folder that `writer` stands for, sets checkpoints of steps later than `after` aside,
        removes what an upload that was cut short left, and returns what `latest` says then. Raises SaveError."""
        old = self.pointer()
        kept = tuple(name for name in old.checkpoints if step_of(name) <= after)
        aside = tuple(name for name in old.checkpoints if step_of(name) > after)
        new = Pointer(writer=writer, checkpoints=kept, set_aside=(*old.set_aside, *aside))
        if new != old:
            self._point_at(new)
        self._prune(new)
        return new

    def name_of(self, folder: Path) -> str:
        """Return the name that a local checkpoint has there."""
        return object_name(folder.name, (folder / MANIFEST).read_bytes())

    def upload(self, folder: Path, *, writer: str) -> None:
        """Brings a whole local checkpoint there: files, manifest, then `latest`. Then removes what is not kept.

        Raises SaveError where the store refuses or does not answer, and where another run has taken the URL.
        """
        name = self.name_of(folder)
        self._objects.send(f"upload of {folder.name}", folder, list(read_manifest(folder)), name)
        self._objects.put(f"{name}/{MANIFEST}", (folder / MANIFEST).read_bytes())
        old = self.pointer()
        if old.writer not in ("", writer):
            raise SaveError(
                f"{self.url} was taken by another run while this one was writing there. Give each its own "
                "trainer.checkpoint_url"
            )
        older = tuple(each for each in old.checkpoints if step_of(each) < step_of(name))
        aside = tuple(each for each in old.set_aside if each != name)
        new = Pointer(writer=writer, checkpoints=(name, *older)[: self._keep], set_aside=aside)
        self._point_at(new)
        self._prune(new)

    def download(self, name: str, target: Path) -> None:
        """Brings a checkpoint to the empty folder `target`.

        Raises CheckpointError where it is not whole, SaveError where the store refuses or does not answer.
        """
        where = f"{self.url}/{name}"
        try:
            content = self._objects.read(f"{name}/{MANIFEST}")
            if object_name(name.partition("-")[0], content) != name:
                raise CheckpointError(f"{where}: {MANIFEST} does not have the SHA-256 sum in the name: it was damaged")
            write_atomically(target / MANIFEST, content)
            self._objects.fetch(f"download of {name}", name, list(read_manifest(target)), target)
        except FileNotFoundError as error:
            raise CheckpointError(f"{where}: a file is missing: {error}") from error

    def _point_at(self, pointer: Pointer) -> None:
        self._objects.put(LATEST, (json.dumps({"format": FORMAT, **asdict(pointer)}, indent=1) + "\n").encode())

    def _found(self) -> list[str]:
        """Checkpoints by listing, whole or not."""
        return [name for name in self._objects.names() if step_of(name) >= 0]

    def _prune(self, pointer: Pointer) -> None:
        """Removes what `latest` does not lead to, as far as a listing shows it. A failure is a warning: the next save tries
        again."""
        try:
            for name in self._found():
                if name not in (*pointer.checkpoints, *pointer.set_aside):
                    self._objects.remove_all(name)
        except (SaveError, FileNotFoundError) as error:
            logger.warning("older checkpoints could not be removed: %s", error)


def _parsed(content: bytes) -> Pointer:
    """Raises ValueError, KeyError, TypeError."""
    entries = parse_strict_json(content)
    if entries["format"] != FORMAT:
        raise ValueError(f"format {shown(entries['format'])}")
    names = (*entries["checkpoints"], *entries["set_aside"])
    if not isinstance(entries["writer"], str) or not all(
        isinstance(name, str) and step_of(name) >= 0 for name in names
    ):
        raise ValueError(f"names such as {shown(names[0] if names else '')}")
    return Pointer(
        writer=entries["writer"], checkpoints=tuple(entries["checkpoints"]), set_aside=tuple(entries["set_aside"])
    )
