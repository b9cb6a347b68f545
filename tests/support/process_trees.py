"""Which processes a run started, and which of them are still there when it is over. Linux only: reads /proc."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

_LOOK_EVERY_S = 0.2
_PROC = Path("/proc")


class Family:
    """A process and all that stem from it, found by looking a few times a second: one whose parent is gone stays known.

    A member is a process number together with its start time, so that a number that was given away counts as another.
    """

    def __init__(self, root: int) -> None:
        self._members: set[tuple[int, str]] = set()
        self._stop = threading.Event()
        start = _start_time(root)
        if start is not None:
            self._members.add((root, start))
        self._thread = threading.Thread(target=self._look, name="family", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Processes that were ever seen."""
        return len(self._members)

    def commands(self) -> list[str]:
        """Command lines of those that run now."""
        return [command_line(pid) for pid in sorted(self._alive())]

    def left(self, *, within_s: float) -> list[str]:
        """Ends the looking; the command lines of those that still run `within_s` later (sooner where none does)."""
        self._stop.set()
        self._thread.join()
        deadline = time.monotonic() + within_s
        while (alive := self._alive()) and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)
        return [f"{pid} {command_line(pid)}" for pid in sorted(alive)]

    def _alive(self) -> set[int]:
        return {pid for pid, start in self._members if _start_time(pid) == start}

    def _look(self) -> None:
        while not self._stop.wait(_LOOK_EVERY_S):
            found = descendants(*self._alive())
            self._members |= {(pid, start) for pid in found if (start := _start_time(pid)) is not None}


def descendants(*roots: int) -> list[int]:
    """These processes and all that stem from them now, parents first."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = list(roots)
    for pid in found:
        found += children.get(pid, [])
    return found


def is_running(pid: int) -> bool:
    """False where the process is gone, or has ended and waits to be collected."""
    return _start_time(pid) is not None


def cpu_seconds(pid: int) -> float:
    """Processor time that the process has used; 0 where it is gone."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _stat(pid: int) -> list[str]:
    """State, parent and so on, as `proc(5)` lists them after the name; empty where there is no such process."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _start_time(pid: int) -> str | None:
    """None where the process is gone, or has ended and waits to be collected."""
    fields = _stat(pid)
    return fields[19] if fields and fields[0] not in "ZX" else None


def command_line(pid: int) -> str:
    """Of a process, or the title that it gave itself; `?` where there is none."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:120]
    except OSError:
        return "?"
