"""The HTTP engine against a stand-in for the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from skyrl_train.config.models import HTTPConfig
from skyrl_train.errors import DeadlineError, EngineError
from skyrl_train.inference.http import HTTPEngine
from skyrl_train.rollout import http as http_reply
from skyrl_train.runs.construction import sync_within_process
from skyrl_train.types import GenerationRequest, SamplingParams, StopReason
from skyrl_train.weights import stored_weights

REQUEST = GenerationRequest(
    request_id="r1", prompt_token_ids=(5, 6), sampling=SamplingParams(max_generate_length=4, top_k=7), seed=3
)
ANSWER = {"choices": [{"token_ids": [8, 2], "logprobs": {"token_logprobs": [-0.5, -1.0]}, "finish_reason": "stop"}]}
Handler = Callable[[httpx.Request], httpx.Response]


class Server:
    """Answers completions by `handler`, and control calls as vLLM does; remembers what it was asked."""

    def __init__(self, handler: Handler | None = None) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.version = "default"
        self._handler = handler or (lambda request: httpx.Response(200, json=ANSWER))

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        self.asked.append((request.url.path, body))
        if request.url.path == "/v1/completions":
            return self._handler(request)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "served"}]})
        if request.url.path == "/finish_weight_update":
            self.version = body["weight_version"]
        return httpx.Response(200, json={"weight_version": self.version})


def engine_for(server: Server, *, max_retries: int = 2) -> HTTPEngine:
    return HTTPEngine(
        HTTPConfig(url="http://server", max_retries=max_retries),
        stop_token_ids=(2,),
        timeout_s=5.0,
        transport=httpx.MockTransport(server),
        control_transport=httpx.MockTransport(server),
    )


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_reply, "_FIRST_PAUSE_S", 0.0)


def test_token_ids_go_in_and_come_out_with_their_log_probabilities() -> None:
    server = Server()
    output = asyncio.run(engine_for(server).generate(REQUEST))
    assert (output.token_ids, output.logprobs, output.stop_reason) == ((8, 2), (-0.5, -1.0), StopReason.STOP)
    body = server.asked[-1][1]
    assert (body["prompt"], body["seed"], body["top_k"], body["model"]) == ([5, 6], 3, 7, "served")
    assert body["stop_token_ids"] == [2]


def test_a_passing_error_is_tried_again_and_a_lasting_one_is_not() -> None:
    answers: Iterator[httpx.Response] = iter([httpx.Response(503), httpx.Response(200, json=ANSWER)])
    assert asyncio.run(engine_for(Server(lambda _: next(answers))).generate(REQUEST)).token_ids == (8, 2)
    server = Server(lambda _: httpx.Response(400, text="prompt too long"))
    with pytest.raises(EngineError, match="status 400: prompt too long"):
        asyncio.run(engine_for(server).generate(REQUEST))
    assert sum(path == "/v1/completions" for path, _ in server.asked) == 1


def test_retries_end() -> None:
    server = Server(lambda _: httpx.Response(503, text="busy"))
    with pytest.raises(EngineError, match="busy"):
        asyncio.run(engine_for(server, max_retries=2).generate(REQUEST))
    assert sum(path == "/v1/completions" for path, _ in server.asked) == 3


def test_a_server_that_hangs_is_a_deadline_with_a_name() -> None:
    def hang(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("slow", request=request)

    with pytest.raises(DeadlineError, match="request r1"):
        asyncio.run(engine_for(Server(hang)).generate(REQUEST))


def test_an_answer_without_token_ids_says_which_server_is_needed() -> None:
    server = Server(lambda _: httpx.Response(200, json={"choices": [{"text": "hi", "finish_reason": "stop"}]}))
    with pytest.raises(EngineError, match="return_token_ids"):
        asyncio.run(engine_for(server).generate(REQUEST))


def test_the_token_is_sent_and_a_refusal_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYRL_TRAIN_API_KEY", "secret")

    def guarded(request: httpx.Request) -> httpx.Response:
        allowed = request.headers.get("authorization") == "Bearer secret"
        return httpx.Response(200, json={"data": [{"id": "m"}]}) if allowed else httpx.Response(401)

    options = HTTPConfig(url="http://server")
    HTTPEngine(options, stop_token_ids=(), timeout_s=1.0, control_transport=httpx.MockTransport(guarded))
    monkeypatch.setenv("SKYRL_TRAIN_API_KEY", "wrong")
    with pytest.raises(EngineError, match="SKYRL_TRAIN_API_KEY"):
        HTTPEngine(options, stop_token_ids=(), timeout_s=1.0, control_transport=httpx.MockTransport(guarded))


def test_weights_go_as_files_between_pause_and_resume_and_the_version_is_confirmed(tmp_path: Path) -> None:
    server = Server()
    engine = engine_for(server)
    sync_within_process(engine, tmp_path).sync(stored_weights({"w": torch.ones(3)}), 4)
    paths = [path for path, _ in server.asked]
    assert paths[-8:] == [
        "/init_weight_transfer_engine",
        "/pause",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/reset_prefix_cache",
        "/weight_info",
        "/resume",
    ]
    assert server.asked[-5][1]["update_info"]["names"] == ["w"]
    assert engine.weight_version == 4
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_serves_another_version_is_not_resumed(tmp_path: Path) -> None:
    server = Server()
    engine = engine_for(server)
    monkey = server.__class__.__call__

    def forgetful(request: httpx.Request) -> httpx.Response:
        response = monkey(server, request)
        server.version = "default"
        return response

    engine._control = httpx.Client(base_url="http://server", transport=httpx.MockTransport(forgetful))
    with pytest.raises(EngineError, match="serves weights 'default' and not those of version 4"):
        sync_within_process(engine, tmp_path).sync(stored_weights({"w": torch.ones(3)}), 4)
    assert server.asked[-1][0] == "/weight_info"


@pytest.mark.parametrize("dies", [True, False], ids=["over a request", "while idle"])
def test_a_server_that_was_started_anew_is_not_taken_for_the_one_that_has_the_weights(
    tmp_path: Path, dies: bool
) -> None:
    server = Server()
    engine = engine_for(server)
    sync_within_process(engine, tmp_path).sync(stored_weights({"w": torch.ones(3)}), 4)

    async def ask_twice() -> None:
        await engine.generate(REQUEST)

        def restarted(request: httpx.Request) -> httpx.Response:
            server.version, server._handler = "default", lambda _: httpx.Response(200, json=ANSWER)
            raise httpx.ReadError("reset", request=request)

        if dies:
            server._handler = restarted
        else:
            server.version = "default"
        await engine.generate(REQUEST)

    with pytest.raises(EngineError, match=r"'default' and not those of version 4.*started again"):
        asyncio.run(ask_twice())


def test_weights_are_confirmed_once_for_requests_that_run_together(tmp_path: Path) -> None:
    server = Server()
    engine = engine_for(server)
    sync_within_process(engine, tmp_path).sync(stored_weights({"w": torch.ones(3)}), 4)
    asked = len(server.asked)

    async def takes_a_moment(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0.01)
        return server(request)

    engine._client = httpx.AsyncClient(base_url="http://server", transport=httpx.MockTransport(takes_a_moment))

    async def together() -> None:
        await asyncio.gather(*(engine.generate(REQUEST) for _ in range(5)))
        await asyncio.gather(*(engine.generate(REQUEST) for _ in range(5)))

    asyncio.run(together())
    assert [path for path, _ in server.asked[asked:]].count("/weight_info") == 1
