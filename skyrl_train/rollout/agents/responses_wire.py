"""OpenAI's `/v1/responses`, without what a server would keep: each request brings the whole conversation."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Generator, Mapping
from typing import Any

from skyrl_train.rollout.agents.chat_wire import (
    Answered,
    Asked,
    arguments_text,
    message_of,
    positive,
    read_tools,
    refused,
    rest_of,
    text_of,
)
from skyrl_train.types import ChatMessage


def read_response(body: Mapping[str, Any]) -> Asked:
    """Return what a request asks. Raises RequestError naming the parameter that is wrong."""
    for name in ("previous_response_id", "conversation"):
        if body.get(name) is not None:
            raise refused(name, "nothing is kept from request to request; send the whole conversation as input")
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise refused("input", "must be a text or a list with at least one item")
    instructions = text_of(body.get("instructions"), "instructions")
    messages: list[ChatMessage] = [{"role": "system", "content": instructions}] if instructions else []
    for index, item in enumerate(items):
        _add(messages, item, f"input[{index}]")
    tools = body.get("tools")
    if isinstance(tools, list):  # a function's name and parameters stand beside its type here
        inner = [
            {"type": each.get("type"), "function": _without_type(each)} for each in tools if isinstance(each, dict)
        ]
        tools = inner if len(inner) == len(tools) else [None]
    return Asked(
        messages=tuple(messages),
        tools=read_tools(tools, body.get("tool_choice")),
        max_tokens=positive(body.get("max_output_tokens"), "max_output_tokens"),
    )


def _without_type(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in tool.items() if name not in ("type", "strict")}


def _add(messages: list[ChatMessage], item: object, where: str) -> None:
    """Add an item to the conversation: calls belong to the message before them. Raises RequestError."""
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if not isinstance(item, Mapping) or kind not in ("message", "function_call", "function_call_output"):
        raise refused(where, "must be a message, a function_call or a function_call_output")
    if kind == "function_call":
        call = {"id": item.get("call_id"), "function": {key: item.get(key) for key in ("name", "arguments")}}
        follows = bool(messages) and messages[-1]["role"] == "assistant"
        before = messages.pop() if follows else {"role": "assistant", "content": ""}
        (read,) = message_of({"role": "assistant", "tool_calls": [call]}, where)["tool_calls"]
        messages.append({**before, "tool_calls": [*before.get("tool_calls", ()), read]})
    elif kind == "function_call_output":
        said = {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
        messages.append(message_of(said, where))
    else:
        messages.append(message_of({"role": item.get("role"), "content": item.get("content")}, where))


def response(answered: Answered, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer as `/v1/responses` words it."""
    was_cut = answered.finish == "length"
    return {
        "id": f"resp_{answered.number:08d}",
        "object": "response",
        "created_at": int(time.time()),
        "model": body.get("model") or "policy",
        "status": "incomplete" if was_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if was_cut else None,
        "error": None,
        "output": _items(answered),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "usage": {
            "input_tokens": answered.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answered.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answered.prompt_tokens + answered.completion_tokens,
        },
    }


def _items(answered: Answered) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if answered.text or not answered.calls:
        part = {"type": "output_text", "text": answered.text, "annotations": []}
        items.append({"type": "message", "role": "assistant", "content": [part]})
    for call in answered.calls:
        name, arguments = call["function"]["name"], arguments_text(call)
        items.append({"type": "function_call", "call_id": call["id"], "name": name, "arguments": arguments})
    identity = f"{answered.number:08d}"
    return [{"id": f"item_{identity}_{index}", "status": "completed", **each} for index, each in enumerate(items)]


def response_events(number: int, body: Mapping[str, Any]) -> Generator[str, str | Answered, None]:
    """Word the stream of an answer: what comes first, pieces of text, and the end, given the whole answer."""
    numbers = itertools.count()

    def written(*events: Mapping[str, Any]) -> str:
        return "".join(
            f"event: {event['type']}\ndata: {json.dumps({**event, 'sequence_number': next(numbers)})}\n\n"
            for event in events
        )

    nothing = response(Answered(number=number, message={"role": "assistant", "content": ""}, finish="stop"), body)
    begun = {**nothing, "status": "in_progress", "output": [], "usage": None}
    said, text = (yield written({"type": "response.created", "response": begun})), ""
    (empty,) = nothing["output"]
    while isinstance(said, str):
        events = [_text_delta(empty["id"], said)]
        events = events if text else [*_text_opening(empty), *events]
        text += said
        said = yield written(*events)
    whole = response(said, body)
    events = []
    for index, item in enumerate(whole["output"]):
        if item["type"] == "message":
            rest = rest_of(said, text)
            events += [] if text else _text_opening(item)
            events += [_text_delta(item["id"], rest)] if rest or not text else []
            events += _text_end(item)
        else:
            events += _call(item, index)
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    yield written(*events, {"type": f"response.{whole['status']}", "response": whole})


def _text_opening(item: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the events that begin the text, which is the first item."""
    begun = {**item, "content": [], "status": "in_progress"}
    part = {**item["content"][0], "text": ""}
    return [
        {"type": "response.output_item.added", "output_index": 0, "item": begun},
        {"type": "response.content_part.added", **_text_place(item["id"]), "part": part},
    ]


def _text_delta(item_id: str, text: str) -> dict[str, Any]:
    return {"type": "response.output_text.delta", **_text_place(item_id), "delta": text, "logprobs": []}


def _text_end(item: Mapping[str, Any]) -> list[dict[str, Any]]:
    (part,) = item["content"]
    place = _text_place(item["id"])
    return [
        {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": []},
        {"type": "response.content_part.done", **place, "part": part},
    ]


def _text_place(item_id: str) -> dict[str, Any]:
    return {"output_index": 0, "item_id": item_id, "content_index": 0}


def _call(item: Mapping[str, Any], index: int) -> list[dict[str, Any]]:
    """Return the events of a call, but for its end."""
    place, arguments = {"output_index": index, "item_id": item["id"]}, item["arguments"]
    begun = {**item, "arguments": "", "status": "in_progress"}
    done = {"type": "response.function_call_arguments.done", "arguments": arguments, "name": item["name"]}
    return [
        {"type": "response.output_item.added", "output_index": index, "item": begun},
        {"type": "response.function_call_arguments.delta", **place, "delta": arguments},
        {**done, **place},
    ]
