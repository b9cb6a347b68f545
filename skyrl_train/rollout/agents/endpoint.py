"""The endpoint of an event loop: what programs of all its sessions ask, told from each other by a random key, in a header or
in the path, `/s/KEY/v1/...`, for programs that cannot set one.

    POST /v1/chat/completions, /v1/responses, /v1/messages      read, Session.ask, told: whole, or as events
    GET  /v1/models                                             one model, whatever name requests give it

It listens on loopback unless told otherwise, from the first session that is opened until the last one closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_train.rollout.agents.http_server import HttpAnswer, HttpRequest, HttpServer, RequestError
from skyrl_train.rollout.agents.session import Origin, Progress, Session
from skyrl_train.rollout.agents.wires import WIRES, ChatReply, Events
from skyrl_train.system.files import parse_json

LOOPBACK = "127.0.0.1"
MODEL = "policy"
"""The name that the endpoint gives its model."""
_NO_KEY = "the key must be the session's: Authorization: Bearer KEY, or x-api-key: KEY, or in the address, /s/KEY/v1"
_BYTES_OF_CHARACTER = 6  # the most in JSON: an escape
COMMENT = ": the answer is on its way\n\n"
"""Said in a stream between events, which keeps clients that wait for bytes from giving up."""
_ROOM_BESIDE_TEXTS = 1 << 20
"""Bytes of a body, for all that is no text of a prompt."""
_IN_PATH = re.compile(r"/s/([\w-]*)(/.*)?")


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a program finds its model."""

    base_url: str
    """As SDKs of OpenAI take it: it ends with /v1."""
    api_key: str
    model: str = MODEL

    @property
    def session_url(self) -> str:
        """The base URL for programs that cannot set a key: the key is in it, and any other is not looked at."""
        return f"{self.base_url.removesuffix('/v1')}/s/{self.api_key}/v1"


