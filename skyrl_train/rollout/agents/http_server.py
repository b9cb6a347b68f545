"""A small HTTP/1.1 server for programs that ask this process, of the standard library alone.

Each connection is a task: it reads a request, has it answered, writes the answer, and reads the next. Whatever comes is
read as if it came from anybody: sizes, connections and the bytes of all bodies together are bounded, reads and writes have
deadlines, and what is no request is told so. Whoever is not admitted by the head of a request has its body left unread. The
request of a client that hangs up while it waits is cancelled.

It parses heads by itself, and not by h11, which httpx brings along. Programs also ask inside workers of environments, whose
interpreter has the standard library alone (`adapters/inverted_chat.py`), so that h11 would come beside this parser and not
in its place. And it takes longer: 65 to 73 microseconds of a core for a request of OpenAI's SDK with its answer, where these
take 15 (h11 0.16, Python 3.11). What it would replace is `_parse_head`, `_length_of` and `_head_of`, 45 lines.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 64 << 20
_MAX_BYTES_IN_FLIGHT = 4 * MAX_REQUEST_BYTES
"""Of bodies that were not taken yet, over all connections; a quarter of it for one client."""
_SMALL_BODY_BYTES = 64 << 10
"""What has no more, as the head may have as well, is bounded by the number of connections."""
_MAX_CONNECTIONS = 2048
_HANGS_UP_AFTER_S = 0.1
_MAX_HEAD_BYTES = 64 << 10
_IDLE_S = 3600.0
"""Between two requests of a connection."""
_HEAD_WITHIN_S = 30.0
_BODY_WITHIN_S = 120.0
_WRITE_WITHIN_S = 120.0
_ANSWER_WITHIN_S = 86400.0
"""Of an answer, whose parts have deadlines of their own."""
_BACKLOG = 1024
_JSON = "application/json"
_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 500: "api_error"}
_FIRST_LINE = re.compile(r"([A-Z]{1,20}) (/\S{0,2000}) HTTP/1\.([01])")


class RequestError(Exception):
    """A request that is refused: status, reason and code are told to whoever asked, in the shape of OpenAI's errors, which
    is that of Anthropic's as well."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {
            "message": message,
            "type": _ERROR_TYPES.get(status, "invalid_request_error"),
            "code": code,
            "param": param,
        }


@dataclass(kw_only=True)
class HttpRequest:
    method: str
    path: str
    """Of the first line, without a query."""
    headers: Mapping[str, str]
    """By names in lower case."""
    is_last: bool
    """Whether the connection ends with it."""
    takes_chunks: bool
    """Whether an answer may come in chunks; else its end is that of the connection."""
    body: bytes = b""
    release: Callable[[], None] = lambda: None
    """Tells the server that the body is no longer in flight. Idempotent."""

    def take_body(self) -> bytes:
        """Return the body, which is held here no longer: for whoever reads it long before the answer is there."""
        body, self.body = self.body, b""
        self.release()
        return body


@dataclass(frozen=True, kw_only=True)
class HttpAnswer:
    body: str = ""
    pieces: AsyncGenerator[str, None] | None = None
    """In place of a body: sent one by one as they come, and no faster than they are read."""
    status: int = 200
    content_type: str = _JSON
    headers: Mapping[str, str] = field(default_factory=dict)
    on_sent: Callable[[], None] = lambda: None
    """Called when the answer goes to whoever asked, who has not hung up."""

    @staticmethod
    def of(error: RequestError) -> HttpAnswer:
        """Return the answer that tells an error. SDKs that read its header do not ask again where it would not help."""
        told = json.dumps({"type": "error", "error": error.body})
        return HttpAnswer(status=error.status, body=told, headers={"x-should-retry": str(error.status == 503).lower()})


Handler = Callable[[HttpRequest], Coroutine[Any, Any, HttpAnswer]]
Admit = Callable[[str, Mapping[str, str], int], str]
"""Given path, headers and bytes of a body that was not read: whose it is. Raises RequestError for what is not to be read."""


