"""What every process of a run is doing at this moment, one that hangs included.

    answer(role)   in each process: a signal makes it write the stacks of its threads to a file in memory
    of_run()       in any of them: ask all of this machine, and have `elsewhere` ask those of other nodes

Python's `faulthandler` answers within the signal, whatever holds the interpreter. The file in memory is found in `/proc`
under the process that has it, so that nothing is left on a disk, and nobody is sent a signal that it does not expect: who
has such a file has the handler. Linux only, and with the standard library alone, as workers of environments use it;
elsewhere a process tells of itself.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import re
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from skyrl_train.system.processes import state
from skyrl_train.telemetry.logs.redaction import redact_text

RUN_VARIABLE = "SKYRL_TRAIN_RUN"
"""Environment variable that all processes of one run share."""
_LINUX = sys.platform == "linux"
_SIGNAL = signal.SIGRTMIN + 9 if _LINUX else 0
"""Of those that no library has a use for: Ray and launchers know SIGUSR1 and SIGUSR2."""
_NAME = "skyrl-stacks"
_FIRST_DESCRIPTOR = 100
"""Code of environments that closes low file descriptors does not hit it."""
_PROC = Path("/proc")
_POLL_S = 0.02
_SETTLED = 3
"""Looks in a row at a file that grew and grows no more: the answer is whole."""
_ANSWER_S = 3.0
_COMMAND_LENGTH = 100
_THREAD = re.compile(r"(?m)^(?=(?:Current thread|Thread) 0x)")
_FRAME = re.compile(r'(?m)^  File "(.*)", line (\d+) in (.*)$')
_OF_LIBRARIES = re.compile(r"/(?:lib/python3|site-packages/|dist-packages/)|^<")
_OF_PACKAGE = "/skyrl_train/"
_IDLE = "/skyrl_train/system/threads.py"
_RAYS_OWN = re.compile(r"ray::(?:IDLE|\w+Agent)|/ray/(?:core|dashboard|autoscaler|_private)/|ray-dashboard|^tee -a ")

elsewhere: list[Callable[[], str]] = []
"""What asks the processes of a run on other machines."""
_own: list[tuple[int, int]] = []
"""Process and descriptor of the file that this process answers into; a forked one inherits its parent's."""


@dataclass(frozen=True, kw_only=True)
class _Process:
    """One that answers."""

    role: str
    run: str
    file: Path


def begin(role: str) -> None:
    """Be the first process of a run: those that it starts from here on belong to it."""
    os.environ[RUN_VARIABLE] = uuid.uuid4().hex[:12]
    _forget()
    answer(role)


def answer(role: str) -> None:
    """Have this process answer from here on; `role` is what it is, for the reader. Idempotent: the first role stays."""
    if not _LINUX or (_own and _own[0][0] == os.getpid()):
        return
    run = os.environ.setdefault(RUN_VARIABLE, uuid.uuid4().hex[:12])
    low = os.memfd_create(f"{_NAME} {run} {role}"[:200], os.MFD_CLOEXEC)
    try:
        descriptor = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, _FIRST_DESCRIPTOR)
    except OSError:  # fewer descriptors are allowed: nobody can ask this process
        os.close(low)
        return
    os.close(low)
    faulthandler.register(_SIGNAL, file=descriptor, all_threads=True)
    _forget()
    _own.append((os.getpid(), descriptor))


class Answering(str):
    """A text that makes the process that unpickles it answer, under the role that it is: for processes that other
    libraries start."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Callable[[str], Answering], tuple[str]]:
        return _unpickled, (str(self),)


def _unpickled(role: str) -> Answering:
    answer(role)
    return Answering(role)


def _forget() -> None:
    for _, descriptor in _own:
        with suppress(OSError):
            os.close(descriptor)
    _own.clear()


def of_run() -> str:
    """Return what the processes of this run are doing, innermost call first: threads that wait in a library alone are left
    out. Takes a few seconds at most where some hang, and longer where nodes do."""
    found = [here()]
    for ask in elsewhere:
        try:
            found.append(ask())
        except Exception as error:  # whatever it is, the rest is worth telling
            found.append(f"processes of other nodes cannot be asked: {error}")
    return "\n".join(filter(None, found))


def here(run: str = "") -> str:
    """Return what those of this machine are doing: of this process's run, or of another."""
    run = run or os.environ.get(RUN_VARIABLE, "")
    if not _LINUX or not run:
        return f"this process, pid {os.getpid()}:\n{_indented(_of_itself())}"
    pids = [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]
    answering = {pid: process for pid in pids if (process := _of_process(pid)) is not None}
    members = _with_descendants({pid for pid, each in answering.items() if each.run == run}, pids)
    asked = {pid: answering[pid] for pid in members if pid in answering and state(pid) not in "TtZX"}
    told = _ask(asked)
    lines = []
    for pid in sorted(members):
        who = answering[pid].role if pid in answering else _command(pid)
        if (letter := state(pid)) in "ZX" or (pid not in answering and _RAYS_OWN.search(who)):
            continue
        if pid in told:
            lines.append(f"{who}, pid {pid}:\n{_indented(_working_threads(told[pid]))}")
        elif letter in "Tt":
            lines.append(
                f"{who}, pid {pid}: is stopped by a signal (state {letter}), as by SIGSTOP, and can say nothing"
            )
        elif pid in asked:
            lines.append(f"{who}, pid {pid}: gave no answer within {_ANSWER_S:g} s (state {letter})")
        else:
            lines.append(f"{who}, pid {pid}: is no process that answers (state {letter})")
    return "\n".join(lines)


