"""The checkpoints of a run: in its folder (`folder.py`), and under a URL that fsspec knows: `s3://bucket/run`, `gs://...`,
`file:///mnt/...`. Each is brought there as well, and a folder that lacks the newest gets it from there.

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
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from skyrl_train.errors import CheckpointError, SaveError
from skyrl_train.system import map_in_time, require
from skyrl_train.system.files import (
    DISK_TIMEOUT_S,
    FileSums,
    bring_to_disk,
    parse_strict_json,
    shown,
    sync_folder,
    write_atomically,
)
from skyrl_train.telemetry import RunFolder
from skyrl_train.trainers.checkpoints.folder import (
    LATEST,
    MANIFEST,
    TEMPORARY,
    WriteState,
    checkpoint_name,
    clean_leftovers,
    first_whole,
    install,
    latest_checkpoint,
    prune,
    read_manifest,
    step_of,
    verify,
    write_checkpoint,
)
from skyrl_train.trainers.checkpoints.state import STATE_FILE, TrainerState

HISTORY = "history"
"""Folder of a checkpoint at a URL: the run's record up to there."""
_WRITER = "writer"
_PROBE = ".probe"
_FORMAT = 1
_OBJECT_NAME = re.compile(r"step_(\d{6,15})-([0-9a-f]{16})")
_NUM_TRANSFERS = 4
_BRIEF_S = 60.0
"""Deadline of a call that moves next to nothing."""

A = TypeVar("A")
R = TypeVar("R")
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
        """Return what writes the checkpoint of `step`, on any thread, and returns its folder, as `write_checkpoint` does.
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
        """Removes what a write that was cut short left behind, as `clean_leftovers` does, and brings the name to the disk
        that a checkpoint was given just before: what a run that goes on from it writes must not outlast it."""
        if self._root.is_dir():
            with suppress(OSError):  # a disk that lets nothing be changed can still be read
                clean_leftovers(self._root)
                sync_folder(self._root)

    def tidy(self, newest: Path | None = None) -> None:
        """Removes what a run that was killed had no time for: checkpoints older than the `keep` that end with `newest`, by
        default the newest that can be used."""
        self.clean()
        with suppress(OSError, CheckpointError):
            if local := newest or latest_checkpoint(self._root, require_usable):
                prune(self._root, self._keep, local)

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
            if local is None or not is_own or step_at_url(name) > TrainerState.read(local).global_step
        ]
        found = self._fetch(self._remote, newer, self._root, has_other=local is not None, known=local)
        if found is None and damaged is not None:
            raise damaged
        return found or local

    def find(self, place: str) -> Path:
        """Return the checkpoint at `place`, or the newest whole one of the run whose output folder (or `checkpoints/`), or
        URL, it is. One of another run's URL is brought to `origin/` of this run's folder. Raises CheckpointError."""
        if "://" in place:
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
        """The newest whole checkpoint at a run's URL, or at that of its `checkpoints/`, or the one that the URL is of."""
        url, _, name = place.rstrip("/").rpartition("/")
        if step_at_url(name) < 0:
            url, name = place.rstrip("/"), ""
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
        what lies beside them. None where there is none. Raises as `first_whole`."""
        problems: list[str] = []

        def candidates() -> Iterator[str]:
            yield from names
            if problems:
                yield from store.beside(names)

        def fetch(name: str) -> Path:
            if known is not None and store.name_of(known) == name:
                return known
            temporary, final = root / f"{TEMPORARY}{name}", root / checkpoint_name(step_at_url(name))
            try:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
                store.download(name, temporary)
                require_usable(temporary)
                if TrainerState.read(temporary).global_step != step_at_url(name):
                    raise CheckpointError(f"{store.url}/{name}: {STATE_FILE} is of another step")
            except CheckpointError as error:
                shutil.rmtree(temporary, ignore_errors=True)
                if isinstance(error, SaveError):
                    raise
                raise CheckpointError(str(error).replace(str(temporary), f"{store.url}/{name}")) from error
            install(temporary, final)
            self.fetched = final
            return final

        with _on_this_disk(root):
            return first_whole(store.url, candidates(), fetch, problems, has_other=has_other)

    def _upload(self, folder: Path) -> None:
        assert self._remote is not None, "there is a URL"
        try:
            self._remote.upload(folder, writer=self._writer())
        except SaveError as error:
            raise SaveError(f"{error}. {folder} is whole") from error

    def _store(self, url: str) -> ObjectStore:
        return ObjectStore(url, keep=self._keep, timeout_s=self._timeout_s)

    def _writer(self) -> str:
        """The identity of this folder, which one that takes its place elsewhere does not have. Raises SaveError."""
        path = self._root / _WRITER
        with _on_this_disk(path):
            if not path.is_file():
                write_atomically(path, f"{uuid4().hex}\n".encode())
            return path.read_text(encoding="ascii", errors="replace").strip()


@contextmanager
def _on_this_disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SaveError(f"{path}: could not be written: {error}. Make room or choose another output folder") from error


def require_usable(folder: Path) -> None:
    """Raises CheckpointError unless the checkpoint verifies, and its state is one that a run may have written and is of the
    step in the folder's name."""
    verify(folder)
    step = TrainerState.read(folder).global_step
    if step_of(folder.name) not in (-1, step):
        raise CheckpointError(
            f"{folder}: {STATE_FILE} is of global_step {step}: the folder was renamed. It was {checkpoint_name(step)}"
        )


