"""A disk that keeps what was synced, and of the rest what it likes.

`os`, `open`, `pathlib`, `shutil` and `fcntl` reach it by paths below `ROOT`. A file's content is on the disk when the file
was synced, a name (of a file that was made, renamed or removed) when its folder was: less than any file system in use
promises, and what `tests/reliability/crash_states.py` enumerates. A killed process leaves all that it did, and perhaps the
beginning of its last write; a machine without power loses any of what was not synced.
"""

from __future__ import annotations

import errno
import io
import os
import random
import stat
from collections.abc import Callable, Iterator
from typing import Any

from tests.world.machine import Killed, Namespace, World

ROOT = "/simulated"
_PID = 4711
"""Of every process of the world, whose locks have it: the real one has more digits on one day than on another."""
_FIRST_DESCRIPTOR = 1 << 20


class Inode:
    """A file."""

    def __init__(self, number: int) -> None:
        self.number, self.content, self.synced = number, bytearray(), b""
        self.pending: list[tuple[int, bytes]] = []
        """Writes that no sync has reached: where, and what; -1 cuts the file."""
        self.locked_by: Any = None
        self.at = 0.0


class Folder(Inode):
    """Names of files and folders."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.names: dict[str, Inode] = {}
        self.synced_names: dict[str, Inode] = {}
        self.pending_names: list[dict[str, Inode | None]] = []
        """Changes that no sync has reached; those of one entry come together."""


class Descriptor:
    """What a process has open."""

    def __init__(self, inode: Inode, process: Any, path: str, *, appends: bool = False) -> None:
        self.inode, self.process, self.path, self.appends = inode, process, path, appends


class Disk:
    """Files below `ROOT`."""

    def __init__(self, world: World, latency: Callable[[str], None] = lambda operation: None) -> None:
        """`latency` is told of each operation before it happens, and may take time, or raise OSError."""
        self.world, self._latency = world, latency
        self._count = 0
        self.root = Folder(self._number())
        self.descriptors: dict[int, Descriptor] = {}
        self._next_descriptor = _FIRST_DESCRIPTOR
        self.room: int | None = None
        """Bytes that may still be written; None is any number."""

    def _number(self) -> int:
        self._count += 1
        return self._count

    # What crashes leave

    def lose_power(self, draw: random.Random) -> str:
        """Forget what no sync has reached, or some of it; returns what was lost."""
        way = draw.choice(("all", "some", "some", "data", "names", "zeros"))
        lost, seen = 0, set[int]()
        folders = [self.root]
        while folders:
            folder = folders.pop()
            kept = dict(folder.synced_names)
            for change in folder.pending_names:
                if way in ("all", "names") or (way == "some" and draw.random() < 0.5):
                    lost += 1
                    continue
                for name, inode in change.items():
                    if inode is None:
                        kept.pop(name, None)
                    else:
                        kept[name] = inode
            folder.names, folder.synced_names, folder.pending_names = kept, dict(kept), []
            for inode in kept.values():
                if inode.number in seen:
                    continue
                seen.add(inode.number)
                inode.locked_by = None
                if isinstance(inode, Folder):
                    folders.append(inode)
                else:
                    lost += self._lose_data(inode, way, draw)
        self.descriptors.clear()
        return f"{way} of what was not synced, {lost} operations"

    @staticmethod
    def _lose_data(inode: Inode, way: str, draw: random.Random) -> int:
        content, lost = bytearray(inode.synced), 0
        for place, data in inode.pending:
            fate = "lost" if way in ("all", "data") else "kept"
            if way == "zeros":
                fate = draw.choice(("zeros", "kept"))
            elif way == "some":
                fate = draw.choice(("lost", "kept", "torn", "zeros"))
            lost += fate != "kept"
            if fate == "lost":
                continue
            if place < 0:
                del content[int.from_bytes(data, "big") :]
                continue
            if fate == "torn":
                data = data[: draw.randrange(len(data) + 1)]
            elif fate == "zeros":
                data = bytes(len(data))
            content.extend(bytes(max(0, place - len(content))))
            content[place : place + len(data)] = data
        inode.content, inode.synced, inode.pending = content, bytes(content), []
        return lost

    def vanish(self) -> None:
        """Be another disk, which is empty."""
        self.root = Folder(self._number())
        self.descriptors.clear()

    def let_go(self, process: Any) -> None:
        """Close what an ended process had open."""
        for number, each in list(self.descriptors.items()):
            if each.process is process:
                self.close(number)

    # Operations

    def _do(self, operation: str, path: str) -> None:
        self._latency(operation)
        self.world.event("file", f"{operation} {path.removeprefix(ROOT)}")

    def find(self, path: Any) -> Inode:
        inode: Inode = self.root
        for part in os.fspath(path)[len(ROOT) :].split("/"):
            if part in ("", "."):
                continue
            if not isinstance(inode, Folder):
                raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(path))
            if part not in inode.names:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
            inode = inode.names[part]
        return inode

    def _parent(self, path: Any) -> tuple[Folder, str]:
        above, _, name = os.fspath(path).rstrip("/").rpartition("/")
        folder = self.find(above)
        if not isinstance(folder, Folder):
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(path))
        return folder, name

    def _change(self, folder: Folder, change: dict[str, Inode | None]) -> None:
        for name, inode in change.items():
            if inode is None:
                folder.names.pop(name, None)
            else:
                folder.names[name] = inode
        folder.pending_names.append(change)
        folder.at = 1.8e9 + self.world.now + self.world.wall_offset

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: None = None) -> None:
        del mode, dir_fd
        folder, name = self._parent(path)
        if name not in folder.names:
            self._do("mkdir", str(path))
        if name in folder.names:  # perhaps since just now, by another thread
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        self._change(folder, {name: Folder(self._number())})

    def remove(self, path: Any, *, dir_fd: None = None) -> None:
        del dir_fd
        folder, name = self._parent(path)
        if isinstance(self.find(path), Folder):
            raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
        self._do("remove", str(path))
        self.find(path)
        self._change(folder, {name: None})

    def rmdir(self, path: Any, *, dir_fd: None = None) -> None:
        del dir_fd
        folder, name = self._parent(path)
        found = self.find(path)
        if not isinstance(found, Folder):
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(path))
        if not found.names:
            self._do("rmdir", str(path))
        if found.names:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        self._change(folder, {name: None})

    def rename(self, path: Any, target: Any) -> None:
        (old, name), (new, target_name) = self._parent(path), self._parent(target)
        inode = self.find(path)
        there = new.names.get(target_name)
        if isinstance(there, Folder) and there.names:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(target))
        self._do("rename", f"{path} to {os.path.basename(os.fspath(target))}")
        inode = self.find(path)
        if old is new:
            self._change(old, {name: None, target_name: inode})
        else:
            self._change(new, {target_name: inode})
            self._change(old, {name: None})

    def stat(self, path: Any, *, dir_fd: None = None, follow_symlinks: bool = True) -> os.stat_result:
        del dir_fd, follow_symlinks
        self.world.check()
        inode = self.descriptors[path].inode if isinstance(path, int) else self.find(path)
        kind = stat.S_IFDIR | 0o755 if isinstance(inode, Folder) else stat.S_IFREG | 0o644
        at = int(inode.at)
        return os.stat_result((kind, inode.number, 77, 1, os.getuid(), os.getgid(), len(inode.content), at, at, at))

    def listdir(self, path: Any = ".") -> list[str]:
        self.world.check()
        folder = self.find(path)
        if not isinstance(folder, Folder):
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(path))
        # No file system promises an order.
        names = sorted(folder.names)
        self.world.random("listing").shuffle(names)
        return names

    def scandir(self, path: Any) -> Entries:
        return Entries([Entry(self, os.fspath(path), name) for name in self.listdir(path)])

    def open_descriptor(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: None = None) -> int:
        del mode, dir_fd
        writes = bool(flags & (os.O_WRONLY | os.O_RDWR))
        try:
            inode = self.find(path)
            if flags & os.O_EXCL and flags & os.O_CREAT:
                raise FileExistsError(errno.EEXIST, "File exists", str(path))
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
            folder, name = self._parent(path)
            self._do("create", str(path))
            inode = Inode(self._number())
            self._change(folder, {name: inode})
        else:
            if writes:
                self._do("open", str(path))
        if isinstance(inode, Folder) and writes:
            raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
        if flags & os.O_TRUNC and inode.content:
            self.truncate_inode(inode, 0)
        number, self._next_descriptor = self._next_descriptor, self._next_descriptor + 1
        process = self.world.current.process
        self.descriptors[number] = Descriptor(inode, process, str(path), appends=bool(flags & os.O_APPEND))
        return number

    def duplicate(self, number: int) -> int:
        old = self.descriptors[number]
        new, self._next_descriptor = self._next_descriptor, self._next_descriptor + 1
        self.descriptors[new] = Descriptor(old.inode, old.process, old.path, appends=old.appends)
        return new

    def close(self, number: int) -> None:
        found = self.descriptors.pop(number, None)
        if found is not None and found.inode.locked_by is found:
            found.inode.locked_by = None

    def sync(self, number: int) -> None:
        found = self.descriptors[number]
        self._do("sync", found.path)
        inode = found.inode
        inode.synced, inode.pending = bytes(inode.content), []
        if isinstance(inode, Folder):
            inode.synced_names, inode.pending_names = dict(inode.names), []

    def write(self, number: int, data: bytes, place: int | None = None) -> int:
        """Write at a place, or at the end, and return how much; a kill may come in the middle."""
        found = self.descriptors.get(number)
        if found is None or found.process.is_dead:
            return len(data)  # a buffer of a process that has ended is flushed by nobody
        inode, data = found.inode, bytes(data)
        try:
            self._do("write", f"{found.path} {len(data)}")
        except Killed:
            data = data[: self.world.random("torn").randrange(len(data) + 1)]
            self._put(inode, data, len(inode.content) if found.appends or place is None else place)
            raise
        if self.room is not None:
            if self.room < len(data):
                data = data[: self.room]
            self.room -= len(data)
            if not data:
                raise OSError(errno.ENOSPC, "No space left on device", found.path)
        self._put(inode, data, len(inode.content) if found.appends or place is None else place)
        return len(data)

    def _put(self, inode: Inode, data: bytes, place: int) -> None:
        inode.content.extend(bytes(max(0, place - len(inode.content))))
        inode.content[place : place + len(data)] = data
        inode.pending.append((place, data))
        inode.at = 1.8e9 + self.world.now + self.world.wall_offset

    def truncate_inode(self, inode: Inode, size: int) -> None:
        inode.content.extend(bytes(max(0, size - len(inode.content))))
        del inode.content[size:]
        inode.pending.append((-1, size.to_bytes(8, "big")))

    def truncate(self, path: Any, size: int) -> None:
        inode = self.descriptors[path].inode if isinstance(path, int) else self.find(path)
        self._do("truncate", str(path))
        self.truncate_inode(inode, size)

    def lock(self, number: int, operation: int) -> None:
        del operation  # exclusive, and not waited for, as the product has it
        found = self.descriptors[number]
        holder = found.inode.locked_by
        if holder is not None and not holder.process.is_dead and holder is not found:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable", found.path)
        found.inode.locked_by = found

    def open(
        self, path: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, *rest: Any, **named: Any
    ) -> Any:
        """As Python's own `open`, whose buffers it uses."""
        flags = {
            "r": os.O_RDONLY,
            "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
            "a": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
        }
        flags["x"] = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        kind = next(letter for letter in mode if letter in flags)
        number = (
            path
            if isinstance(path, int)
            else self.open_descriptor(path, flags[kind] | (os.O_RDWR if "+" in mode else 0))
        )
        if isinstance(self.descriptors[number].inode, Folder):
            self.close(number)
            raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
        raw = Raw(self, number, reads=kind == "r" or "+" in mode, writes=kind != "r" or "+" in mode, at_end=kind == "a")
        if buffering == 0:
            return raw
        size = max(buffering, io.DEFAULT_BUFFER_SIZE)
        kinds = {(True, False): io.BufferedReader, (False, True): io.BufferedWriter, (True, True): io.BufferedRandom}
        buffered: Any = kinds[raw.readable(), raw.writable()](raw, size)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding or "utf-8", *rest, **named)


