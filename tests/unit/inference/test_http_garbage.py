"""The HTTP engine against a real local server that sends what no server should: every outcome is an error with a reason."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from skyrl_train.config.models import HTTPConfig
from skyrl_train.errors import DeadlineError, EngineError
from skyrl_train.inference import http
from skyrl_train.inference.http import HTTPEngine
from skyrl_train.rollout import http as http_reply
from skyrl_train.types import GenerationRequest, SamplingParams

REQUEST = GenerationRequest(
    request_id="r1", prompt_token_ids=(5, 6), sampling=SamplingParams(max_generate_length=4), seed=3
)


def answer(**changes: Any) -> bytes:
    choice = {"token_ids": [8, 2], "logprobs": {"token_logprobs": [-0.5, -1.0]}, "finish_reason": "stop"}
    return json.dumps({"choices": [{**choice, **changes}]}).encode()


def reply(body: bytes, *, status: str = "200 OK", headers: str = "", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\n{headers}Connection: close\r\n\r\n".encode() + body


class RawServer:
    """Sends `sends` to whoever asks, a byte every `pause_s` where that is above 0, and closes the connection."""

    def __init__(self) -> None:
        self.sends, self.pause_s, self.num_asked, self.num_sent = b"", 0.0, 0, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            self.num_asked += 1
            try:
                connection.recv(1 << 16)
                step = 1 if self.pause_s else 1 << 16
                for start in range(0, len(self.sends), step):
                    connection.sendall(self.sends[start : start + step])
                    self.num_sent += step
                    time.sleep(self.pause_s)
            except OSError:
                return


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RawServer]:
    monkeypatch.setattr(http_reply, "_FIRST_PAUSE_S", 0.0)
    made = RawServer()
    yield made
    made.close()


def ask(server: RawServer, *, timeout_s: float = 10.0, max_retries: int = 1) -> None:
    options = HTTPConfig(url=server.url, model="served", max_retries=max_retries)
    engine = HTTPEngine(options, stop_token_ids=(2,), timeout_s=timeout_s, vocabulary_size=300)
    asyncio.run(engine.generate(REQUEST))


CLOSED = "RemoteProtocolError|ReadError"
"""The second where a part of the request was not read by then."""
BAD: dict[str, tuple[bytes, str, int]] = {
    "a page of a proxy": (reply(b"<html><body>busy</body></html>"), "not valid JSON .*begins with '<html>", 2),
    "bytes that are no UTF-8": (reply(b'{"choices": "\xff\xfe\xfa"}'), "not UTF-8 text", 2),
    "closed within the body": (reply(answer(), length=4000), CLOSED, 2),
    "closed at once": (b"", CLOSED, 2),
    "no HTTP at all": (b"220 mail.example ESMTP\r\n", CLOSED, 2),
    "deep JSON": (reply(b"[" * 100_000), "nested too deeply", 2),
    "an integer of 5,000 digits": (reply(b'{"choices": ' + b"9" * 5000 + b"}"), "more than 4300 digits", 2),
    "an error that is no text": (reply(b"\xff\xfe", status="400 Bad Request"), "status 400", 1),
    "a negative id": (reply(answer(token_ids=[8, -2])), "token id -2", 1),
    "an id past the vocabulary": (reply(answer(token_ids=[8, 300])), "must be from 0 to 299", 1),
    "a fraction": (reply(answer(token_ids=[8, 3.7])), "token id 3.7", 1),
    "a text for an id": (reply(answer(token_ids=["7", 2])), "token id '7'", 1),
    "true for an id": (reply(answer(token_ids=[True, 2])), "token id True", 1),
    "a positive log-probability": (reply(answer(logprobs={"token_logprobs": [5, -1.0]})), "5.0.*at most 0", 1),
    "more tokens than asked for": (reply(answer(token_ids=[8] * 5000)), "5000 tokens, and 4 were asked for", 1),
    "a list for a reason": (reply(answer(finish_reason=[])), "aborted", 1),
    "compressed": (
        reply(gzip.compress(bytes(10_000_000)), headers="Content-Encoding: gzip\r\n"),
        r"compressed \(gzip\), which is refused",
        1,
    ),
}


@pytest.mark.parametrize(("sends", "message", "num_asked"), BAD.values(), ids=BAD)
def test_what_is_no_answer_is_an_engine_error_with_the_reason(
    server: RawServer, sends: bytes, message: str, num_asked: int
) -> None:
    server.sends = sends
    with pytest.raises(EngineError, match=message):
        ask(server)
    assert server.num_asked == num_asked, "what may pass is asked for again, what the seed makes again is not"


def test_a_body_without_end_is_not_read_to_its_end(server: RawServer) -> None:
    server.sends = reply(b" " * 60_000_000)
    with pytest.raises(EngineError, match=r"more than .* bytes"):
        ask(server)
    assert server.num_sent < 30_000_000


def test_a_server_that_sends_a_byte_now_and_then_has_no_more_time_than_a_silent_one(server: RawServer) -> None:
    server.sends, server.pause_s = reply(answer()), 0.2
    began = time.monotonic()
    with pytest.raises(DeadlineError, match="request r1"):
        ask(server, timeout_s=1.0)
    assert time.monotonic() - began < 8.0


MODELS = [
    b"{}",
    b"[]",
    b'{"data": []}',
    b'{"data": [{}]}',
    b'{"data": [{"id": 7}]}',
    b'{"data": [{"id": ""}]}',
    b"null",
]
MODELS += [b'{"data": [{"id": "\\ud800"}]}', b"<html>", b"\xff", b"[" * 100_000, b'{"data": {"0": {"id": "a"}}}']


@pytest.mark.parametrize("body", MODELS, ids=lambda body: body[:20].decode(errors="replace"))
def test_an_odd_list_of_models_is_an_engine_error_that_names_the_address(server: RawServer, body: bytes) -> None:
    server.sends = reply(body)
    with pytest.raises(EngineError, match=rf"{server.url}/v1/models.*Is it vLLM's server"):
        HTTPEngine(HTTPConfig(url=server.url), stop_token_ids=(), timeout_s=10.0)


def test_a_list_of_models_that_comes_byte_by_byte_is_given_up(
    server: RawServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "CONNECT_TIMEOUT_S", 0.5)
    server.sends, server.pause_s = reply(b'{"data": [{"id": "a"}]}'), 0.2
    with pytest.raises(DeadlineError, match="/v1/models"):
        HTTPEngine(HTTPConfig(url=server.url), stop_token_ids=(), timeout_s=0.5)
