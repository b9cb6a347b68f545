"""What may lie on a disk when a run ends in the middle of its file operations.

A killed process leaves what its finished calls did, and perhaps the beginning of its last write. A machine without power
may also lose, in any order, whatever was not brought to the disk by a `sync`: the data of a file until the file is
synced, and the names in a folder until the folder is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from tests.reliability.recordings import Operation

_DATA = ("write", "truncate")


class Disk:
    """Files and folders below a root. Contents are immutable, so that copies are cheap."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.folders: set[str] = {""}

    def copy(self) -> Disk:
        other = Disk()
        other.files, other.folders = dict(self.files), set(self.folders)
        return other

    def apply(self, operation: Operation) -> None:
        """Raises KeyError where what it is about is not there."""
        kind, path = operation.kind, operation.path
        if kind in ("create", "mkdir"):
            if _parent(path) not in self.folders:
                raise KeyError(path)
            if kind == "mkdir":
                self.folders.add(path)
            else:
                self.files.setdefault(path, b"")
        elif kind == "truncate":
            self.files[path] = self.files[path][: operation.offset].ljust(operation.offset, b"\0")
        elif kind == "write":
            before = self.files[path]
            start = len(before) if operation.offset < 0 else operation.offset
            end = start + len(operation.data)
            self.files[path] = before[:start].ljust(start, b"\0") + operation.data + before[end:]
        elif kind == "rename":
            self._rename(path, operation.target)
        elif kind == "remove":
            if path in self.folders:
                self.folders.remove(path)
                for name in [name for name in self.files if name.startswith(f"{path}/")]:
                    del self.files[name]
            else:
                del self.files[path]

    def _rename(self, path: str, target: str) -> None:
        if _parent(target) not in self.folders:
            raise KeyError(target)
        if path in self.files:
            self.files[target] = self.files.pop(path)
            return
        self.folders.remove(path)
        self.folders.add(target)
        for name in [name for name in self.folders if name.startswith(f"{path}/")]:
            self.folders.remove(name)
            self.folders.add(target + name[len(path) :])
        for name in [name for name in self.files if name.startswith(f"{path}/")]:
            self.files[target + name[len(path) :]] = self.files.pop(name)

    def key(self) -> frozenset[object]:
        """Equal for equal contents."""
        return frozenset([*self.files.items(), *self.folders])

    def lay_out(self, root: Path) -> None:
        """Writes everything into the new folder `root`."""
        for folder in sorted(self.folders):
            (root / folder).mkdir(parents=True)
        for path, content in self.files.items():
            (root / path).write_bytes(content)


@dataclass(frozen=True, kw_only=True)
class CrashState:
    """One state that a crash may leave."""

    disk: Disk
    number: int
    """Operations that were begun."""
    what: str
    """`prefix`, or what of it is torn, lost or reordered."""

    @property
    def is_power_cut(self) -> bool:
        """Not what a killed process leaves."""
        return self.what not in ("prefix", "torn: half", "torn: all but a byte")


def crash_states(operations: Sequence[Operation]) -> Iterator[CrashState]:
    """Every prefix with its torn and reordered last operations; states that occurred before are left out."""
    seen: set[frozenset[object]] = set()
    for state in _all_states(operations):
        key = state.disk.key()
        if key not in seen:
            seen.add(key)
            yield state


def _all_states(operations: Sequence[Operation]) -> Iterator[CrashState]:
    before = [Disk()]
    pending = _Pending()
    for number, operation in enumerate(operations, start=1):
        for what, torn in _torn(operation):
            disk = before[-1].copy()
            disk.apply(torn)
            yield CrashState(disk=disk, number=number, what=what)
        disk = before[-1].copy()
        disk.apply(operation)
        before.append(disk)
        pending.add(number - 1, operation)
        yield CrashState(disk=disk, number=number, what="prefix")
        for what, lost, zeros in pending.losses():
            changed = dict.fromkeys(lost) | {index: _zeros(operations[index]) for index in zeros}
            if changed:
                disk = _without(operations[:number], changed, before[min(changed)])
                yield CrashState(disk=disk, number=number, what=what)


def _without(operations: Sequence[Operation], changed: dict[int, Operation | None], disk: Disk) -> Disk:
    """The operations from the first changed one on, applied to `disk` as it was before; one that builds on what was lost is
    lost as well."""
    disk = disk.copy()
    for index in range(min(changed), len(operations)):
        operation = changed.get(index, operations[index])
        if operation is not None:
            try:
                disk.apply(operation)
            except KeyError:
                continue
    return disk


class _Pending:
    """Which operations a power cut may undo: all that no sync has reached."""

    def __init__(self) -> None:
        self._data: dict[int, str] = {}
        """Index of the operation and the present path of the file."""
        self._names: dict[int, str] = {}
        """Index of the operation and the present path of the folder that the name is in."""

    def add(self, index: int, operation: Operation) -> None:
        kind, path = operation.kind, operation.path
        if kind == "sync":
            self._data = {each: where for each, where in self._data.items() if where != path}
            self._names = {each: where for each, where in self._names.items() if where != path}
        elif kind in _DATA:
            self._data[index] = path
        else:
            self._names[index] = _parent(operation.target or path)
        if kind == "rename":
            self._data = {each: _moved(where, path, operation.target) for each, where in self._data.items()}
            self._names = {each: _moved(where, path, operation.target) for each, where in self._names.items()}
        if kind == "remove":
            self._data = {each: where for each, where in self._data.items() if where != path}

    def losses(self) -> Iterator[tuple[str, list[int], list[int]]]:
        """What is lost, the operations that are, and those whose data are zeros."""
        data, names = sorted(self._data), sorted(self._names)
        yield "lost: all that was not synced", [*data, *names], []
        yield "lost: data that were not synced", data, []
        yield "lost: data that were not synced are zeros", [], data
        yield "lost: names that were not synced", names, []
        yield "reordered: the last data are lost alone", data[-1:], []
        yield "reordered: the last name is lost alone", names[-1:], []
        yield "reordered: the first name is lost alone", names[:1], []


def _torn(operation: Operation) -> Iterator[tuple[str, Operation]]:
    size = len(operation.data)
    if operation.kind == "write" and size > 1:
        yield "torn: half", replace(operation, data=operation.data[: size // 2])
        yield "torn: all but a byte", replace(operation, data=operation.data[:-1])
        yield "torn: half, zeros after it", replace(operation, data=operation.data[: size // 2].ljust(size, b"\0"))


def _zeros(operation: Operation) -> Operation:
    return replace(operation, data=bytes(len(operation.data)))


def _parent(path: str) -> str:
    parent = str(PurePosixPath(path).parent)
    return "" if parent == "." else parent


def _moved(where: str, path: str, target: str) -> str:
    return target + where[len(path) :] if where == path or where.startswith(f"{path}/") else where
