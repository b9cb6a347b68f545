"""Files of lines that grow while they are read: a run's records, and its log."""

from __future__ import annotations

import os
import re
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyrl_train.errors import DeadlineError
from skyrl_train.system.files import parse_strict_json

Json = dict[str, Any]
_LAST_OF_LOG = 200
_LOG_BYTES = 2**22
"""The end of a log that is searched for warnings."""
_TAIL_BYTES = 2**22
"""Of a file, in one answer."""
_TAIL_LINES = 500
_END_BYTES = 2**18
_READ_TIMEOUT_S = 60.0
_RUN_ENDED = ": the run ended"
_LEVEL = re.compile(r"^\S+ \S+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) ")


@contextmanager
def held_in_time(lock: threading.Lock, what: str, timeout_s: float) -> Iterator[None]:
    """Wraps what one thread does at a time. Raises DeadlineError where another does not end in time."""
    if not lock.acquire(timeout=timeout_s):
        raise DeadlineError(what, timeout_s, "Ask again.")
    try:
        yield
    finally:
        lock.release()


@dataclass
class Tail:
    """A file of lines that grows, read as far as there are whole lines."""

    path: Path
    offset: int = 0
    inode: int = 0
    records: list[Json] = field(default_factory=list)
    torn: int = 0
    """Lines that are no record."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def refresh(self) -> None:
        """Read what is new; all, where the file was replaced or cut. Raises DeadlineError where a disk does not answer."""
        with held_in_time(self._lock, f"the disk of {self.path}", _READ_TIMEOUT_S):
            self._read()

    def _read(self) -> None:
        try:
            with self.path.open("rb") as file:
                inode, size = _identity(file.fileno())
                if inode != self.inode or size < self.offset:
                    self.inode, self.offset, self.records, self.torn = inode, 0, [], 0
                file.seek(self.offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except OSError:  # none yet, or none any more
            self.inode, self.offset, self.records, self.torn = 0, 0, [], 0
            return
        self.offset += len(whole) + len(newline)
        lines = whole.split(b"\n") if newline else []
        found = records_in(lines)
        self.records += found
        self.torn += len(lines) - len(found)

    @property
    def position(self) -> str:
        """Where the next line begins, for `new_lines`."""
        return f"{self.inode}-{self.offset}"


def records_in(lines: Iterable[bytes | str]) -> list[Json]:
    """Return the records of a step among lines of JSON."""
    return [record for record in objects_in(lines) if type(record.get("step")) is int]


def objects_in(lines: Iterable[bytes | str]) -> list[Json]:
    """Return the objects among lines of JSON; what is none is left out."""
    found = []
    for line in lines:
        with suppress(ValueError):
            record = parse_strict_json(line)
            if isinstance(record, dict):
                found.append(record)
    return found


def new_lines(path: Path, position: str) -> tuple[list[str], str, bool, bool]:
    """Return the whole lines after a position, the position after them, whether there are more, and whether the file is
    another one than the position was taken of, so that the lines are from its start.

    Raises ValueError for a position that is none.
    """
    old_inode, _, old_offset = position.rpartition("-")
    inode_before, offset = int(old_inode or 0), int(old_offset)
    try:
        with path.open("rb") as file:
            inode, size = _identity(file.fileno())
            is_other = inode_before not in (0, inode) or size < offset
            offset = 0 if is_other else offset
            file.seek(offset)
            content = file.read(_TAIL_BYTES)
    except OSError:
        return [], "0", False, inode_before != 0
    lines = content.split(b"\n")[:-1]
    if not lines and len(content) == _TAIL_BYTES:  # one line that is longer than an answer: it is left out
        lines, offset = [], offset + len(content)
    kept = lines[:_TAIL_LINES]
    offset += sum(len(line) + 1 for line in kept)
    has_more = len(kept) < len(lines) or len(content) == _TAIL_BYTES
    return [line.decode(errors="replace") for line in kept], f"{inode}-{offset}", has_more, is_other


def end_of(path: Path) -> str:
    """Return the position after the last whole line."""
    try:
        with path.open("rb") as file:
            inode, size = _identity(file.fileno())
            file.seek(max(0, size - _TAIL_BYTES))
            rest = file.read().rpartition(b"\n")[2]
    except OSError:
        return "0"
    return f"{inode}-{size - len(rest)}"


def last_lines(path: Path) -> list[bytes]:
    """Return the whole lines at the end of a file: those in its last 256 KiB."""
    try:
        with path.open("rb") as file:
            begin = max(0, _identity(file.fileno())[1] - _END_BYTES)
            file.seek(begin)
            lines = file.read().split(b"\n")
    except OSError:
        return []
    return lines[1 if begin else 0 : -1]


def log_warnings(path: Path) -> tuple[list[Json], int]:
    """Return the last warnings and errors of a log, tracebacks with them, and how many there are in what was searched."""
    try:
        with path.open("rb") as file:
            _, size = _identity(file.fileno())
            start = max(0, size - _LOG_BYTES)
            before = 0
            while chunk := file.read(min(start - file.tell(), 2**20)):
                before += chunk.count(b"\n")
            text = file.read(_LOG_BYTES).decode(errors="replace")
    except OSError:
        return [], 0
    found: deque[Json] = deque(maxlen=_LAST_OF_LOG)
    total, is_open = 0, False
    for number, line in enumerate(text.split("\n"), start=before + 1):
        level = _LEVEL.match(line)
        if level is None:
            if is_open and line and len(found[-1]["text"]) < 20_000:
                found[-1]["text"] += f"\n{line}"
            continue
        # The error that ended a run is told on the terminal, and its traceback is in the log alone.
        if is_open := level[1] in ("WARNING", "ERROR", "CRITICAL") or line.endswith(_RUN_ENDED):
            total += 1
            found.append({"line": number, "level": level[1], "text": line[:20_000]})
    return list(found), total


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_ino, status.st_size
