"""The trainer's end of what passes between it and a worker process.

What a worker sends is read as the answer to a request that it was asked, and as nothing else: anything that does not fit
ends it.
"""

from __future__ import annotations

import asyncio
import signal
import socket

from skyrl_train.rollout.boundary.session import Request
from skyrl_train.rollout.hosts.processes import WorkerEnded
from skyrl_train.system.processes import Frames, ProcessHost, StartedProcess, frame, manner
from skyrl_train.telemetry.logs import innermost

_REPORT_WITHIN_S = 2.0
"""How long the supervisor may take to say how a worker ended whose connection is closed."""
_WHERE_S = 0.3
"""How long a worker that exceeded a deadline may take to say where it is: nobody else is heard meanwhile."""
_CHUNK = 1 << 18
_PERHAPS_MEMORY = {-signal.SIGKILL: ", as the kernel does where memory runs out"}


class LocalWorker:
    """Implements `WorkerProcess` over a connection of its own."""

    def __init__(self, host: ProcessHost) -> None:
        """Start one below the supervisor of `host`."""
        self.ended: str | None = None
        self._connection, theirs = socket.socketpair()
        self._connection.setblocking(False)
        self._frames = Frames()
        self._num_asked = 0
        self._answers: dict[int, asyncio.Future[object]] = {}
        """Of the requests that wait for one, by their numbers."""
        self._sending = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._connection, self._hear)
        self._host = host
        with theirs:
            self._started: StartedProcess = host.start({}, descriptor=theirs.fileno(), on_end=self._told)

    async def ask(self, request: Request, timeout_s: float) -> object:
        if self.ended is not None:
            raise WorkerEnded(self.ended)
        self._num_asked += 1
        number, answer = self._num_asked, self._loop.create_future()
        self._answers[number] = answer
        deadline = self._loop.call_later(timeout_s, self._late, answer)
        try:
            await self._send(frame({**request, "number": number}), timeout_s)
            return await answer
        except asyncio.CancelledError:
            self.end("was ended in a call that nobody waits for any more")
            raise
        finally:
            deadline.cancel()
            del self._answers[number]

    def end(self, reason: str) -> None:
        if self.ended is None:
            self._host.end(self._started)
            self._ended_with(reason)

    def _told(self, ended: int | str) -> None:
        if isinstance(ended, int):
            self._ended_with(manner(ended) + _PERHAPS_MEMORY.get(ended, ""))
        else:
            self._ended_with(ended if self._host.lost else f"could not be started: {ended}")

    def _ended_with(self, reason: str) -> None:
        """Take note that the process is no more, or will not be in a moment."""
        if self.ended is None:
            self.ended = reason
            self._loop.remove_reader(self._connection)
            self._connection.close()
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(WorkerEnded(reason))

    async def _send(self, data: bytes, timeout_s: float) -> None:
        try:
            async with self._sending:
                sent = self._connection.send(data)
                if sent < len(data):
                    await asyncio.wait_for(self._loop.sock_sendall(self._connection, data[sent:]), timeout_s)
        except OSError:
            # How it ended is told by the supervisor in a moment.
            self._loop.call_later(_REPORT_WITHIN_S, self.end, "closed its connection")

    def _late(self, answer: asyncio.Future[object]) -> None:
        if not answer.done():
            where = (
                innermost(process, timeout_s=_WHERE_S) if (process := self._started.process) and not self.ended else ""
            )
            answer.set_exception(asyncio.TimeoutError(where and f"; it was at {where}"))
        self.end("was ended: it exceeded the deadline of a call")

    def _hear(self) -> None:
        try:
            data = self._connection.recv(_CHUNK)
            for message in self._frames.feed(data):
                waiting = any(not answer.done() for answer in self._answers.values())
                if not waiting or not isinstance(message, dict) or set(message) != {"number", "answer"}:
                    raise ValueError("it spoke unasked")
                number = message["number"]
                if type(number) is not int or number not in self._answers or self._answers[number].done():
                    raise ValueError("it answered another request")
                self._answers[number].set_result(message["answer"])
        except BlockingIOError:
            return
        except OSError:
            data = b""
        except ValueError as error:
            self.end(f"was ended: what it sent is no answer ({error})")
            return
        if not data:
            self._loop.remove_reader(self._connection)
            self._loop.call_later(_REPORT_WITHIN_S, self.end, "closed its connection")