class HttpServer:
    """Answers requests by a function, until it is closed. Used from one event loop."""

    def __init__(self, handle: Handler, admit: Admit = lambda *_: "") -> None:
        """`handle` may raise RequestError; anything else that it raises is logged, and told as an error of the server."""
        self._handle, self._admit = handle, admit
        self._in_flight = _InFlight()
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self, host: str) -> int:
        """Listen on a free port of `host`, and return it. Raises OSError."""
        self._server = await asyncio.start_server(
            self._connected, host, 0, limit=_MAX_HEAD_BYTES, backlog=_BACKLOG, reuse_address=True
        )
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def close(self) -> None:
        """Stop listening, and hang up. Idempotent."""
        if self._server is not None:
            self._server.close()
        for writer in tuple(self._open):
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        incoming = _Incoming(reader, writer, self._admit, self._in_flight)
        try:
            if len(self._open) > _MAX_CONNECTIONS:
                message = f"{_MAX_CONNECTIONS} connections are open, which is the most"
                return await incoming.refuse(RequestError(message, status=503))
            while await self._exchange(incoming, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.TimeoutError, asyncio.CancelledError):
            writer.transport.abort()  # what was not read yet is not kept; nobody waits for a connection's task
        finally:
            self._open.discard(writer)
            writer.close()

    async def _exchange(self, incoming: _Incoming, writer: asyncio.StreamWriter) -> bool:
        """Answer the next request of a connection; whether there may be another."""
        try:
            request = await incoming.request()
        except RequestError as error:  # where the next request would begin is not known
            await incoming.refuse(error)
            return False
        if request is None:
            return False
        try:
            answer = await self._answer(request, incoming)
        finally:
            request.release()
        if answer is None:
            return False
        if answer.pieces is not None:
            return await _send_pieces(answer, answer.pieces, incoming, writer, request)
        if not incoming.is_over():
            answer.on_sent()
        await _write(writer, answer, is_last=request.is_last)
        return not request.is_last

    async def _answer(self, request: HttpRequest, incoming: _Incoming) -> HttpAnswer | None:
        """Return the answer to a request; None where whoever asked has gone, or no answer came."""
        answering = asyncio.ensure_future(self._handle(request))
        try:
            return await answering if await incoming.stays_for(answering) else None
        except RequestError as error:
            return HttpAnswer.of(error)
        except Exception:
            logger.exception("the answer to a %s broke", request.method)  # a path may be a secret
            return HttpAnswer.of(RequestError("the server broke over this request; its log says why", status=500))
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)


class _InFlight:
    """How many bytes of bodies are in flight, and whose. Clients with large bodies do not keep others from theirs."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()
        self._released = asyncio.Event()

    async def hold(self, client: str, size: int) -> Callable[[], None]:
        """Wait until there is room for a body, and return what gives it back. Idempotent, that is."""
        size = size if size > _SMALL_BODY_BYTES else 0
        while size and (
            self._held[client] + size > _MAX_BYTES_IN_FLIGHT // 4 or self._held.total() + size > _MAX_BYTES_IN_FLIGHT
        ):
            self._released.clear()
            await self._released.wait()
        left = Counter({client: size})
        self._held += left

        def release() -> None:
            self._held -= left
            left.clear()
            self._released.set()

        return release


class _Incoming:
    """Requests as they come over one connection."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, admit: Admit, in_flight: _InFlight
    ) -> None:
        self._reader, self._writer = reader, writer
        self._admit, self._in_flight = admit, in_flight
        self._idle_s = _HEAD_WITHIN_S  # until the next request begins; who has sent none yet may be anybody
        self._ahead = b""
        """The first byte of the next request, if it was read while the one before was answered."""
        self._has_ended = False

    def is_over(self) -> bool:
        """Whether the other side has hung up, as far as is known."""
        return self._has_ended or self._reader.at_eof() or self._writer.transport.is_closing()

    async def look_ahead(self) -> None:
        """Return when the next request begins, or the other side hangs up."""
        if not self._ahead:
            try:
                self._ahead = await self._reader.read(1)
            except ConnectionError:
                self._ahead = b""
            self._has_ended = not self._ahead

    async def stays_for(self, coming: asyncio.Future[Any]) -> bool:
        """Wait for what is to be told, as long as the other side is there; whether it has come."""
        watching = asyncio.ensure_future(self.look_ahead())
        try:
            await asyncio.wait({coming, watching}, timeout=_ANSWER_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done() and not self.is_over():  # what came is the next request
                await asyncio.wait({coming}, timeout=_ANSWER_WITHIN_S)
            return coming.done()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def refuse(self, error: RequestError) -> None:
        """Tell an error, and hang up, a little later: to whoever is still sending its body, that is a broken connection."""
        await _write(self._writer, HttpAnswer.of(error), is_last=True)
        self._writer.write_eof()
        await asyncio.sleep(_HANGS_UP_AFTER_S)

    async def request(self) -> HttpRequest | None:
        """Return the next request; None at the end of the connection. Raises RequestError for what is none."""
        await asyncio.wait_for(self.look_ahead(), self._idle_s)
        if self._has_ended:
            return None
        first, self._ahead = self._ahead, b""
        try:
            head = await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), _HEAD_WITHIN_S)
        except asyncio.LimitOverrunError:
            raise RequestError(f"the head has more than {_MAX_HEAD_BYTES} bytes", status=431) from None
        request = _parse_head(first + head)
        length = _length_of(request.headers)
        client = self._admit(request.path, request.headers, length)
        self._idle_s = _IDLE_S
        try:
            request.release = await asyncio.wait_for(self._in_flight.hold(client, length), _BODY_WITHIN_S)
        except asyncio.TimeoutError:
            message = f"other requests left no room for this one within {_BODY_WITHIN_S:g} s; ask again"
            raise RequestError(message, status=503) from None
        if request.headers.get("expect", "").lower() == "100-continue":
            self._writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            request.body = await asyncio.wait_for(self._reader.readexactly(length), _BODY_WITHIN_S)
        except BaseException as error:
            request.release()
            if isinstance(error, asyncio.TimeoutError):
                raise RequestError(f"the body did not come within {_BODY_WITHIN_S:g} s", status=408) from None
            raise
        return request


