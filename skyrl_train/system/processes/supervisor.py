"""A process between its owner and the processes that it starts: what `host.py` sees from the outside.

    owner         a trainer, an actor of its, a self-test
      supervisor  starts processes, says how each ended, and ends them with everything that stems from them
        process   leads a session of its own; what it leaves behind has the supervisor for its parent, however it hid

It ends when it is told to and when its owner is gone, however that went, SIGKILL included; no other signal that a job gets
ends it. Settings come as JSON on its standard input; all may be left out:

    {"mark": what else ends with the owner bears it in its environment, "removes": places that go at the end,
     "last": {"words", "folder", "log"} of a command that cleans up, "last_within_s"}

Messages (`messages.py`) come and go over the socket in the first argument. A start may bring a file descriptor:

    {"start": number, "words", "folder", "environment", "log"}  ->  {"started": number, "process": its own number}
                                                                    {"ended": number, "status": exit status, negative of a
                                                                     signal, or a text that says why it was not started}
    {"end": number}
    {"quit": seconds between asking processes to end and ending them}  ->  the end of the connection, once all are gone

Needs the standard library alone, and little of it: one starts for each agent's command.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping

from skyrl_train.system.processes.messages import Frames, frame
from skyrl_train.system.processes.process_tree import (
    adopt_orphans,
    children,
    end_with_parent,
    kill,
    marked,
    prefer_for_memory,
)

TYPE_CHECKING = False  # as type checkers know it: `typing` takes a while to import
if TYPE_CHECKING:
    from typing import Any

MAX_LOG_BYTES = 16 << 20
"""A log that has grown beyond this is emptied; writers append, so that they go on at the beginning."""
FIRST_OWN_FD = 100
"""Connections are moved here: code that closes low file descriptors does not hit them."""
_CHUNK = 1 << 18
_LOOK_EVERY_S = 1.0
_END_WITHIN_S = 8.0
_DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Sent to all processes of a job, for the owner to answer: it may need what runs here until its step is over."""


