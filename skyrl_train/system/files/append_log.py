"""`AppendLog`: lines of JSON that are on disk before anything follows from them.

Lines that come together are one write, on a thread, and each has its number, `"write": 17`. A write begins when the one
before is on disk (`fsync`), so that a kill or a loss of power can only tear the last one: its end is missing, or blocks of
it are zeros with lines of the same write behind them. All from the first line on that is cut short or has zeros is removed.
Where lines of later writes stand behind such a line it is no crash, and refused.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from skyrl_train.errors import SaveError
from skyrl_train.system.files.files import DISK_TIMEOUT_S, bring_to_disk, make_folder, parse_strict_json, sync_folder
from skyrl_train.system.files.text import json_line
from skyrl_train.system.threads import WorkerThread

_CLOSE_TIMEOUT_S = 30.0

logger = logging.getLogger(__name__)


class DamagedLine(ValueError):
    """A line that no crash explains."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number = number
        """Of the line, from 1 on."""


def log_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield where each line ends, in bytes, and what it holds, up to what a crash has torn; nothing of a file that is not
    there. Raises DamagedLine."""
    if not path.exists():
        return
    end, write, torn_at = 0, 0, 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n") or b"\0" in line:
                torn_at = torn_at or number
                continue
            try:
                record = parse_strict_json(line)
                found = int(record.get("write", 0))
            except (ValueError, TypeError, AttributeError) as error:
                raise DamagedLine(number, f"{type(error).__name__}: {error}") from error
            if not torn_at:
                end, write = end + len(line), found
                yield end, record
            elif found > write + 1:
                raise DamagedLine(torn_at, f"ValueError: it is damaged, and line {number} was written long after it")


class AppendLog:
    """Appends to a file whose lines were read. From one event loop, or thread."""

    def __init__(self, path: Path, *, length: int, num_writes: int, thread: str = "journal") -> None:
        """`length`: bytes of the lines that `log_lines` yielded, behind which the file is cut; `num_writes`: the highest
        number of a write among them. Raises OSError."""
        self.path = path
        self.failed: OSError | None = None
        """Why nothing is written any more."""
        self._num_writes = num_writes
        make_folder(path.parent)
        self._temporary.unlink(missing_ok=True)
        self._file = path.open("ab")
        self._file.truncate(length)
        self._length = length
        bring_to_disk(self._file.fileno(), path)
        sync_folder(path.parent)
        self._pending: deque[tuple[Mapping[str, Any], Future[int]]] = deque()
        self._thread = WorkerThread(thread)

    def append(self, record: Mapping[str, Any]) -> Future[int]:
        """Return what is done when the line is on disk: the byte at which it begins, or the OSError."""
        place: Future[int] = Future()
        self._pending.append((record, place))
        self._thread.submit(self._write)
        return place

    def read(self, place: int) -> dict[str, Any]:
        """Return the line that begins at this byte, until the log is rewritten. Raises OSError, ValueError."""
        with open(self.path, "rb") as file:
            file.seek(place)
            record: dict[str, Any] = parse_strict_json(file.readline())
        return record

    def rewrite(self, head: Mapping[str, Any], keeps: Callable[[bytes], bool]) -> None:
        """Have the thread leave out the lines that it does not keep, behind all that was appended; the new file takes the
        old one's name when it is on disk. A disk that refuses leaves the log as it is, with a warning."""
        self._thread.submit(self._rewrite, head, keeps)

    def close(self) -> None:
        """Write what is pending and close the file. Idempotent. Raises SaveError where the disk does not answer."""
        if not self._thread.close(_CLOSE_TIMEOUT_S):
            raise SaveError(f"{self.path} could not be closed within {_CLOSE_TIMEOUT_S:g} s. Is the disk reachable?")
        try:
            self._file.close()
        except OSError as error:  # of what could not be written, which those who wait for it were told
            self.failed = self.failed or error

    async def on_disk(self, written: Future[int]) -> int:
        """Wait for what `append` returned. Raises SaveError."""
        try:
            return await asyncio.wait_for(asyncio.wrap_future(written), 2 * DISK_TIMEOUT_S)
        except (OSError, asyncio.TimeoutError) as error:
            raise SaveError(f"{self.path} could not be written: {error}. Make room, and start the run again") from error

    @property
    def _temporary(self) -> Path:
        return self.path.with_name(f".{self.path.name}.tmp")

    def _write(self) -> None:
        """On the thread: all that is pending by now, of which later calls find nothing left."""
        lines: list[bytes] = []
        places: list[tuple[Future[int], int]] = []
        length = self._length
        while self._pending:
            record, future = self._pending.popleft()
            if (
                future.set_running_or_notify_cancel()
            ):  # who waited may have been cancelled: the line is written all the same
                places.append((future, length))
            if self.failed is None:
                lines.append(json_line({**record, "write": self._num_writes + 1}))
                length += len(lines[-1])
        if self.failed is not None or not lines:
            for future, _ in places:
                future.set_exception(self.failed)
            return
        try:
            self._num_writes += 1
            self._file.write(b"".join(lines))
            self._file.flush()
            bring_to_disk(self._file.fileno(), self.path)
        except OSError as error:  # what follows half of a line could not be read
            self.failed = error
            for future, _ in places:
                future.set_exception(error)
            return
        self._length = length
        for future, place in places:
            future.set_result(place)

    def _rewrite(self, head: Mapping[str, Any], keeps: Callable[[bytes], bool]) -> None:
        try:
            with open(self.path, "rb") as old, open(self._temporary, "wb") as new:
                new.write(json_line({**head, "write": 0}))
                new.writelines(line for line in old if keeps(line))
                length = new.tell()
                new.flush()
                bring_to_disk(new.fileno(), self._temporary)
            os.replace(self._temporary, self.path)
        except OSError as error:
            with suppress(OSError):
                self._temporary.unlink()
            logger.warning("%s could not be compacted (%s), and grows until it can be", self.path, error)
            return
        try:  # what is appended must be in the file that has the name, after a loss of power, too
            self._file.close()
            self._file, self._length = self.path.open("ab"), length
            sync_folder(self.path.parent)
        except OSError as error:
            self.failed = error
