"""A local stand-in for an object store: objects are put, read, listed and removed whole; there is no rename and no append.

Each operation on the store is told to `hook` before it takes effect, which may fail it, hang it, or end the process;
listings may lag behind; every state of the store that an operation left can be looked at, and put back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
from fsspec.spec import AbstractFileSystem

PROTOCOL = "lab"
_lock = threading.RLock()
Objects = dict[str, bytes]


class Killed(BaseException):
    """Stands for kill -9: nothing of ours may catch it."""


class Bucket:
    """What all of the store holds, and how it behaves."""

    def __init__(self) -> None:
        self.objects: Objects = {}
        self.states: list[tuple[str, Objects]] = []
        """The operation, and the objects after it."""
        self.hook: Callable[[str, str], None] = lambda operation, path: None
        """Told the operation and the path before it takes effect."""
        self.lag = 0
        """Listings show what there was so many changes ago."""

    def change(self, operation: str, path: str, content: bytes | None) -> None:
        self.hook(operation, path)
        with _lock:
            if content is None:
                self.objects.pop(path, None)  # removing what is not there is no error
            else:
                self.objects[path] = content
            self.states.append((f"{operation} {path}", dict(self.objects)))

    def listed(self) -> Objects:
        with _lock:
            return self.states[-1 - self.lag][1] if 0 < self.lag < len(self.states) else dict(self.objects)


bucket = Bucket()


class LabStore(AbstractFileSystem):
    """fsspec's view of `bucket`. Whatever an object store lacks raises."""

    protocol = PROTOCOL
    cachable = False

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        bucket.change("put", self._strip_protocol(path), bytes(value))

    def put_file(self, lpath: str, rpath: str, *args: Any, **kwargs: Any) -> None:
        bucket.change("put", self._strip_protocol(rpath), Path(lpath).read_bytes())

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> bytes:
        path = self._strip_protocol(path)
        bucket.hook("get", path)
        try:
            return bucket.objects[path]
        except KeyError:
            raise FileNotFoundError(path) from None

    def get_file(self, rpath: str, lpath: str, *args: Any, **kwargs: Any) -> None:
        Path(lpath).write_bytes(self.cat_file(rpath))

    def rm_file(self, path: str) -> None:
        bucket.change("rm", self._strip_protocol(path), None)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        path = self._strip_protocol(path)
        names = [name for name in bucket.listed() if name == path or (recursive and name.startswith(f"{path}/"))]
        if not names:
            raise FileNotFoundError(path)
        for name in names:
            bucket.change("rm", name, None)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path).rstrip("/")
        bucket.hook("ls", path)
        found = {}
        for name, content in bucket.listed().items():
            if name == path:
                found[name] = {"name": name, "size": len(content), "type": "file"}
            elif name.startswith(f"{path}/"):
                child, separator, _ = name.removeprefix(f"{path}/").partition("/")
                kind = "directory" if separator else "file"
                found[f"{path}/{child}"] = {"name": f"{path}/{child}", "size": len(content), "type": kind}
        if not found:
            raise FileNotFoundError(path)
        return list(found.values()) if detail else sorted(found)

    def mv(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("an object store renames nothing")

    cp_file = rename = move = mv

    def _open(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("an object store neither appends nor keeps files open")


fsspec.register_implementation(PROTOCOL, LabStore, clobber=True)


@contextmanager
def empty_bucket() -> Iterator[Bucket]:
    """The bucket, with nothing in it and nothing wrong with it, before and after."""
    bucket.__init__()  # type: ignore[misc]
    yield bucket
    bucket.__init__()  # type: ignore[misc]