class Supervisor:
    """Starts processes and ends them. One thread, which runs nobody's code but what its `main` ran before."""

    def __init__(self, become: Callable[[int], None] | None = None) -> None:
        """Turn this process into one, as `host.py` starts it. `become` is what a forked process does, given the descriptor
        that came with its start; without it the words of a start are executed."""
        for number in _DEAF_TO:
            signal.signal(number, signal.SIG_IGN)
        with os.fdopen(os.dup(0), encoding="utf-8") as given:
            self.settings: Mapping[str, Any] = json.load(given)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        self._become = become
        self._parent = os.getppid()  # the owner, or a wrapper of the interpreter, which ends with this process alone
        self._control = socket.socket(fileno=_moved(int(sys.argv[1])))
        self._frames = Frames()
        self._descriptors: list[int] = []
        """Those that came, for processes that are still to be started."""
        self._running: dict[int, int] = {}
        """Process to the number of its start."""
        self._commands: dict[int, subprocess.Popen[bytes]] = {}
        """Kept so that nobody else collects them."""
        self._logs: set[str] = set()
        self._is_over, self._grace_s = False, 0.0
        self._wake, self._wake_end = os.pipe()
        for end in (self._wake, self._wake_end):
            os.set_blocking(end, False)

    @property
    def _owned(self) -> bool:
        return os.getppid() == self._parent

    def tell(self, message: object) -> None:
        """Send a message to the owner, if it is there."""
        with contextlib.suppress(OSError):
            self._control.sendall(frame(message))

    def run(self) -> None:
        """Serve until the owner says the end or is gone."""
        self._only_wake()
        while not self._is_over:
            self._look(_LOOK_EVERY_S)

    def __enter__(self) -> Supervisor:
        """Until `run`, the end of the owner raises SystemExit on the main thread."""
        self._only_wake()
        if self._become is not None:
            signal.signal(signal.SIGCONT, lambda *_: None if self._owned else sys.exit(0))
        adopt_orphans()
        end_with_parent(signal.SIGCONT)  # that one, since a process of its may have stopped this one
        return self

    def __exit__(self, *_: object) -> None:
        """End everything, in order where there is an order to it."""
        self._only_wake()
        self._is_over = True
        if self._grace_s:
            for process in self._running:
                with contextlib.suppress(OSError):
                    os.killpg(process, signal.SIGTERM)
            self._wait(lambda: not self._running, self._grace_s)
        for process in self._running:
            kill(process)
        # Before what is left is ended: some launchers' sandboxes stem from this process, and end in order only this way.
        if last := self.settings.get("last"):
            self._start({"start": 0, **last})
            self._wait(lambda: 0 not in self._running.values(), self.settings["last_within_s"])
        mark, ends = self.settings.get("mark", ""), time.monotonic() + _END_WITHIN_S
        while (left := children() | set(self._running) | marked(mark)) and time.monotonic() < ends:
            for process in left:  # and once more: what dies may have started another
                kill(process)
            self._look(0.05 if mark else 0.005)
        for place in self.settings.get("removes", ()):
            import shutil  # takes a while, and time is left now

            shutil.rmtree(place, ignore_errors=True)

    def _only_wake(self) -> None:
        """Have signals end nothing any more, and be heard at once."""
        for number in (signal.SIGCHLD, signal.SIGCONT):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._wake_end, warn_on_full_buffer=False)

    def _wait(self, is_done: Callable[[], bool], within_s: float) -> None:
        ends = time.monotonic() + within_s
        while not is_done() and (left := ends - time.monotonic()) > 0:
            self._look(min(left, _LOOK_EVERY_S))

    def _look(self, at_most_s: float) -> None:
        """Wait a moment for messages and for processes that end, and take them in."""
        listened = [self._wake] if self._is_over else [self._wake, self._control.fileno()]
        ready = select.select(listened, [], [], at_most_s)[0]
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, _CHUNK)
        if self._control.fileno() in ready:
            self._hear()
        # A process that was forked from the owner without exec keeps the connection open: its end is not the only sign.
        self._is_over = self._is_over or not self._owned
        self._collect()
        for log in self._logs:
            with contextlib.suppress(OSError):
                if os.stat(log).st_size > MAX_LOG_BYTES:
                    os.truncate(log, 0)

    def _hear(self) -> None:
        room = array.array("i")
        try:
            data, came, _, _ = self._control.recvmsg(_CHUNK, socket.CMSG_SPACE(64 * room.itemsize))
        except OSError:
            data, came = b"", []
        for level, kind, content in came:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                room.frombytes(content[: len(content) - len(content) % room.itemsize])
        self._descriptors += map(_moved, room)
        self._is_over = self._is_over or not data
        for message in self._frames.feed(data):
            if "start" in message:
                self._start(message)
            elif "end" in message:
                for process in [each for each, number in self._running.items() if number == message["end"]]:
                    kill(process)
            else:
                self._is_over, self._grace_s = True, float(message["quit"])

    def _start(self, message: Mapping[str, Any]) -> None:
        descriptor = self._descriptors.pop(0) if message.get("descriptor") else -1
        try:
            process = self._execute(message, descriptor) if self._become is None else self._fork(descriptor)
        except OSError as error:
            self.tell({"ended": message["start"], "status": f"{type(error).__name__}: {error}"})
        else:
            self._running[process] = message["start"]
            self.tell({"started": message["start"], "process": process})
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _execute(self, message: Mapping[str, Any], descriptor: int) -> int:
        """Return the process of a command. Raises OSError."""
        supervisor = os.getpid()
        with open(message["log"], "ab") as log:
            process = subprocess.Popen(
                message["words"],
                stdin=subprocess.DEVNULL if descriptor < 0 else descriptor,
                stdout=log,
                stderr=log,
                cwd=message["folder"],
                env=message.get("environment"),
                preexec_fn=lambda: _lead(supervisor),
            )
        self._logs.add(message["log"])
        self._commands[process.pid] = process
        return process.pid

    def _fork(self, descriptor: int) -> int:
        """Return a process that is to become something. Raises OSError."""
        assert self._become is not None
        supervisor = os.getpid()
        if process := os.fork():
            return process
        status = 1
        try:
            self._control.close()
            signal.set_wakeup_fd(-1)
            os.close(self._wake)
            os.close(self._wake_end)
            _lead(supervisor)
            self._become(descriptor)
            status = 0
        except BaseException:
            with contextlib.suppress(BaseException):
                traceback.print_exc()
        finally:
            os._exit(status)

    def _collect(self) -> None:
        """Tell of processes that ended. What forked ones leave behind ends at once; launchers' commands mean to."""
        with contextlib.suppress(ChildProcessError):  # there is none
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                process, status = ended[0], os.waitstatus_to_exitcode(ended[1])
                if process in self._commands:
                    self._commands.pop(process).returncode = status
                if process in self._running:
                    if self._become is not None:
                        with contextlib.suppress(OSError):
                            os.killpg(process, signal.SIGKILL)
                    self.tell({"ended": self._running.pop(process), "status": status})
        if self._become is not None:
            for orphan in children() - set(self._running):
                kill(orphan)


def _lead(supervisor: int) -> None:
    """Be the leader of a session that ends with the supervisor, and before the owner where memory runs out."""
    os.setsid()
    end_with_parent(signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)
    # A shell has what it starts in the background ignore SIGQUIT, and `nohup` SIGHUP: a process would, too.
    for number in (*_DEAF_TO, signal.SIGCHLD, signal.SIGCONT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    prefer_for_memory()


def _moved(descriptor: int) -> int:
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FIRST_OWN_FD)
    os.close(descriptor)
    return moved


def main() -> None:
    """Be a supervisor of commands."""
    with Supervisor() as supervisor:
        supervisor.run()


if __name__ == "__main__":
    main()
