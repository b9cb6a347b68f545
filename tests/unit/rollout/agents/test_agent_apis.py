"""The endpoint speaks `/v1/responses` and `/v1/messages` as well: the same conversation, the same tokens."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import pytest

from skyrl_train.rollout.agents import wires
from skyrl_train.rollout.agents.endpoint import opened
from skyrl_train.rollout.agents.session import Session
from tests.support.agent_cases import CALL, client_of, episode, over_http, scripted, user


def test_responses_are_answered_and_go_on_as_sampled() -> None:
    openai = pytest.importorskip("openai")
    tool = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}

    async def run() -> Any:
        session = Session(episode(scripted(f"so{CALL}{CALL}", "5", "6")))
        async with opened(session) as address:
            client = openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key, timeout=20)
            said = {"model": "m", "instructions": "Add.", "tools": [tool]}
            items: list[Any] = [user("1")]
            first = await client.responses.create(input=items, **said)
            calls = [item for item in first.output if item.type == "function_call"]
            assert [json.loads(call.arguments) for call in calls] == [{"a": 2, "b": 3}] * 2
            items += first.output
            items += [{"type": "function_call_output", "call_id": call.call_id, "output": "5"} for call in calls]
            async with client.responses.stream(input=items, **said) as stream:
                kinds = [event.type async for event in stream]
                second = await stream.get_final_response()
            items += [*second.output, user("2")]
            third = await client.responses.create(input=items, **said)
            with pytest.raises(openai.BadRequestError, match="previous_response_id: nothing is kept"):
                await client.responses.create(model="m", input="1", previous_response_id=first.id)
            await client.close()
            return first, second, kinds, third, session.kept()

    first, second, kinds, third, kept = asyncio.run(asyncio.wait_for(run(), 60))
    assert (first.output_text, second.output_text, third.output_text) == ("so", "5", "6")
    assert second.usage.output_tokens == len(kept.turns[1].response_token_ids)
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert [turn.parent for turn in kept.turns] == [None, 0, 1]
    assert {name: value for name, value in kept.metrics.items() if value} == {"agent/turns": 3, "agent/roots": 1}


def test_calls_are_streamed_as_responses_too() -> None:
    async def play(client: httpx.AsyncClient, _: Session) -> Any:
        tool = {"type": "function", "name": "add"}
        return (await client.post("/responses", json={"input": "1", "tools": [tool], "stream": True})).text

    events = [json.loads(line[6:]) for line in over_http(play, scripted(CALL)).splitlines() if line[:6] == "data: "]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    (done,) = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert (done["name"], json.loads(done["arguments"])) == ("add", {"a": 2, "b": 3})


def test_messages_are_answered_and_go_on_as_sampled() -> None:
    tool = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}

    async def play(client: httpx.AsyncClient, session: Session) -> Any:
        async def ask(messages: list[Any], **body: Any) -> httpx.Response:
            told = {"model": "m", "max_tokens": 400, "system": "Add.", "messages": messages, "tools": [tool], **body}
            answer = await client.post("/messages", json=told)
            answer.raise_for_status()
            return answer

        messages: list[Any] = [user("1")]
        first = (await ask(messages)).json()
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "5"}]}
            for block in first["content"]
            if block["type"] == "tool_use"
        ]
        messages += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": results}]
        text = (await ask(messages, stream=True)).text
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
        said = [{"type": "text", "text": "".join(each["delta"].get("text", "") for each in events if "delta" in each)}]
        messages += [{"role": "assistant", "content": said}, user("2")]
        third = (await ask(messages, stop_sequences=["!"])).json()
        return first, events, third, session.kept()

    first, events, third, kept = over_http(play, scripted(f"so{CALL}{CALL}", "5", "6!"))
    assert [block["type"] for block in first["content"]] == ["text", "tool_use", "tool_use"]
    assert (first["content"][1]["input"], first["stop_reason"]) == ({"a": 2, "b": 3}, "tool_use")
    assert [event["type"] for event in events] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop"
    ]  # fmt: skip
    assert events[-2]["delta"]["stop_reason"] == "end_turn"
    assert third["content"] == [{"type": "text", "text": "6"}]
    assert third["usage"]["output_tokens"] == len(kept.turns[2].response_token_ids)
    assert [turn.parent for turn in kept.turns] == [None, 0, 1]
    assert {name: value for name, value in kept.metrics.items() if value} == {"agent/turns": 3, "agent/roots": 1}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/responses", {}, "input: must be a text or a list"),
        ("/responses", {"input": [5]}, r"input\[0\]: must be a message"),
        ("/responses", {"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\]: must be a message"),
        ("/responses", {"input": [{"type": "function_call", "name": 5}]}, r"tool_calls\[0\]: must be"),
        ("/responses", {"input": "1", "tools": [{"type": "web_search"}]}, r"tools\[0\]: must be"),
        ("/responses", {"input": "1", "max_output_tokens": "x"}, "max_output_tokens: must be"),
        ("/messages", {}, "messages: must be a list"),
        ("/messages", {"messages": [5]}, r"messages\[0\]: must be a mapping"),
        ("/messages", {"messages": [{"role": "user", "content": 5}]}, "must have a text, or a list of blocks"),
        ("/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a part that is no text"),
        ("/messages", {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "calls the assistant's"),
        ("/messages", {"messages": [user("1")], "tools": [{"type": "bash_20250124", "name": "bash"}]}, r"tools\[0\]"),
        ("/messages", {"messages": [user("1")], "max_tokens": 0}, "max_tokens: must be"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_its_reason(path: str, body: Any, message: str) -> None:
    async def play(client: httpx.AsyncClient, _: Session) -> httpx.Response:
        return await client.post(path, json=body)

    response = over_http(play, scripted())
    assert (response.status_code, response.json()["type"]) == (400, "error")
    assert re.search(message, response.json()["error"]["message"])


def test_an_answer_that_was_cut_says_so_in_each_api() -> None:
    async def play(client: httpx.AsyncClient, _: Session) -> Any:
        chat = await client.post("/chat/completions", json={"messages": [user("1")]})
        responses = await client.post("/responses", json={"input": "1"})
        messages = await client.post("/messages", json={"messages": [user("1")]})
        return chat.json(), responses.json(), messages.json()

    from skyrl_train.types import StopReason
    from tests.support.fakes import FakeEngine, make_output

    chat, responses, messages = over_http(play, FakeEngine(lambda _: make_output([5], stop_reason=StopReason.LENGTH)))
    assert chat["choices"][0]["finish_reason"] == "length"
    assert (responses["status"], responses["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert messages["stop_reason"] == "max_tokens"


# What is asked for and not done


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        ("/chat/completions", {"messages": [user("1")], "temperature": 0, "seed": 5}, {"temperature", "seed"}),
        ("/chat/completions", {"messages": [user("1")], "tool_choice": "required"}, {"tool_choice"}),
        (
            "/chat/completions",
            {"messages": [user("1")], "response_format": {"type": "json_object"}},
            {"response_format"},
        ),
        ("/responses", {"input": "1", "text": {"format": {"type": "json_schema"}}, "top_p": 0.5}, {"text", "top_p"}),
        ("/messages", {"messages": [user("1")], "tool_choice": {"type": "any"}, "top_k": 5}, {"tool_choice", "top_k"}),
        (
            "/chat/completions",
            {
                "messages": [user("1")],
                "temperature": 1,
                "top_p": 1.0,
                "top_k": -1,
                "tool_choice": "auto",
                "response_format": {"type": "text"},
                "logit_bias": {},
                "logprobs": False,
                "seed": None,
                "max_tokens": 9,
                "stop": "x",
                "user": "me",
            },
            set(),
        ),
    ],
)
def test_what_the_trainer_decides_is_counted_by_name_or_refused(path: str, body: Any, names: set[str]) -> None:
    async def run(*, refuses: bool) -> tuple[httpx.Response, dict[str, float]]:
        session = Session(episode(scripted("5")), refuses_unsupported=refuses)
        async with opened(session) as address, client_of(address) as client:
            response = await client.post(path, json=body)
        counts = {name: count for name, count in session.kept().metrics.items() if "ignored" in name}
        return response, counts

    answered, counted = asyncio.run(asyncio.wait_for(run(refuses=False), 30))
    assert (answered.status_code, counted) == (200, {f"agent/ignored/{name}": 1.0 for name in names})
    refused, counted = asyncio.run(asyncio.wait_for(run(refuses=True), 30))
    assert (refused.status_code, counted) == (400 if names else 200, {})
    if names:
        error = refused.json()["error"]
        assert error["code"] == "unsupported_parameter"
        assert error["param"] in names
        assert "generator.agent_loop.unsupported=ignore" in error["message"]


def test_what_is_not_done_is_told_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wires, "_TOLD", set())

    async def play(client: httpx.AsyncClient, session: Session) -> None:
        for text in "ab":
            await client.post("/chat/completions", json={"messages": [user(text)], "temperature": 0})
        assert session.kept().metrics["agent/ignored/temperature"] == 2

    over_http(play, scripted("5", "6"))
    (told,) = caplog.messages
    assert told.startswith(
        "an agent asks for temperature=0: it is 1 here, as answers are trained on as generator.sampling"
    )
