"""What passes between the trainer and its worker processes, and the trainer's end of it.

Messages are JSON behind four bytes of length. What a worker sends is read as JSON of limited size, as the answer to a
request that it was asked, and as nothing else: anything that does not fit ends it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

from skyrl_train.rollout.boundary.session import Request
from skyrl_train.rollout.hosts.processes import WorkerEnded
from skyrl_train.telemetry.logs import innermost

MAX_FRAME_BYTES = 64 << 20
"""Of one message; what an environment may say in one answer is far less (`env_boundary.MAX_CHARACTERS`)."""
REPORT_WITHIN_S = 2.0
"""How long the supervisor may take to say how a worker ended whose connection is closed, and to end itself."""
_WHERE_S = 0.3
"""How long a worker that exceeded a deadline may take to say where it is: nobody else is heard meanwhile."""
_LENGTH = struct.Struct("!I")
_CHUNK = 1 << 18


def frame(message: object) -> bytes:
    """Return a message as it is sent. Raises ValueError (or RecursionError) for what JSON does not hold, or is too long."""
    body = json.dumps(message, allow_nan=False, separators=(",", ":")).encode("ascii")
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body):,} bytes; at most {MAX_FRAME_BYTES:,}")
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Bytes that arrive, as messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield the messages that are complete now. Raises ValueError where the bytes are none."""
        self._data += data
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a message of {length:,} bytes; at most {MAX_FRAME_BYTES:,}")
            end = _LENGTH.size + length
            if len(self._data) < end:
                return
            body = bytes(self._data[_LENGTH.size : end])
            del self._data[:end]
            yield parse(body)


def parse(body: bytes) -> Any:
    """Return the message in a frame. Raises ValueError where it is no JSON, or none that `frame` writes."""
    try:
        return json.loads(body, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class LocalWorker:
    """Implements `WorkerProcess` over a connection of its own."""

    def __init__(self, number: int, connection: socket.socket, ask_to_end: Callable[[int], None]) -> None:
        """`ask_to_end(number)` has the supervisor kill it."""
        self.number = number
        self.ended: str | None = None
        self.process = 0
        """Its number, once the supervisor has told it."""
        self._connection, self._ask_to_end = connection, ask_to_end
        self._frames = Frames()
        self._num_asked = 0
        self._answers: dict[int, asyncio.Future[object]] = {}
        """Of the requests that wait for one, by their numbers."""
        self._sending = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection, self._hear)

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
            self._ask_to_end(self.number)
            self.ended_with(reason)

    def ended_with(self, reason: str) -> None:
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
            self._loop.call_later(REPORT_WITHIN_S, self.end, "closed its connection")

    def _late(self, answer: asyncio.Future[object]) -> None:
        if not answer.done():
            where = innermost(self.process, timeout_s=_WHERE_S) if self.process and self.ended is None else ""
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
            self._loop.call_later(REPORT_WITHIN_S, self.end, "closed its connection")