@dataclass(frozen=True, kw_only=True)
class Pointer:
    """The content of `latest` at a URL: names of checkpoints there, newest first."""

    writer: str = ""
    """The identity of the output folder that writes here."""
    checkpoints: tuple[str, ...] = ()
    set_aside: tuple[str, ...] = ()
    """Checkpoints that a run went back behind; they are never removed."""


class ObjectStore:
    """Checkpoints under `url`, of which the newest `keep` stay. Each call has a deadline, and raises SaveError for whatever
    the store's library raises."""

    def __init__(self, url: str, *, keep: int, timeout_s: float) -> None:
        """`timeout_s`: deadline of moving one checkpoint, and the longest that any other call has."""
        self.url = url.rstrip("/")
        self._keep, self._timeout_s = keep, timeout_s

    def check(self) -> None:
        """Writes an object and removes it. Raises SaveError, as for a name or credentials that are wrong."""
        self._put(_PROBE, b"written to see whether it can be\n")
        self._brief(f"removal of {_PROBE}", lambda: self._fs.rm_file(self._path(_PROBE)))

    def pointer(self) -> Pointer:
        """Return the content of `latest`; where that is damaged or missing, what a listing finds. Raises SaveError."""
        try:
            return _parsed(self._read(LATEST))
        except FileNotFoundError:
            found = self._found()
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("%s/%s is damaged (%s); checkpoints are found by listing", self.url, LATEST, error)
            found = self._found()
        return Pointer(checkpoints=tuple(sorted(found, key=step_at_url, reverse=True)))

    def beside(self, names: Sequence[str]) -> list[str]:
        """Return what a listing finds beside these checkpoints and those set aside, newest first. Raises SaveError.

        A write of `latest` that was given up may take effect after later ones, when what it leads to is gone.
        """
        known = {*names, *self.pointer().set_aside}
        return sorted((name for name in self._found() if name not in known), key=step_at_url, reverse=True)

    def claim(self, writer: str, *, after: int) -> Pointer:
        """Takes the URL for the folder that `writer` stands for, sets checkpoints of steps later than `after` aside,
        removes what an upload that was cut short left, and returns what `latest` says then. Raises SaveError."""
        old = self.pointer()
        kept = tuple(name for name in old.checkpoints if step_at_url(name) <= after)
        aside = tuple(name for name in old.checkpoints if step_at_url(name) > after)
        new = Pointer(writer=writer, checkpoints=kept, set_aside=(*old.set_aside, *aside))
        if new != old:
            self._point_at(new)
        self._prune(new)
        return new

    def name_of(self, folder: Path) -> str:
        """Return the name that a local checkpoint has there."""
        return _object_name(folder.name, (folder / MANIFEST).read_bytes())

    def upload(self, folder: Path, *, writer: str) -> None:
        """Brings a whole local checkpoint there: files, manifest, then `latest`. Then removes what is not kept.

        Raises SaveError where the store refuses or does not answer, and where another run has taken the URL.
        """
        name = self.name_of(folder)
        self._calls(
            f"upload of {folder.name}",
            lambda file: self._fs.put_file(str(folder / file), self._path(f"{name}/{file}")),
            list(read_manifest(folder)),
            self._timeout_s,
        )
        self._put(f"{name}/{MANIFEST}", (folder / MANIFEST).read_bytes())
        old = self.pointer()
        if old.writer not in ("", writer):
            raise SaveError(
                f"{self.url} was taken by another run while this one was writing there. Give each its own "
                "trainer.checkpoint_url"
            )
        older = tuple(each for each in old.checkpoints if step_at_url(each) < step_at_url(name))
        aside = tuple(each for each in old.set_aside if each != name)
        new = Pointer(writer=writer, checkpoints=(name, *older)[: self._keep], set_aside=aside)
        self._point_at(new)
        self._prune(new)

    def download(self, name: str, target: Path) -> None:
        """Brings a checkpoint to the empty folder `target`, and to the disk.

        Raises CheckpointError where it is not whole, SaveError where the store refuses or does not answer.
        """

        def get(file: str) -> None:
            path = target / file
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fs.get_file(self._path(f"{name}/{file}"), str(path))
            with path.open("rb") as stream:
                bring_to_disk(stream.fileno(), path)

        where = f"{self.url}/{name}"
        try:
            content = self._read(f"{name}/{MANIFEST}")
            if _object_name(name.partition("-")[0], content) != name:
                raise CheckpointError(f"{where}: {MANIFEST} does not have the SHA-256 sum in the name: it was damaged")
            write_atomically(target / MANIFEST, content)
            files = list(read_manifest(target))
            self._calls(f"download of {name}", get, files, self._timeout_s)
            for folder in {target, *((target / file).parent for file in files)}:
                sync_folder(folder)
        except FileNotFoundError as error:
            raise CheckpointError(f"{where}: a file is missing: {error}") from error

    def _point_at(self, pointer: Pointer) -> None:
        self._put(LATEST, (json.dumps({"format": _FORMAT, **asdict(pointer)}, indent=1) + "\n").encode())

    def _found(self) -> list[str]:
        """Checkpoints as far as a listing shows them, whole or not."""

        def names() -> list[str]:
            self._fs.invalidate_cache()
            try:
                return [str(path).rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._path(""), detail=False)]
            except FileNotFoundError:
                return []

        return [name for name in self._brief("listing", names) if step_at_url(name) >= 0]

    def _prune(self, pointer: Pointer) -> None:
        """Removes what `latest` does not lead to, as far as a listing shows it. A failure is a warning: the next save tries
        again."""

        def remove(name: str) -> None:
            self._fs.invalidate_cache()
            self._fs.rm(self._path(name), recursive=True)

        try:
            for name in self._found():
                if name not in (*pointer.checkpoints, *pointer.set_aside):
                    self._calls(f"removal of {name}", remove, [name], self._timeout_s)
        except (SaveError, FileNotFoundError) as error:
            logger.warning("older checkpoints could not be removed: %s", error)

    def _read(self, name: str) -> bytes:
        """The content of an object. Raises FileNotFoundError, too."""
        return self._brief(f"reading of {name}", lambda: bytes(self._fs.cat_file(self._path(name))))

    def _put(self, name: str, content: bytes) -> None:
        """Writes an object, which replaces one of that name."""
        what = f"upload of {name}"
        try:
            self._brief(what, lambda: self._fs.pipe_file(self._path(name), content))
        except FileNotFoundError as error:  # the bucket is not there
            raise self._failed(what, error) from error

    def _brief(self, what: str, call: Callable[[], R]) -> R:
        return self._calls(what, lambda _: call(), [None], min(_BRIEF_S, self._timeout_s))[0]

    def _calls(self, what: str, call: Callable[[A], R], items: Sequence[A], timeout_s: float) -> list[R]:
        """Makes calls, several at a time. Raises FileNotFoundError where something is not there, else SaveError."""
        name = f"{self.url} ({what})"
        try:
            return map_in_time(call, items, num_threads=_NUM_TRANSFERS, what=name, timeout_s=timeout_s)
        except FileNotFoundError:
            raise
        except Exception as error:  # each store's library raises its own
            raise self._failed(what, error) from error

    def _failed(self, what: str, error: Exception) -> SaveError:
        return SaveError(
            f"{self.url}: {what} failed: {type(error).__name__}: {error}. Check the name, the "
            "credentials and the network; what was there before is untouched"
        )

    @property
    def _fs(self) -> Any:
        return self._opened[0]

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        """The file system, and the path of the URL in it."""
        require("fsspec")
        from fsspec.core import url_to_fs

        options = {"auto_mkdir": True} if self.url.startswith(("file://", "local://")) else {}
        fs, path = url_to_fs(self.url, **options)
        return fs, str(path).rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._opened[1]}/{name}".rstrip("/")


def step_at_url(name: str) -> int:
    """Return the step in the name of a checkpoint at a URL; -1 where it is none."""
    match = _OBJECT_NAME.fullmatch(name)
    return int(match.group(1)) if match else -1


def _object_name(step_name: str, manifest: bytes) -> str:
    """The name under a URL of a checkpoint with this manifest: what differs never has the same."""
    return f"{step_name}-{hashlib.sha256(manifest).hexdigest()[:16]}"


def _parsed(content: bytes) -> Pointer:
    """Return the pointer that a file holds. Raises ValueError, KeyError, TypeError where it holds none."""
    entries = parse_strict_json(content)
    if entries["format"] != _FORMAT:
        raise ValueError(f"format {shown(entries['format'])}")
    names = (*entries["checkpoints"], *entries["set_aside"])
    if not isinstance(entries["writer"], str) or not all(
        isinstance(name, str) and step_at_url(name) >= 0 for name in names
    ):
        raise ValueError(f"names such as {shown(names[0] if names else '')}")
    return Pointer(
        writer=entries["writer"], checkpoints=tuple(entries["checkpoints"]), set_aside=tuple(entries["set_aside"])
    )
