"""Answers that are streamed: pieces as they are sampled, comments in between, and who stops reading."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from skyrl_train.errors import EngineError
from skyrl_train.inference import HFEngine
from skyrl_train.rollout.agents import http_server, session as sessions
from skyrl_train.rollout.agents.endpoint import Address, opened
from skyrl_train.rollout.agents.session import Session
from skyrl_train.rollout.checked_engine import CheckedEngine, listener, listening
from skyrl_train.rollout.journal import Journal
from skyrl_train.types import GenerationOutput, GenerationRequest, SamplingParams
from tests.support.agent_cases import ADD, CALL, client_of, drawn, episode, letter_by_letter, scripted, tokenizer, user
from tests.support.fakes import FakeEngine, make_tiny_model, make_tokenizer


class Telling(FakeEngine):
    """Says each token when it is sampled."""

    def __init__(self, text: str) -> None:
        self.tokens = letter_by_letter(text)
        super().__init__(lambda _: self.tokens)
        self.num_told = 0

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        told = listener()
        assert told is not None
        for token in self.tokens:
            told((token,))
            self.num_told += 1
            await asyncio.sleep(0.02 if len(self.tokens) < 20 else 0.001)
        return await super().generate(request)


BODIES: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": [user("1")]},
    "/responses": {"input": "1"},
    "/messages": {"messages": [user("1")]},
}


def text_in(event: dict[str, Any]) -> str:
    """The piece of text in an event of any of the three APIs."""
    if "choices" in event:
        return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    delta = event.get("delta", "")
    return str(delta.get("text", "")) if isinstance(delta, dict) else str(delta)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_TELLS_EVERY_S", 0.001)


def streamed(engine: Telling, path: str = "/chat/completions", **body: Any) -> tuple[list[str], int]:
    """Pieces, and how many tokens were sampled when the first of them came."""

    async def run() -> tuple[list[str], int]:
        session, pieces, num_told = Session(episode(engine)), [], 0
        async with opened(session) as address, client_of(address) as client:
            asked = {**BODIES[path], **body, "stream": True}
            async with client.stream("POST", path, json=asked) as response:
                assert response.headers["transfer-encoding"] == "chunked"
                async for line in response.aiter_lines():
                    is_event = line.startswith("data: {")
                    if is_event and (text := text_in(json.loads(line[6:]))):
                        pieces.append(text)
                        num_told = num_told or engine.num_told
            assert len(session.kept().turns) == 1
        return pieces, num_told

    return asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("path", BODIES)
def test_pieces_come_as_they_are_sampled(path: str) -> None:
    engine = Telling("abcdef")
    pieces, num_told = streamed(engine, path)
    assert "".join(pieces) == "abcdef"
    assert len(pieces) > 1
    assert num_told < len(engine.tokens), "the first piece comes before the last token"


def test_what_a_later_token_may_change_is_held_back() -> None:
    pieces, _ = streamed(Telling("aOb Obs: x"), stop=["Obs:"])
    assert "".join(pieces) == "aOb "
    pieces, _ = streamed(Telling(f"so{CALL}"), tools=[ADD])
    assert pieces == ["so"], "what offers tools is told at once: a call is told from text at its end"


def test_half_a_character_is_not_told() -> None:
    session: Any = Session.__new__(Session)
    session._chat, session._parse_calls = episode(scripted()).chat, None
    whole = tokenizer().encode("é")
    asked: Any = type("Asked", (), {"tools": (), "stop": ()})
    texts = [session._told_so_far(type("C", (), {"asked": asked, "heard": whole[:count]})) for count in range(3)]
    assert "\ufffd" not in "".join(texts)


def over_sdk(engine: FakeEngine, play: Any) -> tuple[Any, Session]:
    openai = pytest.importorskip("openai")

    async def run() -> tuple[Any, Session]:
        session = Session(episode(engine))
        async with (
            opened(session) as address,
            openai.AsyncOpenAI(
                base_url=address.base_url, api_key=address.api_key, timeout=0.4, max_retries=0
            ) as client,
        ):
            stream = await client.chat.completions.create(model="m", messages=[user("1")], stream=True)
            return await play(stream), session

    return asyncio.run(asyncio.wait_for(run(), 60))


def test_a_client_that_waits_for_bytes_is_not_kept_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "SAYS_SOMETHING_WITHIN_S", 0.05)

    async def play(stream: Any) -> str:
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    said, session = over_sdk(FakeEngine(lambda _: letter_by_letter("hi"), delay_s=1.0), play)
    assert (said, len(session.kept().turns)) == ("hi", 1)


def test_an_engine_that_fails_within_a_stream_is_an_error_of_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    openai = pytest.importorskip("openai")
    monkeypatch.setattr(sessions, "SAYS_SOMETHING_WITHIN_S", 0.05)

    async def play(stream: Any) -> None:
        with pytest.raises(openai.APIError, match="the engine failed"):
            [chunk async for chunk in stream]

    _, session = over_sdk(FakeEngine(lambda _: EngineError("no luck"), delay_s=0.3), play)
    assert session.kept().turns == ()


def test_a_stream_that_is_refused_has_a_status_that_says_so() -> None:
    async def run() -> Any:
        session = Session(episode(scripted(), room=8))
        async with opened(session) as address, client_of(address) as client:
            for path, body in BODIES.items():
                refused = await client.post(path, json={**body, "stream": True})
                assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")

    asyncio.run(asyncio.wait_for(run(), 60))


def test_who_hangs_up_within_a_stream_has_it_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_REJOIN_WITHIN_S", 0.0)
    monkeypatch.setattr(sessions, "SAYS_SOMETHING_WITHIN_S", 0.02)

    async def run() -> Any:
        session = Session(episode(FakeEngine(drawn, delay_s=30.0)))
        async with opened(session) as address, client_of(address) as client:
            async with client.stream(
                "POST", "/chat/completions", json={**BODIES["/chat/completions"], "stream": True}
            ) as response:
                async for line in response.aiter_lines():
                    if line.startswith(":"):
                        break
            for _ in range(500):
                if session.kept().metrics["agent/cancelled"]:
                    return session.kept()
                await asyncio.sleep(0.01)
        return None

    kept = asyncio.run(asyncio.wait_for(run(), 60))
    assert kept is not None
    assert kept.turns == ()


async def raw(address: Address, request: bytes) -> bytes:
    host, port = address.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    said = await asyncio.wait_for(reader.read(-1), 20)
    writer.close()
    return said


def test_a_client_of_an_older_protocol_gets_no_chunks() -> None:
    async def run() -> tuple[bytes, bytes]:
        async with opened(Session(episode(scripted("5", "5")))) as address:
            body = json.dumps({**BODIES["/chat/completions"], "stream": True}).encode()
            path = address.session_url.partition(":")[2].partition(":")[2].partition("/")[2]
            head = f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
            old = await raw(address, f"POST /{path}/chat/completions HTTP/1.0\r\n".encode() + head)
            new = await raw(address, f"POST /{path}/chat/completions HTTP/1.1\r\n".encode() + head)
            return old, new

    old, new = asyncio.run(asyncio.wait_for(run(), 60))
    assert b"chunked" not in old
    assert old.endswith(b"data: [DONE]\n\n")
    assert b"Transfer-Encoding: chunked" in new
    assert new.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_who_reads_slowly_is_sent_no_more_than_is_read_and_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_WRITE_WITHIN_S", 0.3)
    made, closed = [0], [False]

    async def pieces() -> AsyncGenerator[str, None]:
        try:
            while True:
                made[0] += 1
                yield "x" * 100_000
                await asyncio.sleep(0)
        finally:
            closed[0] = True

    async def handle(request: http_server.HttpRequest) -> http_server.HttpAnswer:
        if request.path == "/small":
            return http_server.HttpAnswer(body="x")
        return http_server.HttpAnswer(pieces=pieces())

    async def run() -> None:
        server = http_server.HttpServer(handle)
        port = await server.start("127.0.0.1")
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1000)
        writer.write(b"GET /large HTTP/1.1\r\n\r\n")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20.0) as client:
            for _ in range(400):
                assert (await client.get("/small")).text == "x"
                if closed[0]:
                    break
                await asyncio.sleep(0.01)
        assert closed[0]
        assert made[0] < 500  # of what the sockets' buffers take
        server.close()
        writer.close()

    asyncio.run(asyncio.wait_for(run(), 60))


# Engines


def request(name: str, seed: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=name, prompt_token_ids=(5, 6, 7), sampling=SamplingParams(max_generate_length=6), seed=seed
    )


def test_the_hf_engine_tells_whoever_listens_and_nobody_else() -> None:
    engine = HFEngine(make_tiny_model(), make_tokenizer(), max_batch_size=8, weight_version=0)
    heard: list[list[int]] = [[], []]

    async def ask(index: int) -> GenerationOutput:
        with listening(heard[index].extend), engine.lease():
            return await engine.generate(request(f"r-{index}", index))

    async def run() -> list[GenerationOutput]:
        with engine.lease():
            alone = asyncio.ensure_future(engine.generate(request("alone", 9)))
            both = await asyncio.gather(ask(0), ask(1), alone)
            return list(both)

    try:
        outputs = asyncio.run(asyncio.wait_for(run(), 60))
    finally:
        engine.close()
    assert [tuple(tokens) for tokens in heard] == [output.token_ids for output in outputs[:2]]
    assert listener() is None


def test_nothing_is_told_that_the_journal_might_lose(tmp_path: Any) -> None:
    class Saying(FakeEngine):
        async def generate(self, request: GenerationRequest) -> GenerationOutput:
            assert listener() is None
            return await super().generate(request)

    async def run() -> None:
        with listening(print):
            await CheckedEngine(Saying(lambda _: [5]), vocabulary_size=99, journal=journal).generate(
                request("stream-0-000000-0000-000", 1)
            )
            assert listener() is print

    journal = Journal(tmp_path / "journal.jsonl", prompts="p")
    asyncio.run(asyncio.wait_for(run(), 60))
    journal.close()
