"""What is too large, or has no key, is refused before it costs anything; no session waits for the prompt of another."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from typing import Any

import httpx
import pytest

from skyrl_train.rollout.agents import http_server
from skyrl_train.rollout.agents.endpoint import Address, opened
from skyrl_train.rollout.agents.session import Session
from skyrl_train.rollout.chat_tokens import ChatTokens
from skyrl_train.types import Outcome, TokenIds
from tests.support.agent_cases import chat, client_of, drawn, episode, over_http, scripted, user
from tests.support.fakes import FakeEngine

MB = 1 << 20


def head(address: Address, length: int, key: str | None = None) -> bytes:
    lines = ["POST /v1/chat/completions HTTP/1.1", f"Content-Length: {length}", "Expect: 100-continue"]
    return "\r\n".join([*lines, f"x-api-key: {key or address.api_key}", "\r\n"]).encode()


@contextlib.asynccontextmanager
async def connection(address: Address) -> Any:
    host, port = address.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    yield reader, writer
    writer.transport.abort()


async def told(address: Address, sent: bytes) -> bytes:
    """What is said to a head whose body never comes, until the other side hangs up."""
    async with connection(address) as (reader, writer):
        writer.write(sent)
        return bytes(await asyncio.wait_for(reader.read(-1), 5))


async def says(address: Address, **body: Any) -> httpx.Response:
    async with client_of(address) as client:
        return await client.post("/chat/completions", json={"messages": [user("1")], **body})


def test_who_has_no_key_is_hung_up_on_before_the_body_is_read() -> None:
    async def run() -> bytes:
        async with opened(Session(episode(scripted()))) as address:
            return await told(address, head(address, 60 * MB, "wrong"))

    assert asyncio.run(run()).startswith(b"HTTP/1.1 401 ")  # and not 100 Continue


def test_a_body_that_holds_more_than_the_context_is_refused_by_its_head() -> None:
    async def run() -> tuple[bytes, Session]:
        session = Session(episode(scripted(), room=4096))
        async with opened(session) as address:
            return await told(address, head(address, 50 * MB)), session

    said, session = asyncio.run(run())
    assert said.startswith(b"HTTP/1.1 413 ")
    assert f"more than {4096 * chat().longest_token} characters".encode() in said
    assert b"generator.max_context_length=4096" in said
    assert session.refused is Outcome.CONTEXT_FULL


@pytest.mark.parametrize(("place", "size", "status"), [
    ("content", 4096, 413), ("tools", 4096, 413), ("content", 100, 200)
])  # fmt: skip
def test_characters_are_counted_before_there_are_tokens(
    monkeypatch: pytest.MonkeyPatch, place: str, size: int, status: int
) -> None:
    rendered: list[int] = []
    first_prompt = ChatTokens.first_prompt

    def render(*given: Any) -> TokenIds:
        rendered.append(1)
        return first_prompt(*given)

    monkeypatch.setattr(ChatTokens, "first_prompt", render)
    text = "ab c" * (size * chat().longest_token // 4) + "."
    function = {"type": "function", "function": {"name": "f", "description": text}}
    body = {"messages": [user(text)]} if place == "content" else {"tools": [function]}

    async def play(client: httpx.AsyncClient, session: Session) -> httpx.Response:
        return await client.post("/chat/completions", json={"messages": [user("1")], **body})

    response = over_http(play, FakeEngine(drawn), room=4096)
    assert response.status_code == status
    assert len(rendered) == 1 + (status == 200)  # one is that of the episode
    assert status == 200 or response.json()["error"]["code"] == "context_length_exceeded"


def test_a_long_prompt_keeps_its_own_session_in_order_and_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    is_answered, first_prompt = threading.Event(), ChatTokens.first_prompt

    def slow(tokens: ChatTokens, messages: Any, tools: Any) -> TokenIds:
        if len(messages[0]["content"]) > 100_000:
            assert is_answered.wait(20), "the other session waits for this one's prompt"
        return first_prompt(tokens, messages, tools)

    monkeypatch.setattr(ChatTokens, "first_prompt", slow)

    async def run() -> list[int]:
        engine = FakeEngine(drawn)
        async with opened(Session(episode(engine))) as long, opened(Session(episode(FakeEngine(drawn)))) as short:
            first = asyncio.ensure_future(says(long, messages=[user("ab c" * 30_000)]))
            while not is_being_read(first):
                await asyncio.sleep(0.1)
            second = asyncio.ensure_future(says(long))
            assert (await says(short)).status_code == 200
            assert not engine.requests
            is_answered.set()
            await asyncio.gather(first, second)
        return [len(request.prompt_token_ids) for request in engine.requests]

    long, short = asyncio.run(asyncio.wait_for(run(), 60))
    assert long > short


def is_being_read(first: asyncio.Future[Any]) -> bool:
    assert not first.done()
    return any(each.name == "agents-long-prompts" for each in threading.enumerate())


def test_bodies_in_flight_are_bounded_and_no_client_takes_the_room_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_MAX_BYTES_IN_FLIGHT", MB)

    async def begun(address: Address, size: int, stack: contextlib.AsyncExitStack) -> Any:
        reader, writer = await stack.enter_async_context(connection(address))
        writer.write(head(address, size))
        return asyncio.ensure_future(reader.readexactly(25)), writer

    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            ours, theirs = [await stack.enter_async_context(opened(Session(episode(scripted("a", "b"))))) for _ in "12"]
            (first, writer), (second, _), (other, _) = [
                await begun(address, 200_000, stack) for address in (ours, ours, theirs)
            ]
            assert (await first, await other) == (b"HTTP/1.1 100 Continue\r\n\r\n",) * 2
            assert (await says(ours)).status_code == 200  # a small one
            assert not second.done()
            writer.transport.abort()
            assert await asyncio.wait_for(second, 5)

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_body_that_is_being_answered_is_no_longer_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_MAX_BYTES_IN_FLIGHT", MB)
    monkeypatch.setattr(http_server, "_BODY_WITHIN_S", 0.5)

    async def run() -> list[int]:
        async with opened(Session(episode(FakeEngine(drawn, delay_s=1.0)))) as address:
            padded = [says(address, messages=[user(str(number))], metadata="x" * 200_000) for number in range(3)]
            return [each.status_code for each in await asyncio.gather(*padded)]

    assert asyncio.run(run()) == [200, 200, 200]


def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_MAX_CONNECTIONS", 2)

    async def run() -> tuple[bytes, int]:
        async with opened(Session(episode(scripted("a")))) as address:
            async with connection(address), connection(address):
                refused = await told(address, b"")
            await asyncio.sleep(0.1)
            return refused, (await says(address)).status_code

    refused, status = asyncio.run(run())
    assert refused.startswith(b"HTTP/1.1 503 ")
    assert b"x-should-retry: true" in refused
    assert (
        json.loads(refused.partition(b"\r\n\r\n")[2])["error"]["message"] == "2 connections are open, which is the most"
    )
    assert status == 200