class _Endpoint:
    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.server = HttpServer(self.handle, self.admit)
        self.port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.is_up = False

    async def start(self, host: str) -> None:
        """Listen. Raises OSError, to all who wait for the port."""
        try:
            self.port.set_result(await self.server.start(host))
            self.is_up = True
        except BaseException as error:
            self.port.set_exception(OSError(f"cannot listen on {host}: {type(error).__name__}: {error}"))
            self.port.exception()  # nobody else may be waiting for it
            raise

    def admit(self, path: str, headers: Mapping[str, str], length: int) -> str:
        """Return the key of a request whose body may be read. Raises RequestError."""
        key, _, session = self._asked(path, headers)
        session.check_size((length - _ROOM_BESIDE_TEXTS) // _BYTES_OF_CHARACTER)
        return key

    def _asked(self, path: str, headers: Mapping[str, str]) -> tuple[str, str, Session]:
        """Return the key, the path without it, and the session. Raises RequestError."""
        if in_path := _IN_PATH.fullmatch(path):
            key, path = in_path[1], in_path[2] or "/"
        else:
            scheme, _, bearer = headers.get("authorization", "").partition(" ")
            key = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        session = self.sessions.get(key)
        if session is None:
            raise RequestError(_NO_KEY, status=401, code="invalid_api_key")
        return key, path, session

    async def handle(self, request: HttpRequest) -> HttpAnswer:
        """Return the answer to a request of any of the sessions. Raises RequestError."""
        _, path, session = self._asked(request.path, request.headers)
        if path in ("/v1/models", f"/v1/models/{MODEL}"):
            _check_method(request.method, path, "GET")
            model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "skyrl_train"}
            listed = {"object": "list", "data": [model]}
            return HttpAnswer(body=json.dumps(model if path.endswith(MODEL) else listed))
        wire = WIRES.get(path)
        if wire is None:
            known = ", ".join(["/v1/models", *WIRES])
            raise RequestError(f"there is nothing at this path; there are {known}", status=404)
        _check_method(request.method, path, "POST")
        body, digest = _body_of(request, path)
        key, count = (request.headers.get(name, "") for name in ("idempotency-key", "x-stainless-retry-count"))
        is_count = count.isascii() and count.isdigit() and len(count) < 10
        origin = Origin(body=digest, key=key, attempt=int(count) if is_count else None)
        asked = wire.read(body)
        if body.get("stream") is True:
            progress = Progress()
            asking = asyncio.ensure_future(session.ask(asked, origin, body, progress))
            await _begun(asking, progress)
            wording = wire.events(progress.number, body, progress.prompt_tokens)
            events = _events(asking, progress, wording, session.deliver)
            return HttpAnswer(pieces=events, content_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        answered = await session.ask(asked, origin, body)
        return HttpAnswer(body=json.dumps(wire.whole(answered, body)), on_sent=lambda: session.deliver(answered))


_OPEN: dict[tuple[asyncio.AbstractEventLoop, str], _Endpoint] = {}


@contextlib.asynccontextmanager
async def opened(session: Session, host: str = LOOPBACK) -> AsyncIterator[Address]:
    """Yield where the session's program asks. Afterwards its key is worth nothing, and what it asked is cancelled. Raises
    OSError where this process cannot listen on `host`."""
    place = (asyncio.get_running_loop(), host)
    key = secrets.token_urlsafe(24)
    endpoint = _OPEN.get(place)
    is_first = endpoint is None
    endpoint = _OPEN.setdefault(place, endpoint or _Endpoint())
    endpoint.sessions[key] = session
    try:
        if is_first:
            await endpoint.start(host)
        port = await asyncio.shield(endpoint.port)
        yield Address(base_url=f"http://{f'[{host}]' if ':' in host else host}:{port}/v1", api_key=key)
    finally:
        del endpoint.sessions[key]
        session.close()
        if not endpoint.sessions or not endpoint.is_up:
            endpoint.server.close()
            if _OPEN.get(place) is endpoint:
                del _OPEN[place]


async def _begun(asking: asyncio.Future[ChatReply], progress: Progress) -> None:
    """Wait until there is something to tell of an answer, or nothing to tell for so long that something must be said. Raises
    RequestError for what is refused before that."""
    asking.add_done_callback(lambda _: progress.changed.set())
    try:
        await progress.change()
        if asking.done():
            await asking
    except BaseException:
        asking.cancel()
        raise


async def _events(
    asking: asyncio.Future[ChatReply], progress: Progress, events: Events, deliver: Callable[[ChatReply], None]
) -> AsyncGenerator[str, None]:
    """Yield the events of an answer as they come. `deliver` is called when the end of the answer is taken."""
    told = 0
    try:
        yield next(events)
        while not asking.done():
            if len(progress.text) > told:
                piece, told = progress.text[told:], len(progress.text)
                yield events.send(piece)
            elif not await progress.change():
                yield COMMENT
        try:
            answered = await asking
        except RequestError as error:  # the status has been sent
            yield f"event: error\ndata: {json.dumps({'type': 'error', 'error': error.body})}\n\n"
            return
        deliver(answered)
        yield events.send(answered)
    finally:
        asking.cancel()


def _check_method(given: str, path: str, method: str) -> None:
    if given != method:
        raise RequestError(f"{path} is asked with {method}", status=405)


def _body_of(request: HttpRequest, path: str) -> tuple[Mapping[str, Any], bytes]:
    """Return what a request asks, and a digest of its path and body, which is kept no longer. Raises RequestError."""
    digest = hashlib.blake2b(f"{path}\n".encode(), digest_size=16)
    text = request.take_body()
    digest.update(text)
    try:
        body = parse_json(text)
    except ValueError as error:
        raise RequestError(f"the body is {error}") from None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    if not isinstance(body.get("model", ""), str):
        raise RequestError("model: must be a text; any will do", param="model")
    return body, digest.digest()
