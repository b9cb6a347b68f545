"""What programs are told over HTTP: answers, streams, refusals; and that no session sees another."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import random
import re
from typing import Any

import httpx
import pytest

from skyrl_train.rollout.agents import http_server, session as sessions
from skyrl_train.rollout.agents.endpoint import Address, opened
from skyrl_train.rollout.agents.session import Session
from tests.support.agent_cases import (
    ADD,
    CALL,
    client_of,
    drawn,
    episode,
    letter_by_letter,
    over_http,
    scripted,
    trajectory_of,
    user,
)
from tests.support.fakes import FakeEngine


async def post(client: httpx.AsyncClient, *messages: dict[str, Any], **body: Any) -> Any:
    response = await client.post("/chat/completions", json={"model": "any", "messages": list(messages), **body})
    response.raise_for_status()
    return response.json()


def test_a_conversation_is_answered_as_openai_words_it() -> None:
    async def play(client: httpx.AsyncClient, session: Session) -> Any:
        first = await post(client, user("1"), tools=[ADD])
        said = first["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "5"}
        second = await post(client, user("1"), said, result, tools=[ADD])
        return first, second, trajectory_of(session)

    first, second, trajectory = over_http(play, scripted(CALL, "5"))
    (choice,) = first["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    function = choice["message"]["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("add", {"a": 2, "b": 3})
    assert second["choices"][0]["message"] == {"role": "assistant", "content": "5", "refusal": None}
    assert second["choices"][0]["finish_reason"] == "stop"
    prompt, response = len(trajectory.prompt_token_ids(1)), len(trajectory.turns[1].response_token_ids)
    assert second["usage"] == {
        "prompt_tokens": prompt, "completion_tokens": response, "total_tokens": prompt + response
    }  # fmt: skip
    assert (first["object"], first["model"], second["id"]) == ("chat.completion", "any", "chatcmpl-00000001")
    assert [turn.parent for turn in trajectory.turns] == [None, 0]


def test_a_stream_says_the_same_in_pieces() -> None:
    async def play(client: httpx.AsyncClient, _: Session) -> Any:
        body = {"messages": [user("1")], "tools": [ADD], "stream": True, "stream_options": {"include_usage": True}}
        response = await client.post("/chat/completions", json=body)
        assert response.headers["content-type"] == "text/event-stream"
        return [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]

    *chunks, end = over_http(play, scripted(f"so{CALL}"))
    assert end == "[DONE]"
    begun, said, called, last, usage = map(json.loads, chunks)
    assert begun["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert said["choices"][0]["delta"] == {"content": "so"}
    assert called["choices"][0]["delta"]["tool_calls"][0]["function"]["name"] == "add"
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    assert usage["usage"]["completion_tokens"] > 0


def test_models_are_listed() -> None:
    async def play(client: httpx.AsyncClient, _: Session) -> Any:
        return (await client.get("/models")).json()["data"], (await client.get("/models/policy")).json()

    models, model = over_http(play, scripted())
    assert [each["id"] for each in models] == [model["id"]] == ["policy"]


def test_the_openai_sdk_asks_and_asks_again() -> None:
    openai = pytest.importorskip("openai")

    async def run() -> Any:
        session = Session(episode(FakeEngine(lambda _: letter_by_letter("hi"), delay_s=0.6)))
        async with opened(session) as address:
            client = openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key, timeout=0.5, max_retries=4)
            answer = await client.chat.completions.create(model="m", messages=[user("1")])
            stream = await client.with_options(timeout=20).chat.completions.create(
                model="m", messages=[user("2")], stream=True
            )
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            listed = [model.id async for model in client.models.list()]
            with pytest.raises(openai.BadRequestError, match="must be 1"):
                await client.chat.completions.create(model="m", messages=[user("2")], n=2)
            with pytest.raises(openai.AuthenticationError):
                await client.with_options(api_key="other").models.list()
            await client.close()
        return answer.choices[0].message.content, text, listed, session.kept()

    answer, text, listed, kept = asyncio.run(asyncio.wait_for(run(), 60))
    assert (answer, text, listed) == ("hi", "hi", ["policy"])
    assert len(kept.turns) == 2
    assert kept.metrics["agent/repeated"] >= 1


BAD_BODIES: list[tuple[Any, str]] = [
    ({}, "messages: must be a list"),
    ({"messages": []}, "messages: must be a list"),
    ({"messages": "hi"}, "messages: must be a list"),
    ({"messages": ["hi"]}, r"messages\[0\]: must be a mapping"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "role is one of"),
    ({"messages": [{"role": ["user"], "content": "hi"}]}, "role is one of"),
    ({"messages": [{"role": "user", "content": 5}]}, "a part that is no text"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "a part that is no text"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
    ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "tool_calls: must be a list"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, r"tool_calls\[0\]: must be"),
    ({"messages": [user("1")], "n": 2}, "n: must be 1"),
    ({"messages": [user("1")], "tools": {}}, "tools: must be a list"),
    ({"messages": [user("1")], "tools": [{"type": "web_search"}]}, r"tools\[0\]: must be"),
    ({"messages": [user("1")], "max_tokens": 0}, "max_tokens: must be a whole number"),
    ({"messages": [user("1")], "max_completion_tokens": True}, "max_tokens: must be a whole number"),
    ({"messages": [user("1")], "stop": [5]}, "stop: must be a text"),
    ({"messages": [user("1")], "stop": 5}, "stop: must be a text"),
    ({"messages": [user("1")], "model": 5}, "model: must be a text"),
    ([], "must be a JSON object"),
    (b"{", "not valid JSON"),
    (b"\xff", "not UTF-8"),
    (b"[" * 100_000, "nested too deeply"),
]


@pytest.mark.parametrize(("body", "message"), BAD_BODIES)
def test_what_cannot_be_answered_is_refused_with_its_reason(body: Any, message: str) -> None:
    async def play(client: httpx.AsyncClient, session: Session) -> Any:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await client.post("/chat/completions", content=content)
        assert session.kept().turns == ()
        return response

    response = over_http(play, scripted())
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert re.search(message, response.json()["error"]["message"])


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/chat/completions", 405), ("POST", "/models", 405), ("POST", "/embeddings", 404), ("GET", "/../x", 404)],
)
def test_other_paths_and_methods_are_refused(method: str, path: str, status: int) -> None:
    async def play(client: httpx.AsyncClient, _: Session) -> int:
        return (await client.request(method, path)).status_code

    assert over_http(play, scripted()) == status


async def raw(address: Address, *pieces: bytes) -> bytes:
    """What the server writes until it hangs up."""
    host, port = address.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await asyncio.wait_for(reader.read(-1), 20)
    return b""


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"hello\r\n\r\n", 400),
        (b"GET /v1/models HTTP/2\r\n\r\n", 400),
        (b"GET v1 HTTP/1.1\r\n\r\n", 400),
        (b"GET /v1/models HTTP/1.1\r\nno header\r\n\r\n", 400),
        (b"GET /v1/models HTTP/1.1\r\nbad name: x\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 411),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000 + b"\r\n\r\n", 431),
        (b"GET /v1/models HTTP/1.0\r\n\r\n", 401),
    ],
)
def test_what_is_no_request_is_told_so_and_hung_up_on(request_bytes: bytes, status: int) -> None:
    async def run() -> bytes:
        async with opened(Session(episode(scripted()))) as address:
            return await raw(address, request_bytes)

    said = asyncio.run(asyncio.wait_for(run(), 30))
    assert said.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"Connection: close" in said


def test_a_key_opens_its_own_session_alone_and_nothing_once_that_is_over() -> None:
    async def run() -> None:
        one, other = (Session(episode(scripted(said))) for said in ("mine", "yours"))
        async with opened(other) as theirs:
            async with opened(one) as ours:
                assert ours.base_url == theirs.base_url
                async with client_of(ours) as client:
                    assert (await post(client, user("1")))["choices"][0]["message"]["content"] == "mine"
            async with client_of(ours) as client:
                for headers in ({}, {"Authorization": "Bearer x"}, {"x-api-key": "no"}, {"Authorization": "Basic x"}):
                    body = {"messages": [user("1")]}
                    refused = await client.post("/chat/completions", json=body, headers=headers)
                    assert refused.status_code == 401
            async with httpx.AsyncClient(base_url=theirs.base_url, headers={"x-api-key": theirs.api_key}) as client:
                assert (await post(client, user("1")))["choices"][0]["message"]["content"] == "yours"
        assert [turn.response_text for turn in one.kept().turns] == ["mine"]
        assert [turn.response_text for turn in other.kept().turns] == ["yours"]
        async with client_of(theirs) as client:
            with pytest.raises(httpx.TransportError):  # the last session is over: nobody listens
                await client.get("/models")

    asyncio.run(asyncio.wait_for(run(), 60))


def test_an_address_with_a_key_in_it_needs_no_other_and_opens_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        one, other = (Session(episode(scripted(said))) for said in ("mine", "yours"))
        async with opened(one) as ours, opened(other) as theirs, httpx.AsyncClient(timeout=20) as client:
            assert ours.session_url == ours.base_url.replace("/v1", f"/s/{ours.api_key}/v1")
            headers = {"Authorization": f"Bearer {theirs.api_key}"}  # the address tells the session
            answer = await client.post(
                f"{ours.session_url}/chat/completions", json={"messages": [user("1")]}, headers=headers
            )
            assert answer.json()["choices"][0]["message"]["content"] == "mine"
            assert (await client.get(f"{ours.session_url}/models")).status_code == 200
            assert (await client.get(f"{ours.session_url}/none")).status_code == 404
            wrong = await client.put(f"{ours.session_url}/models")
            assert (wrong.status_code, ours.api_key in wrong.text) == (405, False)
            start = theirs.base_url.removesuffix("/v1")
            for path in ("/s/x/v1", "/s//v1", f"/s/{theirs.api_key[:-1]}/v1", "/s", f"/s/{theirs.api_key}x/v1"):
                refused = await client.post(f"{start}{path}/chat/completions", json={"messages": [user("1")]})
                assert refused.status_code == 401
                assert theirs.api_key not in refused.text
        async with opened(other) as theirs, httpx.AsyncClient(timeout=20) as client:
            address = theirs.session_url.replace(theirs.api_key, ours.api_key)
            assert (await client.get(f"{address}/models")).status_code == 401  # that session is over
        assert (len(one.kept().turns), len(other.kept().turns)) == (1, 0)

    asyncio.run(asyncio.wait_for(run(), 60))
    assert caplog.messages == []


def test_a_secret_address_is_not_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        session = Session(episode(scripted()))
        monkeypatch.setattr(session, "ask", None)
        async with opened(session) as address, httpx.AsyncClient(timeout=20) as client:
            answer = await client.post(f"{address.session_url}/chat/completions", json={"messages": [user("1")]})
        assert answer.status_code == 500
        assert "the answer to a POST broke" in caplog.text
        assert address.api_key not in caplog.text + answer.text

    asyncio.run(asyncio.wait_for(run(), 60))


def test_who_hangs_up_has_the_request_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_REJOIN_WITHIN_S", 0.0)

    async def play(client: httpx.AsyncClient, session: Session) -> Any:
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/chat/completions", json={"messages": [user("1")]}, timeout=0.3)
        while not session.kept().metrics["agent/cancelled"]:
            await asyncio.sleep(0.01)
        engine._delay_s = 0.0
        await post(client, user("2"))
        return session.kept()

    engine = FakeEngine(drawn, delay_s=30.0)
    kept = over_http(play, engine)
    assert len(kept.turns) == 1
    assert kept.metrics["agent/cancelled"] == 1


def test_who_does_not_read_is_hung_up_on_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_WRITE_WITHIN_S", 0.2)

    async def run() -> None:
        server = http_server.HttpServer(handle)
        host, port = "127.0.0.1", await server.start("127.0.0.1")
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET /large HTTP/1.1\r\n\r\n")
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=20.0) as client:
            assert (await client.get("/small")).text == "x"
            await asyncio.sleep(0.5)
            assert (await client.get("/small")).text == "x"
        assert len(await reader.read(-1)) < 50_000_000  # the rest is not kept
        server.close()
        writer.close()

    async def handle(request: http_server.HttpRequest) -> http_server.HttpAnswer:
        return http_server.HttpAnswer(body="x" * (1 if request.path == "/small" else 50_000_000))

    asyncio.run(asyncio.wait_for(run(), 60))


def test_requests_of_one_connection_that_come_at_once_are_answered_in_order() -> None:
    async def run() -> bytes:
        async with opened(Session(episode(scripted()))) as address:
            line = f"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer {address.api_key}\r\n".encode()
            return await raw(address, (line + b"\r\n") * 2 + line + b"Connection: close\r\n\r\n")

    assert asyncio.run(asyncio.wait_for(run(), 30)).count(b"HTTP/1.1 200 OK") == 3


# Whatever comes, it is answered or refused, and nobody else notices


OTHERS: list[tuple[str, Any]] = [
    ("/responses", {
        "instructions": "s",
        "input": [
            user("1"),
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
            {"type": "function_call", "call_id": "a", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "a", "output": "2"},
        ],
        "tools": [{"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}}],
        "max_output_tokens": 5,
    }),
    ("/messages", {
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            user("1"),
            {"role": "assistant", "content": [
                {"type": "text", "text": "a"}, {"type": "tool_use", "id": "a", "name": "add", "input": {"a": 1}}
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "2"}]},
        ],
        "tools": [{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}],
        "max_tokens": 5,
        "stop_sequences": ["x"],
    }),
]  # fmt: skip


def mutated(draw: random.Random) -> tuple[str, bytes]:
    """Path and body of a request, with something changed in it: a value of another kind, a field that is gone, bytes."""
    body: Any = {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s"},
            user("1"),
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
            ]},
            {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "2"}]},
        ],
        "tools": [copy.deepcopy(ADD)],
        "stop": ["x"],
        "max_tokens": 5,
        "temperature": 0,
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "response_format": {"type": "text"},
        "stream": draw.random() < 0.2,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    path = "/chat/completions"
    if draw.random() < 0.5:
        path, body = copy.deepcopy(draw.choice(OTHERS))
        body["stream"] = draw.random() < 0.2
    strange = [
        None,
        None,
        True,
        -1,
        1.5,
        10**400,
        "",
        "\ud800",
        "x" * 1000,
        [],
        {},
        [[]],
        {"role": "user"},
        float("nan"),
        "{a}",
    ]
    for _ in range(draw.randint(1, 3)):
        place = body
        while True:
            key = draw.choice(list(place) if isinstance(place, dict) else range(len(place)))
            inner = place[key]
            if not isinstance(inner, (dict, list)) or not inner or draw.random() < 0.3:
                break
            place = inner
        if draw.random() < 0.2:
            del place[key]
        else:
            place[key] = copy.deepcopy(draw.choice(strange))  # one value in two places might come to contain itself
        if not body or not isinstance(body, dict):
            break
    data = bytearray(json.dumps(body).encode())
    if draw.random() < 0.2:
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
    return path, bytes(data[: draw.randrange(len(data))] if draw.random() < 0.1 else data)


def fuzz(count: int, seed: int) -> None:
    draw = random.Random(seed)

    async def run() -> None:
        fuzzed, quiet = (Session(episode(FakeEngine(drawn))) for _ in range(2))
        async with contextlib.AsyncExitStack() as stack:
            address, other = [await stack.enter_async_context(opened(each)) for each in (fuzzed, quiet)]
            client, bystander = [await stack.enter_async_context(client_of(each)) for each in (address, other)]
            good = 0
            for number in range(count):
                headers = {"Idempotency-Key": draw.choice(["a", "\x01", "k" * 99])} if draw.random() < 0.1 else {}
                path, content = mutated(draw)
                start = draw.choice(["", address.session_url])
                if draw.random() < 0.05:  # a key that is none, in the address
                    wrong = address.session_url[: -draw.randint(4, 30)] + draw.choice(["/v1", "x/v1"])
                    assert (await client.post(f"{wrong}{path}", content=content)).status_code == 401
                response = await client.post(f"{start}{path}", content=content, headers=headers)
                assert response.status_code in (200, 400, 409), response.text
                good += response.status_code == 200
                if number % 50 == 0:
                    await raw(address, draw.randbytes(200) + b"\r\n\r\n")
                    await post(bystander, user(str(number)))
            assert (await client.get("/models")).status_code == 200
        kept = fuzzed.kept()
        assert 0 < len(kept.turns) == good - kept.metrics["agent/repeated"]
        assert len(quiet.kept().turns) == (count + 49) // 50

    asyncio.run(asyncio.wait_for(run(), 600))


def test_fuzzed_requests_are_answered_or_refused() -> None:
    fuzz(150, 0)


@pytest.mark.nightly
@pytest.mark.slow
def test_five_thousand_fuzzed_requests_are_answered_or_refused() -> None:
    for seed in range(1, 11):
        fuzz(500, seed)
