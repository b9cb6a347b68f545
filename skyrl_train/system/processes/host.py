"""Processes of this one's: below a supervisor (`supervisor.py`), which leaves nothing of them whatever happens, or direct.

    host = ProcessHost()                       a supervisor; it ends with this process, however that ends
    started = host.start({"words": ...})       a process below it
    started.poll()                             its exit status, once it has one
    host.close()                               all are gone

Used from one thread, which polls, or from one event loop, which is told that there is something to hear.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias

from skyrl_train.system.processes.messages import Frames, frame
from skyrl_train.system.processes.process_tree import kill

DirectProcess: TypeAlias = subprocess.Popen[bytes]
_REPORT_WITHIN_S = 2.0
"""Of a supervisor, to take a message in, and to end after it closed its connection."""
CLOSE_WITHIN_S = 10.0
_CHUNK = 1 << 18
PACKAGE_PARENT = str(Path(__file__).resolve().parents[3])
_MAIN = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from skyrl_train.system.processes.supervisor import main; main()"
)


class StartedProcess:
    """A process below a supervisor."""

    def __init__(self, host: ProcessHost, number: int, on_end: Callable[[int | str], None] | None) -> None:
        self.number = number
        self.process = 0
        """Its process number, once that was told."""
        self.ended: int | str | None = None
        """Its exit status, negative of a signal, once it has ended; a text where there is none to be had, which says why."""
        self._host, self._on_end = host, on_end

    def poll(self) -> int | str | None:
        """Hear what is new, and return `ended`."""
        self._host.hear()
        return self.ended

    def end_with(self, ended: int | str) -> None:
        """Take note of its end."""
        self.ended = ended
        if self._on_end is not None:
            self._on_end(ended)


class ProcessHost:
    """A supervisor and what it was told to start."""

    def __init__(
        self,
        settings: Mapping[str, Any] | None = None,
        *,
        words: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        output: IO[bytes] | int = subprocess.DEVNULL,
    ) -> None:
        """`settings` and `words`: as `supervisor.py` says, and the command of a program that is one. Raises OSError."""
        self.lost = ""
        """How the supervisor ended, or why this does not hear of it any more; empty while it is there."""
        self._frames, self._started, self._num_started = Frames(), dict[int, StartedProcess](), 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connection, theirs = socket.socketpair()
        self._connection.setblocking(False)
        try:
            with theirs, _in_memory() as given:
                given.write(json.dumps(settings or {}).encode())
                given.seek(0)
                self._process = start_directly(
                    [*(words or (sys.executable, "-I", "-S", "-c", _MAIN, PACKAGE_PARENT)), str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=given,
                    stdout=output,
                    stderr=output,
                    env=environment,
                )
        except BaseException:
            self._connection.close()
            raise

    def start(
        self,
        message: Mapping[str, Any],
        *,
        descriptor: int | None = None,
        on_end: Callable[[int | str], None] | None = None,
    ) -> StartedProcess:
        """Have a process started. The message is that of `supervisor.py`; `descriptor` is the process's standard input."""
        self._num_started += 1
        started = self._started[self._num_started] = StartedProcess(self, self._num_started, on_end)
        descriptors = [] if descriptor is None else [descriptor]
        try:
            self._send({**message, "start": started.number, "descriptor": bool(descriptors)}, descriptors)
        except OSError as error:
            del self._started[started.number]
            started.end_with(self.lost or f"{type(error).__name__}: {error}")
        return started

    def end(self, started: StartedProcess) -> None:
        """Have a process killed with what stems from it."""
        with contextlib.suppress(OSError):
            self._send({"end": started.number})

    def hear(self) -> list[Mapping[str, Any]]:
        """Take in what the supervisor says, without waiting, and return it."""
        messages = []
        try:
            data = b"" if self.lost else self._connection.recv(_CHUNK)
            for message in self._frames.feed(data):
                if "started" in message and message["started"] in self._started:
                    self._started[message["started"]].process = int(message["process"])
                elif "ended" in message and (started := self._started.pop(message["ended"], None)) is not None:
                    started.end_with(message["status"])
                messages.append(message)
        except BlockingIOError:
            return []
        except (OSError, ValueError, TypeError):
            data = b""
        if not data and not self.lost:
            status = self._wait_end(_REPORT_WITHIN_S)
            self._process.kill()
            self._lose(manner(status) if status is not None else "closed its connection")
        return messages

    def listen(self, to_hear: Callable[[], object]) -> None:
        """Have the running event loop call this whenever there is something to hear."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._connection, to_hear)

    async def until(self, is_done: Callable[[], object], within_s: float | None) -> bool:
        """Hear until something is so; whether it is, at the end of the time or of the supervisor."""
        ends = None if within_s is None else time.monotonic() + within_s
        while not is_done() and not self.lost:
            heard = asyncio.get_running_loop().create_future()
            self.listen(lambda heard=heard: heard.done() or heard.set_result(None))  # type: ignore[misc]
            try:
                await asyncio.wait_for(heard, None if ends is None else ends - time.monotonic())
            except asyncio.TimeoutError:
                break
            finally:
                self._stop_listening()
            self.hear()
        return bool(is_done())

    def quit(self, grace_s: float = 0.0) -> None:
        """Have all processes end, and the supervisor with them; they are asked to `grace_s` before."""
        with contextlib.suppress(OSError):
            self._send({"quit": grace_s})

    def close(self, within_s: float = CLOSE_WITHIN_S) -> int | None:
        """End all and wait for it; return the supervisor's exit status, None where it had to be killed. Idempotent."""
        self.forget()
        if (status := self._wait_end(within_s)) is None:
            kill(self._process.pid)
            self._wait_end(within_s)
        return status

    def forget(self, manner: str = "was ended with the run") -> None:
        """Have all processes end, and hear of none any more."""
        self.quit()
        self._lose(manner)

    def _lose(self, manner: str) -> None:
        if not self.lost:
            self.lost = manner
            self._stop_listening()
            self._connection.close()
            started, self._started = self._started, {}
            for each in started.values():
                each.end_with(f"was ended with its supervisor, which {manner}")

    def _stop_listening(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._connection)
            self._loop = None

    def _send(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Raises OSError, too, where the message is not taken."""
        if self.lost:
            raise ConnectionError(self.lost)
        self._process.send_signal(signal.SIGCONT)  # a process of its may have stopped it
        data = frame(message)
        sent = socket.send_fds(self._connection, [data], list(descriptors))
        room = select.poll()
        room.register(self._connection, select.POLLOUT)
        while sent < len(data):
            if not room.poll(1e3 * _REPORT_WITHIN_S):
                self._connection.shutdown(socket.SHUT_WR)  # half a message is the end
                raise ConnectionError("it does not take messages")
            sent += self._connection.send(data[sent:])

    def _wait_end(self, within_s: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(within_s)
        return None


def _in_memory() -> IO[bytes]:
    """Return a file for settings, which may have secrets in them: on no disk, where the system has such files."""
    return open(os.memfd_create("settings"), "w+b") if sys.platform == "linux" else tempfile.TemporaryFile()


def start_directly(words: Sequence[str], **options: Any) -> DirectProcess:
    """Return a process that leads a session of its own and is this one's child; `options`: as `subprocess` has them. Nothing
    but itself ends it, or `end_directly`. Raises OSError."""
    return subprocess.Popen(words, start_new_session=True, **options)


def end_directly(process: DirectProcess, within_s: float = CLOSE_WITHIN_S) -> None:
    """Kill a direct process with its session. One that the kernel keeps is left to it after `within_s`."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(within_s)


def manner(status: int) -> str:
    """Return how a process ended, as `subprocess` counts: negative is a signal."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was ended by {name}"