def innermost(pid: int, *, timeout_s: float) -> str:
    """Return where a process is, as `FILE, line N, in FUNCTION`, in code that is of no library; empty where it does not
    say so in time."""
    process = _of_process(pid)
    if process is None or state(pid) in "TtZX":
        return ""
    threads = [_FRAME.findall(each) for each in _THREAD.split(_ask({pid: process}, timeout_s).get(pid, ""))]
    frames = (frame for each in threads for frame in each)
    own = (frame for frame in frames if _OF_PACKAGE not in frame[0] and not _OF_LIBRARIES.search(frame[0]))
    frame = next(own, None) or next(iter(threads[-1]), None)
    return "" if frame is None else f"{frame[0]}, line {frame[1]}, in {frame[2]}"


def machine() -> str:
    """Return what tells the machine of this process, or its container, from others."""
    with suppress(OSError):
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip() + os.readlink(_PROC / "self/ns/pid")
    return ""


def _ask(processes: Mapping[int, _Process], timeout_s: float = _ANSWER_S) -> dict[int, str]:
    """Return what each writes within the time."""
    begun: dict[int, int] = {}
    for pid, process in processes.items():
        with suppress(OSError):
            begun[pid] = process.file.stat().st_size
            os.kill(pid, _SIGNAL)
    sizes, settled = dict(begun), dict.fromkeys(begun, 0)
    ends = time.monotonic() + timeout_s
    while any(count < _SETTLED for count in settled.values()) and time.monotonic() < ends:
        time.sleep(_POLL_S)
        for pid in begun:
            size = sizes[pid]
            with suppress(OSError):
                size = processes[pid].file.stat().st_size
            settled[pid] = settled[pid] + 1 if size == sizes[pid] > begun[pid] else 0
            sizes[pid] = size
    told = {}
    for pid, size in begun.items():
        with suppress(OSError), processes[pid].file.open("rb") as file:
            file.seek(size)
            told[pid] = file.read().decode(errors="replace")
    return {pid: text for pid, text in told.items() if text}


def _of_process(pid: int) -> _Process | None:
    try:
        names = os.listdir(_PROC / str(pid) / "fd")
    except OSError:  # gone, or another user's
        return None
    for name in names:
        file = _PROC / str(pid) / "fd" / name
        if int(name) < _FIRST_DESCRIPTOR:
            continue
        with suppress(OSError):  # closed since it was listed, which says nothing of the others
            kind, _, rest = os.readlink(file).removesuffix(" (deleted)").partition(" ")
            if kind == f"/memfd:{_NAME}":
                run, _, role = rest.partition(" ")
                return _Process(role=role, run=run, file=file)
    return None


def _with_descendants(roots: Iterable[int], pids: Iterable[int]) -> set[int]:
    found, parents = set(roots), dict[int, int]()
    for pid in pids:
        with suppress(OSError):  # gone; the parent stands behind name and state, see `proc(5)`
            parents[pid] = int((_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _command(pid: int) -> str:
    with suppress(OSError):
        words = (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return redact_text(words.strip())[:_COMMAND_LENGTH] or "?"
    return "?"


def _of_itself() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return _working_threads(file.read())


def _working_threads(text: str) -> str:
    """The main thread, which comes last, and those that run code of this package or of no library."""
    threads = [each.rstrip() for each in _THREAD.split(text) if each.strip()]
    return "\n".join(each for each in threads[:-1] if _is_working(each)) + "\n" * (len(threads) > 1) + threads[-1]


def _is_working(thread: str) -> bool:
    files = [file for file, _, _ in _FRAME.findall(thread)]
    return any((_OF_PACKAGE in each or not _OF_LIBRARIES.search(each)) and _IDLE not in each for each in files)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.strip().splitlines())
