"""Anthropic's `/v1/messages`: contents of blocks, in which calls of tools and their results stand beside texts."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from skyrl_train.rollout.agents.chat_wire import (
    Answered,
    Asked,
    message_of,
    positive,
    read_tools,
    refused,
    rest_of,
    stops,
    text_of,
)
from skyrl_train.types import ChatMessage

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def read_messages(body: Mapping[str, Any]) -> Asked:
    """Return what a request asks. Raises RequestError naming the parameter that is wrong."""
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise refused("messages", "must be a list with at least one message")
    system = text_of(body.get("system"), "system")
    messages: list[ChatMessage] = [{"role": "system", "content": system}] if system else []
    for index, message in enumerate(given):
        messages += _messages_of(message, f"messages[{index}]")
    choice, tools = body.get("tool_choice"), body.get("tools")
    return Asked(
        messages=tuple(messages),
        tools=read_tools(
            [_schema(each) for each in tools] if isinstance(tools, list) else tools,
            choice.get("type") if isinstance(choice, Mapping) else None,
        ),
        max_tokens=positive(body.get("max_tokens"), "max_tokens"),
        stop=stops(body.get("stop_sequences") or ()),
    )


def _schema(tool: object) -> object:
    """Return a tool in the shape of `/v1/chat/completions`; None where it is none that the model could call."""
    if not isinstance(tool, Mapping) or tool.get("type", "custom") != "custom":
        return None
    description = {"description": tool["description"]} if "description" in tool else {}
    parameters = tool.get("input_schema", {})
    return {"type": "function", "function": {"name": tool.get("name"), **description, "parameters": parameters}}


def _messages_of(wire: object, where: str) -> list[ChatMessage]:
    """Return the messages that one with blocks is: results of tools are each a message, before the text."""
    role = wire.get("role") if isinstance(wire, Mapping) else None
    if not isinstance(wire, Mapping) or role not in ("user", "assistant", "system"):
        raise refused(where, "must be a mapping whose role is user or assistant")
    content = wire.get("content")
    if isinstance(content, str):
        return [message_of(wire, where)]
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise refused(where, "must have a text, or a list of blocks")
    results = [
        message_of({"role": "tool", "tool_call_id": each.get("tool_use_id"), "content": each.get("content")}, where)
        for each in content
        if each.get("type") == "tool_result" and role == "user"
    ]
    calls = [_call(each) for each in content if each.get("type") == "tool_use" and role == "assistant"]
    others = [each for each in content if each.get("type") not in ("tool_result", "tool_use")]
    if len(results) + len(calls) + len(others) < len(content):
        raise refused(where, "results of tools are the user's, and calls the assistant's")
    if results and not others:
        return results
    said = {"role": role, "content": others, **({"tool_calls": calls} if calls else {})}
    return [*results, message_of(said, where)]


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": block.get("id"), "function": {"name": block.get("name"), "arguments": block.get("input")}}


def anthropic_message(answered: Answered, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer as `/v1/messages` words it."""
    blocks = [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": dict(call["function"]["arguments"]),
        }
        for call in answered.calls
    ]
    if answered.text or not blocks:
        blocks.insert(0, {"type": "text", "text": answered.text})
    return {
        "id": f"msg_{answered.number:08d}",
        "type": "message",
        "role": "assistant",
        "model": body.get("model") or "policy",
        "content": blocks,
        "stop_reason": _STOP_REASONS[answered.finish],
        "stop_sequence": None,
        "usage": {"input_tokens": answered.prompt_tokens, "output_tokens": answered.completion_tokens},
    }


def anthropic_events(number: int, body: Mapping[str, Any], prompt_tokens: int) -> Generator[str, str | Answered, None]:
    """Word the stream of an answer: what comes first, pieces of text, and the end, given the whole answer."""
    begun: dict[str, Any] = {
        "id": f"msg_{number:08d}",
        "type": "message",
        "role": "assistant",
        "model": body.get("model") or "policy",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": prompt_tokens, "output_tokens": 0},
    }
    opening = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    said, text = (yield _written([{"type": "message_start", "message": begun}])), ""
    while isinstance(said, str):
        events = [_delta(0, {"type": "text_delta", "text": said})]
        events = events if text else [opening, *events]
        text += said
        said = yield _written(events)
    whole = anthropic_message(said, body)
    events = []
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            rest = rest_of(said, text)
            events += [] if text else [opening]
            events += [_delta(index, {"type": "text_delta", "text": rest})] if rest or not text else []
        else:
            written = json.dumps(block["input"], ensure_ascii=False)
            events.append({"type": "content_block_start", "index": index, "content_block": {**block, "input": {}}})
            events.append(_delta(index, {"type": "input_json_delta", "partial_json": written}))
        events.append({"type": "content_block_stop", "index": index})
    stop = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    events += [{"type": "message_delta", "delta": stop, "usage": whole["usage"]}, {"type": "message_stop"}]
    yield _written(events)


def _delta(index: int, delta: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def _written(events: Sequence[Mapping[str, Any]]) -> str:
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
