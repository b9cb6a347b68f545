"""Answers of HTTP servers: bounded in bytes and in time, asked for again where an error passes, read as JSON.

For servers that generate (`inference/http.py`), judge or score (`rollout/rewards/`). What a server sends is read as if it
came from anybody.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx

from skyrl_train.errors import DeadlineError, EngineError, Violation
from skyrl_train.system.files import parse_json
from skyrl_train.telemetry.logs import redact_text

__all__ = [
    "CONNECT_TIMEOUT_S",
    "MAX_BODY_BYTES",
    "Reply",
    "UnreadableReply",
    "ask_until_answered",
    "client_arguments",
    "send",
]

CONNECT_TIMEOUT_S = 10.0
MAX_BODY_BYTES = 4 * 2**20
"""Of an answer beside its tokens; what a server sends beyond is not read."""
_RETRY_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0


def address_violations(url: str, field: str) -> Iterator[Violation]:
    """What is wrong with the address of a server; `field` is the setting."""
    if not re.fullmatch(r"https?://[^\s/]+\S*", url):
        rule, remedy = (
            "must be the address of a server, http://HOST:PORT or https://HOST",
            "write url: http://HOST:PORT, e.g. http://127.0.0.1:8000",
        )
        yield Violation.of(field, redact_text(url), rule, remedy)


class UnreadableReply(Exception):
    """What a server sent is no answer at all, such as a page of a proxy: it may pass."""


class Reply:
    """A server's answer before anything is made of it."""

    def __init__(self, where: str, response: httpx.Response, most: int = MAX_BODY_BYTES) -> None:
        """The answer without its body, which may have `most` bytes. Raises EngineError where that is compressed."""
        encoding = response.headers.get("content-encoding", "identity").lower()
        if encoding != "identity":
            raise EngineError(f"{where}: the answer is compressed ({encoding[:40]}), which is refused")
        self._where, self._most = where, most
        self.status, self.body = response.status_code, bytearray()
        asked = response.headers.get("retry-after", "")
        self.retry_after_s = min(float(asked), _LONGEST_PAUSE_S) if asked.isascii() and asked.isdigit() else 0.0
        """How long the server wants to be left alone; 0 where it does not say."""

    def add(self, chunk: bytes) -> None:
        """Take some of the body. Raises EngineError where it gets too long."""
        self.body += chunk
        if len(self.body) > self._most:
            raise EngineError(f"{self._where}: the answer has more than {self._most} bytes")

    @property
    def beginning(self) -> str:
        return self.body[:300].decode(errors="replace")

    def json(self) -> Any:
        """Return the body as JSON, read strictly. Raises UnreadableReply."""
        try:
            return parse_json(bytes(self.body))
        except ValueError as error:
            raise UnreadableReply(f"the answer is {error}, and begins with {self.beginning[:80]!r}") from None


def client_arguments(url: str, token: str, timeout_s: float) -> dict[str, Any]:
    """Return what a client of httpx is made with."""
    return {
        "base_url": url,
        # Compressed, a few bytes may stand for any number.
        "headers": {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {token}"} if token else {})},
        "timeout": httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
    }


async def send(
    client: httpx.AsyncClient,
    method: str,
    path: str,
    body: dict[str, Any] | None,
    *,
    timeout_s: float,
    most: int = MAX_BODY_BYTES,
) -> Reply:
    """Raises httpx.HTTPError, asyncio.TimeoutError, and EngineError for more than `most` bytes. A server that sends a
    byte now and then has no more time than one that is silent."""

    async def ask() -> Reply:
        async with client.stream(method, path, json=body) as response:
            reply = Reply(f"{client.base_url}{path}", response, most)
            async for chunk in response.aiter_bytes():
                reply.add(chunk)
            return reply

    return await asyncio.wait_for(ask(), timeout_s)


async def ask_until_answered(
    attempt: Callable[[], Awaitable[Reply]], *, where: str, max_retries: int, timeout_s: float
) -> Any:
    """Return the JSON of an answer of status 200.

    Tries again, with growing pauses or those that the server asks for, what the server did not answer, or answered with
    something unreadable or a passing error. Raises EngineError, and DeadlineError where one attempt took longer than it may.
    """
    failure, asked_s = "", 0.0
    for number in range(max_retries + 1):
        if number:
            await asyncio.sleep(max(asked_s, _FIRST_PAUSE_S * 2 ** (number - 1)))
        asked_s = 0.0
        try:
            reply = await attempt()
            if reply.status == 200:
                return reply.json()
        except (httpx.TimeoutException, asyncio.TimeoutError):
            raise DeadlineError(where, timeout_s) from None
        except httpx.HTTPError as error:
            failure = f"{type(error).__name__}: {error}"
            continue
        except UnreadableReply as error:
            failure = str(error)
            continue
        failure, asked_s = f"status {reply.status}: {reply.beginning}", reply.retry_after_s
        if reply.status not in _RETRY_STATUS:
            break
    raise EngineError(f"{where}: {failure}")


async def server_problem(client: httpx.AsyncClient, *, what: str, model: str, api_key_env: str) -> str:
    """Return why an OpenAI-compatible server is of no use, in one line; empty where it answers and has the model, or lists
    none. `what` is the server in that line, `api_key_env` the variable that holds its key."""
    try:
        reply = await send(client, "GET", "/v1/models", None, timeout_s=CONNECT_TIMEOUT_S)
        served = [entry["id"] for entry in reply.json()["data"]] if reply.status == 200 else []
    except (httpx.HTTPError, asyncio.TimeoutError, EngineError) as error:
        return f"{what} does not answer ({type(error).__name__}). Is it up?"
    except (UnreadableReply, KeyError, TypeError):
        return ""  # it answers, in its own way
    if reply.status in (401, 403):
        return f"{what} refuses the key; put it in the environment variable {api_key_env} (api_key_env)"
    if reply.status >= 500:
        return f"{what} answers with status {reply.status}"
    if served and model not in served:
        return f"{what} has no model {model!r}; it has {', '.join(map(str, served))[:200]}"
    return ""
