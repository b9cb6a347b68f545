"""The process that keeps one sandbox: `python -m skyrl_train.rollout.agents.keeper FD`, started by `sandboxes.py`.

    trainer
      keeper       starts the sandbox, runs a command in it, ends both, and removes the sandbox and its folder
        command    leads a session of its own; what it leaves behind has the keeper for its parent, however it hid

It ends when it is told to, and when the trainer is gone, however it went: nothing of a command outlives the trainer by more
than the time that it takes to clean up. Messages are lines of JSON:

    {"folder", "log", "start", "cleanup", ...}   ->  {"started": exit status, or why it could not be}
    {"run": words, "environment": {...}}         ->  {"process": number}, {"ended": exit status, or why it was not started}
    {"end": seconds between asking and ending}   ->  the end of the connection, once all is gone

Needs the standard library alone, and starts without `site`: there is one for each command.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_train.system.processes import adopt_orphans, children, end_with_parent, kill, prefer_for_memory

MAX_LOG_BYTES = 16 << 20
"""A log that has grown beyond this is emptied."""
_CHUNK = 1 << 16
_LOOK_EVERY_S = 1.0
_END_WITHIN_S = 5.0
_IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Sent to whole groups of processes, for the trainer to answer."""


class Keeper:
    """Keeps one sandbox from its start to its removal. One thread."""

    def __init__(self, control: socket.socket, settings: Mapping[str, Any], data: bytes) -> None:
        """`control` is the connection to the trainer; `settings` is its first message, and `data` what came after that."""
        self._control = control
        self._settings = settings
        self._parent = os.getppid()
        self._ended: dict[int, int] = {}
        """Children that were collected, with their exit status; that of a signal is negative."""
        self._started: list[subprocess.Popen[bytes]] = []
        """Kept so that none of them is collected by somebody else."""
        self._messages: list[Mapping[str, Any]] = []
        self._data = b""
        self._is_over = False
        self._grace_s = 0.0
        self._command = 0
        self._feed(data)
        self._wake, self._wake_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_end, warn_on_full_buffer=False)

    def keep(self) -> None:
        """Do as the trainer says, until it says the end or is gone."""
        try:
            if words := self._settings["start"]:
                self._tell({"started": self._execute(words, self._settings["start_within_s"])})
            else:
                self._tell({"started": 0})
            self._answer()
            while not self._is_over:
                self._look(_LOOK_EVERY_S)
                self._answer()
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._end()

    def _answer(self) -> None:
        """Do what came, and tell that the command has ended once it has."""
        messages, self._messages = self._messages, []
        for message in messages:
            if "run" in message:
                try:
                    self._command = self._spawn(message["run"], Path(self._settings["folder"]), message["environment"])
                    self._tell({"process": self._command})
                except OSError as error:
                    self._tell({"ended": f"{type(error).__name__}: {error}"})
            else:
                self._is_over, self._grace_s = True, float(message["end"])
        if self._command in self._ended:
            self._tell({"ended": self._ended[self._command]})
            self._command = 0

    def _execute(self, words: Sequence[str], within_s: float, *, listens: bool = True) -> int | str:
        """Run a command of the launcher's to its end; the exit status, or why there is none."""
        try:
            process = self._spawn(words, Path(self._settings["log"]).parent, None)
        except OSError as error:
            return f"{type(error).__name__}: {error}"
        if not self._wait(lambda: process in self._ended, within_s, listens=listens):
            kill(process)
            return f"it did not end within {within_s:g} s"
        return self._ended[process]

    def _spawn(self, words: Sequence[str], folder: Path, environment: Mapping[str, str] | None) -> int:
        """Start a command in a session of its own, and return its number. Raises OSError."""
        with open(self._settings["log"], "ab") as log:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                env=None if environment is None else dict(environment),
                start_new_session=True,
                preexec_fn=_become_command,
            )
        self._started.append(process)
        return process.pid

    def _wait(self, is_done: Callable[[], bool], within_s: float, *, listens: bool) -> bool:
        """Return whether it was done in time; False, too, where the trainer wants the end, if this one `listens`."""
        ends = time.monotonic() + within_s
        while not is_done():
            left = ends - time.monotonic()
            if left <= 0 or (listens and self._is_over):
                return False
            self._look(min(left, _LOOK_EVERY_S))
        return True

    def _look(self, at_most_s: float) -> None:
        """Wait a moment for messages and children that end, and take them in."""
        listened = [] if self._is_over else [self._control.fileno()]
        ready = select.select([*listened, self._wake], [], [], at_most_s)[0]
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, _CHUNK)
        if self._control.fileno() in ready:
            self._hear()
        # A process that forked the trainer without exec keeps the connection open: its end is not the only sign.
        self._is_over = self._is_over or os.getppid() != self._parent
        with contextlib.suppress(ChildProcessError):  # there is none
            while (collected := os.waitpid(-1, os.WNOHANG))[0]:
                self._ended[collected[0]] = os.waitstatus_to_exitcode(collected[1])
        _empty_large(Path(self._settings["log"]))

    def _hear(self) -> None:
        try:
            data = self._control.recv(_CHUNK)
        except OSError:
            data = b""
        self._is_over = self._is_over or not data
        self._feed(data)

    def _feed(self, data: bytes) -> None:
        *lines, self._data = (self._data + data).split(b"\n")
        self._messages += [json.loads(line) for line in lines]

    def _tell(self, message: Mapping[str, object]) -> None:
        with contextlib.suppress(OSError):
            self._control.sendall(json.dumps(message).encode() + b"\n")

    def _end(self) -> None:
        """End the command, have the launcher clean up, end what is left, and remove the folder."""
        self._is_over = True
        if self._command and self._command not in self._ended:
            if self._grace_s:
                _ask_to_end(self._command)
                self._wait(lambda: self._command in self._ended, self._grace_s, listens=False)
            kill(self._command)
        # Before what is left is ended: some launchers' sandboxes stem from this process, and end in order only this way.
        if words := self._settings["cleanup"]:
            self._execute(words, self._settings["cleanup_within_s"], listens=False)
        ends = time.monotonic() + _END_WITHIN_S
        while (left := children()) and time.monotonic() < ends:
            for process in left:
                kill(process)
            self._look(0.005)
        import shutil  # takes a while, and time is left now

        for place in self._settings["removes"]:
            shutil.rmtree(place, ignore_errors=True)


def _become_command() -> None:
    """Undo what the keeper made of itself; end with it, and before the trainer where memory runs out."""
    for number in (*_IGNORED, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    prefer_for_memory()
    end_with_parent(signal.SIGKILL)


def _ask_to_end(process: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process, signal.SIGTERM)


def _empty_large(log: Path) -> None:
    """Writers append, so that they go on at the beginning."""
    with contextlib.suppress(OSError):
        if log.stat().st_size > MAX_LOG_BYTES:
            os.truncate(log, 0)


def main() -> None:
    """Be the keeper whose connection to the trainer is the file descriptor in the first argument."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    adopt_orphans()
    control = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(control.fileno(), False)
    came = b""
    while b"\n" not in came:
        data = control.recv(_CHUNK)
        if not data:
            return
        came += data
    first, _, rest = came.partition(b"\n")
    Keeper(control, json.loads(first), rest).keep()


if __name__ == "__main__":
    main()
