"""Programs that ask a model for each turn, turned round: what they ask comes out, and the trajectory's answers go in.

    environment                 Inversion                      the program, a task of this event loop
    init           begin()  ->  starts it                 ->   POST /v1/chat/completions {model, messages, tools}
                   Asked    <-  its first request         <-
    step(action)   answer() ->  the response, as OpenAI's ->   runs tools, speaks for the user, scores
                   Asked or Ended                         <-   asks again, or is over

The server listens on loopback, one to an event loop, and tells trajectories from each other by `model`, which is random and
known to the trajectory's program alone. How tokens are sampled is the trainer's: what a request says of that is not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from skyrl_train.types import ChatMessage

T = TypeVar("T")
NO_DEADLINE_S = 86400.0
"""Of waits within a call of an environment, whose deadline is `environment.step_timeout_s`."""
_CLOSES_WITHIN_S = 30.0
_JSON = "application/json"
_MAX_REQUEST_BYTES = 64 << 20
_FULL = {
    "error": {"message": "the context is full", "type": "invalid_request_error", "code": "context_length_exceeded"}
}


class ProgramError(Exception):
    """A program asked what a trajectory cannot answer."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The program waits for an answer."""

    messages: list[ChatMessage]
    """All messages of its first request; of a later one those that follow the last answer."""
    tools: list[dict[str, Any]]
    """Schemas of what the model may call."""


@dataclass(frozen=True, kw_only=True)
class Ended(Generic[T]):
    """The program is over."""

    value: T


