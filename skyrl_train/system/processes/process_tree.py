"""What Linux lets a process do about those that stem from it: adopt them, find them, end them, and end with its own parent.

Needs the standard library alone: processes that do nothing else start with it. Elsewhere than on Linux it does less, and
says so by finding nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_C = ctypes.CDLL(None) if sys.platform == "linux" else None
"""Loaded here, since a child between fork and exec should load nothing."""


def end_with_parent(number: signal.Signals) -> None:
    """Have this process sent a signal when the thread that started it is gone."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of whatever stems from this process and loses its own, also of what made a session of its own."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> set[int]:
    """Return the processes that this one is the parent of, adopted ones included."""
    try:
        return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
    except OSError:
        return set()


def kill(process: int) -> None:
    """End a process, and its group where it leads one."""
    for end in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            end(process, signal.SIGKILL)


def start_time(process: int) -> str:
    """Return when a process started, in ticks since the machine did; nothing where there is none, or it has ended."""
    fields = _stat(process)
    return fields[19] if fields and fields[0] not in "ZX" else ""


def state(process: int) -> str:
    """Return the letter of `proc(5)`; empty where there is no such process."""
    return next(iter(_stat(process)), "")


def marked(mark: str) -> set[int]:
    """Return the processes with `mark` (`NAME=value`) in the environment that they were started with. The helper of
    multiprocessing that removes leaked shared memory is none of them: it ends by itself once nobody holds any, and must
    come last."""
    found = set[int]()
    for entry in os.scandir("/proc") if mark else ():
        with contextlib.suppress(OSError, ValueError):
            process, place = int(entry.name), Path(entry.path)
            if mark.encode() not in (place / "environ").read_bytes().split(b"\0") or not start_time(process):
                continue
            if b"resource_tracker" not in (place / "cmdline").read_bytes():
                found.add(process)
    return found


def prefer_for_memory() -> None:
    """Have the kernel end this process first where memory runs out."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _stat(process: int) -> list[str]:
    """Return state, parent and so on, as `proc(5)` lists them after the name; nothing where there is no such process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _prctl(option: int, value: int) -> None:
    if _C is not None:
        _C.prctl(option, int(value), 0, 0, 0)