def _parse_head(head: bytes) -> HttpRequest:
    """Return a request whose body is still to come. Raises RequestError."""
    lines = head[:-4].decode("latin-1").split("\r\n")
    first = _FIRST_LINE.fullmatch(lines[0])
    if first is None:
        raise RequestError("the first line is no HTTP/1.1 request")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or not re.fullmatch(r"[!-9;-~]+", name):
            raise RequestError("a header is none")
        if name == "content-length" and headers.get(name, value.strip()) != value.strip():
            raise RequestError("there are two lengths")
        headers[name] = value.strip()
    is_new = first[3] == "1"
    is_last = not is_new or headers.get("connection", "").lower() == "close"
    path = first[2].partition("?")[0]
    return HttpRequest(method=first[1], path=path, headers=headers, is_last=is_last, takes_chunks=is_new)


def _length_of(headers: Mapping[str, str]) -> int:
    """Return the bytes of the body. Raises RequestError."""
    if "transfer-encoding" in headers:
        raise RequestError("a body must come with its Content-Length, in one piece", status=411)
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit() and len(length) < 16):
        raise RequestError("Content-Length must be a number")
    if int(length) > MAX_REQUEST_BYTES:
        raise RequestError(f"the body may have {MAX_REQUEST_BYTES} bytes", status=413)
    return int(length)


async def _write(writer: asyncio.StreamWriter, answer: HttpAnswer, *, is_last: bool) -> None:
    """Raises asyncio.TimeoutError where it is not read, ConnectionError."""
    data = answer.body.encode(errors="replace")
    writer.write(_head_of(answer, f"Content-Length: {len(data)}", is_last=is_last) + data)
    await asyncio.wait_for(writer.drain(), _WRITE_WITHIN_S)


async def _send_pieces(
    answer: HttpAnswer,
    pieces: AsyncGenerator[str, None],
    incoming: _Incoming,
    writer: asyncio.StreamWriter,
    request: HttpRequest,
) -> bool:
    """Send pieces as they come; whether there may be another request. Raises as `_write` does."""
    length = "Transfer-Encoding: chunked" if request.takes_chunks else ""
    writer.write(_head_of(answer, length, is_last=request.is_last))
    coming: asyncio.Future[str] | None = None
    try:
        while not incoming.is_over():
            coming = asyncio.ensure_future(anext(pieces))
            if not await incoming.stays_for(coming):
                return False
            try:
                data = (await coming).encode(errors="replace")
            except StopAsyncIteration:
                writer.write(b"0\r\n\r\n" if request.takes_chunks else b"")
                await asyncio.wait_for(writer.drain(), _WRITE_WITHIN_S)
                return not request.is_last
            writer.write(b"%x\r\n%b\r\n" % (len(data), data) if request.takes_chunks else data)
            await asyncio.wait_for(writer.drain(), _WRITE_WITHIN_S)
        return False
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
        await pieces.aclose()


def _head_of(answer: HttpAnswer, length: str, *, is_last: bool) -> bytes:
    head = [
        f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}",
        f"Content-Type: {answer.content_type}",
        *([length] if length else []),
        *(f"{name}: {value}" for name, value in answer.headers.items()),
        *(["Connection: close"] if is_last else []),
    ]
    return "\r\n".join(head).encode("latin-1", "replace") + b"\r\n\r\n"
