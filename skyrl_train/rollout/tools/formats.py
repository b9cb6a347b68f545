"""Calls in a model's text, by the format of its family.

Each reader is given the text after the reasoning, special tokens included, without the token that ended it. Whatever begins
like a call and cannot be read is a call with an `error`, which the model is told.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl_train.rollout.tools.toolbox import Schema
from skyrl_train.system.files import json_problem, writable_text
from skyrl_train.types import Tokenizer

RESPONSE_TEMPLATE = "response_template"
MAX_CALLS = 32
"""In one response; more is a mistake of the model."""
UNREADABLE = "tool_call"
"""The name of a call whose name cannot be read."""
_NAME = re.compile(r'"name"\s*:\s*"([^"]{1,100})"')


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call as the model wrote it."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    """Why it cannot be read; empty where it can."""


Calls = tuple[ToolCall, ...]
ToolParser = Callable[[str, Sequence[Schema]], Calls]
"""`(text with special tokens, schemas of the tools) -> calls`; none in an answer. Whatever it raises is a call that cannot
be read."""


def make_parser(name: str, tokenizer: Tokenizer) -> ToolParser | None:
    """Return the parser of a built-in format, `response_template`, or `auto`; None where `auto` knows none."""
    if name == "auto":
        template = getattr(tokenizer, "response_template", None)
        name = RESPONSE_TEMPLATE if template is not None else format_of(tokenizer) or ""
    if name == RESPONSE_TEMPLATE:
        return functools.partial(_by_response_template, tokenizer=tokenizer)
    return functools.partial(_by_reader, reader=FORMATS[name]) if name else None


def _by_reader(text: str, schemas: Sequence[Schema], *, reader: Callable[[str], Iterator[ToolCall]]) -> Calls:
    """The calls that a reader finds after the reasoning."""
    del schemas
    calls = tuple(reader(text.rpartition("</think>")[2]))
    return (*calls[:MAX_CALLS], _malformed("", f"more than {MAX_CALLS} calls at once")) if calls[MAX_CALLS:] else calls


def _by_response_template(text: str, schemas: Sequence[Schema], *, tokenizer: Any) -> Calls:
    """The calls that the tokenizer's own description of responses finds."""
    message = tokenizer.parse_response(text, prefix="", tools=[dict(schema) for schema in schemas])
    return tuple(call_from_value(call) for call in message.get("tool_calls") or ())


def hermes(text: str) -> Iterator[ToolCall]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, of Hermes and Qwen."""
    for body in re.findall(r"<tool_call>(.*?)(?:</tool_call>|$)", text, re.DOTALL):
        try:
            yield call_from_value(json.loads(body))
        except ValueError as error:
            yield _malformed(body, str(error))


def llama3_json(text: str) -> Iterator[ToolCall]:
    """`{"name": ..., "parameters": {...}}`, alone or after `<|python_tag|>`, several with `;` between them."""
    tagged = "<|python_tag|>" in text
    rest = text.rpartition("<|python_tag|>")[2].strip()
    if not tagged and not re.match(r'\{\s*"(name|type)"', rest):
        return
    while rest:
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
        except ValueError as error:
            yield _malformed(rest, str(error))
            return
        yield call_from_value(value)
        rest = rest[end:].lstrip(" ;,\n")


def mistral(text: str) -> Iterator[ToolCall]:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]NAME[ARGS]{...}` for each call."""
    for body in text.split("[TOOL_CALLS]")[1:]:
        if not body.lstrip().startswith("["):
            name, _, arguments = re.sub(r"\[(ARGS|CALL_ID)\]", " ", body).partition("{")
            yield _from_text(name.split()[0] if name.split() else "", "{" + arguments)
            continue
        try:
            values = json.loads(body)
        except ValueError as error:
            yield _malformed(body, str(error))
            continue
        yield from map(call_from_value, values)


_DEEPSEEK_CALLS, _DEEPSEEK_BEGIN, _DEEPSEEK_SEP, _DEEPSEEK_END = (
    f"<\uff5ctool\u2581{name}\uff5c>" for name in ("calls\u2581begin", "call\u2581begin", "sep", "call\u2581end")
)