class Inversion(Generic[T]):
    """One program and the conversation that it has with the model. Used from one event loop, one call at a time."""

    def __init__(self, run: Callable[[str, str], Coroutine[Any, Any, T]]) -> None:
        """`run(base_url, model)` is the program: it asks `base_url` + `/chat/completions` for answers of `model`."""
        self._run = run
        self._model = secrets.token_urlsafe(24)
        self._program: asyncio.Task[T] | None = None
        self._conversation: list[ChatMessage] = []
        """What the model has been shown and has answered."""
        self._tools: list[dict[str, Any]] | None = None
        self._arrival: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._reply: asyncio.Future[ChatMessage | None] | None = None
        """Of the request that waits; None says that the context is full."""
        self._is_full = False
        self._trouble = ""

    async def begin(self) -> Asked | Ended[T]:
        """Start the program. Returns its first request. Raises what it raises, or ProgramError."""
        conversations, base_url = await kept_open("chat", _serve)
        conversations[self._model] = self._take
        self._program = asyncio.ensure_future(self._run(base_url, self._model))
        self._program.add_done_callback(lambda _: conversations.pop(self._model, None))
        return await self._next()

    async def answer(self, text: str, calls: Sequence[Mapping[str, Any]] = ()) -> Asked | Ended[T]:
        """Answer the request that waits, with `{"id": ..., "name": ..., "arguments": mapping or text}` for each call.

        Returns the next request, or the end. Raises what the program raises, and ProgramError where it asks something that
        does not continue the conversation.
        """
        message = {"role": "assistant", "content": text}
        self._conversation.append({**message, "tool_calls": [_call(each) for each in calls]} if calls else message)
        return await self._resume(self._conversation[-1])

    async def refuse(self) -> Asked | Ended[T]:
        """Refuse the request that waits, and all that follow, because the context is full. Returns the end."""
        self._is_full = True
        return await self._resume(None)

    async def close(self) -> None:
        """End the program, within a limit."""
        if self._program is not None:
            self._program.cancel()
            ended = asyncio.gather(self._program, return_exceptions=True)  # what it raises is nobody's concern any more
            await asyncio.wait({ended}, timeout=_CLOSES_WITHIN_S)

    async def _resume(self, message: ChatMessage | None) -> Asked | Ended[T]:
        reply, self._reply = self._reply, None
        if reply is None or reply.done():
            raise ProgramError("the program does not wait for an answer")
        self._arrival = asyncio.get_running_loop().create_future()
        reply.set_result(message)
        return await self._next()

    async def _next(self) -> Asked | Ended[T]:
        assert self._program is not None
        waited: set[asyncio.Future[Any]] = {self._program, self._arrival}
        await asyncio.wait(waited, timeout=NO_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        if self._trouble:
            raise ProgramError(self._trouble)
        if self._program.done():
            return Ended(value=await self._program)
        return self._continued(await self._arrival)

    def _continued(self, request: Mapping[str, Any]) -> Asked:
        """Return what a request adds to the conversation."""
        messages, tools = [_message(each) for each in request["messages"]], list(request.get("tools") or ())
        if request.get("n", 1) not in (1, None):
            raise ProgramError(f"a request asks for {request['n']} answers at once; a trajectory has one")
        if self._tools is not None and tools != self._tools:
            raise ProgramError("the tools that the model may call changed within the conversation")
        held = self._conversation
        for index, before in enumerate(held):
            now = messages[index] if index < len(messages) else None
            if now is None or _compared(now) != _compared(before):
                said = "is gone" if now is None else f"was {before!r:.100} and is {now!r:.100}"
                raise ProgramError(f"the history was rewritten, which cannot be trained on: message {index} {said}")
        added = messages[len(held) :]
        if not added or (held and any(each["role"] == "assistant" for each in added)):
            said = "an answer that the model did not give" if added else "no message"
            raise ProgramError(f"the history was rewritten, which cannot be trained on: it adds {said}")
        self._conversation, self._tools = messages, tools
        return Asked(messages=added, tools=tools)

    async def _take(self, request: Mapping[str, Any]) -> ChatMessage | None:
        """Return the answer to a request, once there is one; None where the context is full."""
        if self._is_full:
            return None
        if self._reply is not None or self._arrival.done():
            self._trouble = "the program asks for two answers at a time; a trajectory gives one after the other"
            raise ProgramError(self._trouble)
        reply: asyncio.Future[ChatMessage | None] = asyncio.get_running_loop().create_future()
        self._reply = reply
        self._arrival.set_result(request)
        return await reply


def _message(wire: Mapping[str, Any]) -> ChatMessage:
    """Return a message as chat templates take it. Raises ProgramError for one that is more than text."""
    content = wire.get("content")
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise ProgramError(f"a message has a part that is no text: {content!r:.100}")
        content = "".join(part["text"] for part in content)
    message = {"role": str(wire["role"]), "content": content or ""}
    calls = [_call({"id": each.get("id"), **each["function"]}) for each in wire.get("tool_calls") or ()]
    said = {"tool_calls": calls} if calls else {}
    return {**message, **said, **{name: wire[name] for name in ("tool_call_id", "name") if wire.get(name)}}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call as chat templates take it: arguments that are the text of a mapping are a mapping."""
    arguments = call["arguments"]
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            read = json.loads(arguments)
            arguments = read if isinstance(read, dict) else arguments
    return {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": arguments}}


def _compared(message: ChatMessage) -> ChatMessage:
    """Return what two copies of a message must agree in: programs may leave the name of a tool out."""
    return {name: value for name, value in message.items() if name != "name"}


# The server


Take = Callable[[Mapping[str, Any]], Coroutine[Any, Any, "ChatMessage | None"]]


@contextlib.asynccontextmanager
async def _serve() -> AsyncIterator[tuple[dict[str, Take], str]]:
    """Yield the conversations by `model`, to be filled, and the URL that they are asked for."""
    conversations: dict[str, Take] = {}

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, ValueError):
            while (body := await _request(reader)) is not None:
                status, kind, text = await _reply(json.loads(body), conversations)
                data = text.encode()
                head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n"
                writer.write(head.encode() + data)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield conversations, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()


async def _request(reader: asyncio.StreamReader) -> bytes | None:
    """Return the body of the next request of a connection; None at its end. Raises ValueError for one that is too long."""
    if not await reader.readline():
        return None
    length = 0
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        length = int(value) if name.lower() == "content-length" else length
    if length > _MAX_REQUEST_BYTES:
        raise ValueError(f"a request of {length} bytes")
    return await reader.readexactly(length)


async def _reply(body: Mapping[str, Any], conversations: Mapping[str, Take]) -> tuple[str, str, str]:
    """Return status, type and text of the answer to a request."""
    take = conversations.get(str(body.get("model")))
    if take is None:
        return "404 Not Found", _JSON, json.dumps({"error": {"message": "no such model"}})
    try:
        message = await take(body)
    except ProgramError as error:
        return "409 Conflict", _JSON, json.dumps({"error": {"message": str(error)}})
    if message is None:
        return "400 Bad Request", _JSON, json.dumps(_FULL)
    if body.get("stream"):
        return "200 OK", "text/event-stream", _streamed(message, body["model"])
    return "200 OK", _JSON, json.dumps(_completion(message, body["model"], "chat.completion", "message"))


def _completion(message: ChatMessage, model: str, kind: str, field: str) -> dict[str, Any]:
    """Return an answer as OpenAI's API words it, or as the one piece of a stream. There is no usage: tokens are counted by
    the trainer."""
    calls = [
        {
            **({"index": index} if field == "delta" else {}),
            **call,
            "function": {**call["function"], "arguments": _as_text(call["function"]["arguments"])},
        }
        for index, call in enumerate(message.get("tool_calls") or ())
    ]
    choice = {
        "index": 0,
        field: {**message, "tool_calls": calls} if calls else message,
        "finish_reason": "tool_calls" if calls else "stop",
    }
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
    }


def _as_text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _streamed(message: ChatMessage, model: str) -> str:
    piece = json.dumps(_completion(message, model, "chat.completion.chunk", "delta"))
    return f"data: {piece}\n\ndata: [DONE]\n\n"


# What stays open as long as an event loop


_OPEN: dict[tuple[asyncio.AbstractEventLoop, Hashable], tuple[asyncio.Task[None], asyncio.Future[Any]]] = {}


async def kept_open(key: Hashable, make: Callable[[], AbstractAsyncContextManager[T]]) -> T:
    """Return what the context manager of `key` yields. It is entered once in an event loop, in a task of its own, and left
    when the loop's tasks are cancelled. Raises what entering it raises; the next call tries again."""
    place = (asyncio.get_running_loop(), key)

    async def hold() -> None:
        try:
            async with make() as value:
                opened.set_result(value)
                while True:
                    await asyncio.sleep(NO_DEADLINE_S)
        except Exception as error:
            if not opened.done():
                opened.set_exception(error)
        finally:
            _OPEN.pop(place, None)
            opened.cancel()

    if place not in _OPEN:
        opened: asyncio.Future[T] = place[0].create_future()
        _OPEN[place] = asyncio.ensure_future(hold()), opened
    found: T = await asyncio.shield(_OPEN[place][1])
    return found