class Raw(io.RawIOBase):
    """An open file."""

    def __init__(self, disk: Disk, number: int, *, reads: bool, writes: bool, at_end: bool) -> None:
        self._disk, self._number, self._reads, self._writes = disk, number, reads, writes
        self.name = disk.descriptors[number].path
        self._inode = disk.descriptors[number].inode
        self._place = len(self._inode.content) if at_end else 0

    def readable(self) -> bool:
        return self._reads

    def writable(self) -> bool:
        return self._writes

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return False

    def readinto(self, buffer: Any) -> int:
        self._disk.world.check()
        data = self._inode.content[self._place : self._place + len(buffer)]
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)

    def write(self, data: Any) -> int:
        written = self._disk.write(self._number, bytes(data), self._place)
        self._place = self._place + written
        return written

    def seek(self, place: int, whence: int = 0) -> int:
        self._place = place + (0, self._place, len(self._inode.content))[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def truncate(self, size: int | None = None) -> int:
        self._disk.truncate(self._number, self._place if size is None else size)
        return self._place if size is None else size

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._disk.close(self._number)


class Entry:
    """As `os.DirEntry`."""

    def __init__(self, disk: Disk, folder: str, name: str) -> None:
        self._disk, self.name, self.path = disk, name, f"{folder}/{name}"

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        del follow_symlinks
        try:
            return isinstance(self._disk.find(self.path), Folder)
        except OSError:
            return False

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return not self.is_dir(follow_symlinks=follow_symlinks)

    def is_symlink(self) -> bool:
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return self._disk.stat(self.path, follow_symlinks=follow_symlinks)

    def __fspath__(self) -> str:
        return self.path


class Entries:
    """As what `os.scandir` returns."""

    def __init__(self, entries: list[Entry]) -> None:
        self._entries = iter(entries)

    def __enter__(self) -> Iterator[Entry]:
        return self._entries

    def __iter__(self) -> Iterator[Entry]:
        return self._entries

    def __exit__(self, *_: object) -> None:
        return

    def close(self) -> None:
        return


def names_of(disk: Disk) -> tuple[Namespace, Callable[..., Any]]:
    """Return `os` and `open` that lead paths below `ROOT`, and descriptors of theirs, to the disk."""

    def is_ours(target: Any) -> bool:
        if isinstance(target, int):
            return target >= _FIRST_DESCRIPTOR
        return target is not None and os.fspath(target).startswith(ROOT)  # type: ignore[no-any-return]

    def led(real: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
        return lambda target, *rest, **named: (ours if is_ours(target) else real)(target, *rest, **named)

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOTSUP, "not simulated")

    own = {
        "mkdir": disk.mkdir,
        "remove": disk.remove,
        "unlink": disk.remove,
        "rmdir": disk.rmdir,
        "rename": disk.rename,
        "replace": disk.rename,
        "stat": disk.stat,
        "lstat": disk.stat,
        "fstat": disk.stat,
        "listdir": disk.listdir,
        "scandir": disk.scandir,
        "open": disk.open_descriptor,
        "dup": disk.duplicate,
        "close": disk.close,
        "fsync": disk.sync,
        "truncate": disk.truncate,
        "ftruncate": disk.truncate,
        "write": disk.write,
        "access": lambda *_, **__: True,
        "chmod": lambda *_, **__: None,
        "utime": lambda *_, **__: None,
        "setxattr": refuse,
        "readlink": refuse,
    }

    found = Namespace(
        os, **{name: led(getattr(os, name), function) for name, function in own.items()}, getpid=lambda: _PID
    )
    return found, led(open, disk.open)