def deepseek_v3(text: str) -> Iterator[ToolCall]:
    """Of each call, between its begin and its end: `function`, a separator, NAME and a block of JSON; in V3.1 NAME, a
    separator and JSON."""
    for part in text.split(_DEEPSEEK_BEGIN)[1:]:
        before, _, after = part.partition(_DEEPSEEK_END)[0].partition(_DEEPSEEK_SEP)
        name, fence, block = after.partition("```json")
        yield _from_text(name.strip(), block.rpartition("```")[0]) if fence else _from_text(before.strip(), after)


def harmony(text: str) -> Iterator[ToolCall]:
    """Messages of gpt-oss to `functions.NAME`, with JSON in them."""
    for message in text.split("<|start|>"):
        head, _, body = message.partition("<|message|>")
        if recipient := re.search(r"to=functions\.([\w.-]+)", head):
            yield _from_text(recipient[1], re.split(r"<\|(?:call|end|return)\|>", body)[0])


def call_messages(calls: Calls, *, turn_index: int) -> list[dict[str, Any]]:
    """Return calls as `tool_calls` of an assistant's message. Their ids have nine characters, which Mistral's template asks
    for."""
    return [
        {
            "id": f"{turn_index:05d}{index:04d}",
            "type": "function",
            "function": {"name": call.name, "arguments": dict(call.arguments)},
        }
        for index, call in enumerate(calls)
    ]


def recorded_calls(said: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Return calls, as messages hold them, for a turn's record: of one whose arguments JSON in UTF-8 cannot hold, or only
    deeper than it is read, `error` says so in their place."""
    recorded = []
    for call in said:
        problem = json_problem(call)
        function = {"name": writable_text(call["function"]["name"]), "arguments": {}}
        recorded.append({**call, "function": function, "error": writable_text(problem)} if problem else call)
    return tuple(recorded)


def text_before_calls(text: str) -> str:
    """Return what a response that calls tools says before its first call; no text where its format is not known."""
    begin = _CALLS_BEGIN.search(text)
    return text[: begin.start()] if begin else ""


FORMATS: Mapping[str, Callable[[str], Iterator[ToolCall]]] = {
    "hermes": hermes,
    "llama3_json": llama3_json,
    "mistral": mistral,
    "deepseek_v3": deepseek_v3,
    "harmony": harmony,
}
TOOL_FORMATS = ("auto", *FORMATS, RESPONSE_TEMPLATE)
"""Values of `environment.tool_format`, beside `vllm:NAME`."""
VLLM_PARSER = "vllm:"
_MARKS = {
    "<function=": None,
    "<tool_call>": "hermes",
    "[TOOL_CALLS]": "mistral",
    _DEEPSEEK_CALLS: "deepseek_v3",
    "<|channel|>": "harmony",
    "<|python_tag|>": "llama3_json",
    '"parameters": ': "llama3_json",
}
"""What a chat template writes around calls, and the format; None is one that vLLM's parsers read."""


_CALLS_BEGIN = re.compile("|".join([*map(re.escape, (mark for mark in _MARKS if mark[0] != '"')), r"^\s*\{"]))


def format_of(tokenizer: Tokenizer) -> str | None:
    """Return the name of the format that a tokenizer's chat template writes calls in; None where it is none of ours."""
    templates = tokenizer.chat_template
    text = "".join(templates.values()) if isinstance(templates, dict) else str(templates or "")
    return next((name for mark, name in _MARKS.items() if mark in text), None)


def _from_text(name: str, arguments: str) -> ToolCall:
    try:
        return call_from_value({"name": name, "arguments": json.loads(arguments)})
    except ValueError as error:
        return _malformed(f'"name": "{name}"', str(error))


def call_from_value(value: object) -> ToolCall:
    """Return the call that a JSON object is."""
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        return _malformed("", "must be a JSON object with a name and arguments")
    arguments = function.get("arguments", function.get("parameters", {}))
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError as error:
        return _malformed(f'"name": "{function["name"]}"', str(error))
    if not isinstance(arguments, dict):
        return ToolCall(name=function["name"], error="its arguments must be a JSON object")
    return ToolCall(name=function["name"], arguments=arguments)


def _malformed(text: str, error: str) -> ToolCall:
    name = _NAME.search(text)
    return ToolCall(name=name[1] if name else UNREADABLE, error=error)
