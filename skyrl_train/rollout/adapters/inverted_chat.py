"""Programs that ask a model for each turn, turned round: what they ask comes out, and the trajectory's answers go in.

    environment                 Inversion                      the program, a task of this event loop
    init           begin()  ->  starts it                 ->   POST /v1/chat/completions {model, messages, tools}
                   ChatRequest   <-  its first request       <-
    step(action)   answer() ->  the response, as OpenAI's ->   runs tools, speaks for the user, scores
                   ChatRequest, of what was added, or Ended   <- asks again, or is over

The server listens on loopback, one to an event loop, and tells trajectories from each other by `model`, which is random and
known to the trajectory's program alone. How tokens are sampled is the trainer's: what a request says of that is not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from skyrl_train.rollout.agents.http_server import HttpAnswer, HttpRequest, HttpServer, RequestError
from skyrl_train.rollout.agents.wires import ChatReply, ChatRequest, call_of, chat_completion, chat_events, read_chat
from skyrl_train.types import ChatMessage

T = TypeVar("T")
NO_DEADLINE_S = 86400.0
"""Of waits within a call of an environment, whose deadline is `environment.step_timeout_s`."""
_CLOSES_WITHIN_S = 30.0


class ProgramError(Exception):
    """A program asked what a trajectory cannot answer."""


@dataclass(frozen=True, kw_only=True)
class Ended(Generic[T]):
    """The program is over, with what it returned."""

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

    async def begin(self) -> ChatRequest | Ended[T]:
        """Start the program. Returns its first request. Raises what it raises, or ProgramError."""
        conversations, base_url = await kept_open("chat", _serve)
        conversations[self._model] = self._take
        self._program = asyncio.ensure_future(self._run(base_url, self._model))
        self._program.add_done_callback(lambda _: conversations.pop(self._model, None))
        return await self._next()

    async def answer(self, text: str, calls: Sequence[Mapping[str, Any]] = ()) -> ChatRequest | Ended[T]:
        """Answer the request that waits, with `{"id": ..., "name": ..., "arguments": mapping or text}` for each call.

        Returns the next request, or the end. Raises what the program raises, and ProgramError where it asks something that
        does not continue the conversation.
        """
        message = {"role": "assistant", "content": text}
        self._conversation.append({**message, "tool_calls": [call_of(each) for each in calls]} if calls else message)
        return await self._resume(self._conversation[-1])

    async def refuse(self) -> ChatRequest | Ended[T]:
        """Refuse the request that waits, and all that follow, because the context is full. Returns the end."""
        self._is_full = True
        return await self._resume(None)

    async def close(self) -> None:
        """End the program, within a limit."""
        if self._program is not None:
            self._program.cancel()
            ended = asyncio.gather(self._program, return_exceptions=True)  # what it raises is nobody's concern any more
            await asyncio.wait({ended}, timeout=_CLOSES_WITHIN_S)

    async def _resume(self, message: ChatMessage | None) -> ChatRequest | Ended[T]:
        reply, self._reply = self._reply, None
        if reply is None or reply.done():
            raise ProgramError("the program does not wait for an answer")
        self._arrival = asyncio.get_running_loop().create_future()
        reply.set_result(message)
        return await self._next()

    async def _next(self) -> ChatRequest | Ended[T]:
        assert self._program is not None
        waited: set[asyncio.Future[Any]] = {self._program, self._arrival}
        await asyncio.wait(waited, timeout=NO_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        if self._trouble:
            raise ProgramError(self._trouble)
        if self._program.done():
            return Ended(value=await self._program)
        return self._continued(await self._arrival)

    def _continued(self, request: Mapping[str, Any]) -> ChatRequest:
        """Return a request with the messages that it adds to the conversation."""
        try:
            asked = read_chat(request)
        except RequestError as error:
            raise ProgramError(str(error)) from None
        messages, tools = list(asked.messages), [dict(tool) for tool in asked.tools]
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
        return replace(asked, messages=tuple(added))

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


def _compared(message: ChatMessage) -> ChatMessage:
    """Return what two copies of a message must agree in: programs may leave the name of a tool out."""
    return {name: value for name, value in message.items() if name != "name"}


# The server


Take = Callable[[Mapping[str, Any]], Coroutine[Any, Any, "ChatMessage | None"]]


@contextlib.asynccontextmanager
async def _serve() -> AsyncIterator[tuple[dict[str, Take], str]]:
    """Yield the conversations by `model`, to be filled, and the URL that they are asked for."""
    conversations: dict[str, Take] = {}
    server = HttpServer(lambda request: _reply(request, conversations))
    try:
        yield conversations, f"http://127.0.0.1:{await server.start('127.0.0.1')}/v1"
    finally:
        server.close()


async def _reply(request: HttpRequest, conversations: Mapping[str, Take]) -> HttpAnswer:
    """Return the answer to a request. Raises RequestError."""
    try:
        body = json.loads(request.take_body())
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is no JSON: {error}") from None
    take = conversations.get(str(body.get("model"))) if isinstance(body, dict) else None
    if take is None:
        raise RequestError("no such model", status=404)
    try:
        message = await take(body)
    except ProgramError as error:
        raise RequestError(str(error), status=409) from None
    if message is None:
        raise RequestError("the context is full", code="context_length_exceeded")
    finish = "tool_calls" if message.get("tool_calls") else "stop"
    answered = ChatReply(number=0, message=message, finish=finish)  # tokens are counted by the trainer
    if body.get("stream"):
        events = chat_events(answered.number, body)
        return HttpAnswer(content_type="text/event-stream", body=next(events) + events.send(answered))
    return HttpAnswer(body=json.dumps(chat_completion(answered, body)))


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
