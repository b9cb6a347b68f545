"""OpenAI's chat format, `/v1/chat/completions`, and what the formats of other APIs share with it.

A message here is one as chat templates take it: text content, and the arguments of calls as mappings. Of what a request says
of sampling, what bounds an answer is read: most tokens, and stop strings. How tokens are drawn is the trainer's
(`unsupported.py`).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_train.rollout.agents.http_server import RequestError
from skyrl_train.types import ChatMessage

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TEXTS = ("text", "input_text", "output_text", "refusal")
_MAX_STOPS = 16


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a request asks the model."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas of what the model may call, as chat templates take them."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Answered:
    """The model's answer as programs are told it."""

    number: int
    """Of the answer within its session."""
    message: ChatMessage
    finish: str
    """stop, length or tool_calls."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """0 where tokens are counted elsewhere."""

    @property
    def text(self) -> str:
        return str(self.message["content"])

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        found: Sequence[Mapping[str, Any]] = self.message.get("tool_calls", ())
        return found


def read_chat(body: Mapping[str, Any]) -> Asked:
    """Return what a request asks. Raises RequestError naming the parameter that is wrong."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise refused("messages", "must be a list with at least one message")
    if body.get("n") not in (None, 1):
        raise refused("n", "must be 1: an answer is one of a trajectory; ask once more for another")
    stop = body.get("stop") or ()
    most = body.get("max_completion_tokens")
    return Asked(
        messages=tuple(message_of(each, f"messages[{index}]") for index, each in enumerate(messages)),
        tools=read_tools(body.get("tools"), body.get("tool_choice")),
        max_tokens=positive(body.get("max_tokens") if most is None else most, "max_tokens"),
        stop=stops((stop,) if isinstance(stop, str) else stop),
    )


def refused(param: str, rule: str) -> RequestError:
    """Return the error of a parameter of a request."""
    return RequestError(f"{param}: {rule}", param=param, code="invalid_value")


def positive(value: object, param: str) -> int | None:
    """Return a number of tokens; None where none is given. Raises RequestError."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise refused(param, "must be a whole number of at least 1")


def read_tools(value: object, choice: object = None) -> tuple[Mapping[str, Any], ...]:
    """Return the schemas of tools in the shape of `/v1/chat/completions`; none where the model may not call any. Raises
    RequestError."""
    if value is None or choice == "none":
        return ()
    if not isinstance(value, list):
        raise refused("tools", "must be a list")
    for index, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise refused(f"tools[{index}]", "must be {type: function, function: {name: ...}}; there are no others")
    return tuple(value)


def stops(value: object) -> tuple[str, ...]:
    """Return stop strings. Raises RequestError."""
    good = isinstance(value, (list, tuple)) and all(isinstance(each, str) and each for each in value)
    if not good or len(value) > _MAX_STOPS:  # type: ignore[arg-type]
        raise refused("stop", f"must be a text or at most {_MAX_STOPS} of them")
    return tuple(value)  # type: ignore[arg-type]


def message_of(wire: object, where: str = "a message") -> ChatMessage:
    """Return a message as chat templates take it. Raises RequestError for what is none, or more than text."""
    role = wire.get("role") if isinstance(wire, Mapping) else None
    if not isinstance(wire, Mapping) or not isinstance(role, str) or role not in _ROLES:
        raise refused(where, f"must be a mapping whose role is one of {', '.join(_ROLES)}")
    message: dict[str, Any] = {"role": _ROLES[role], "content": text_of(wire.get("content"), where)}
    calls = wire.get("tool_calls") or ()
    if not isinstance(calls, (list, tuple)):
        raise refused(f"{where}.tool_calls", "must be a list")
    if calls:
        message["tool_calls"] = [_read_call(each, f"{where}.tool_calls[{index}]") for index, each in enumerate(calls)]
    for name in ("tool_call_id", "name"):
        if wire.get(name):
            message[name] = str(wire[name])
    return message


def text_of(content: object, where: str) -> str:
    """Return the text of a message's content. Raises RequestError."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts: list[str] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if kind not in _TEXTS or not isinstance(text, str):
            raise refused(where, f"has a part that is no text: {part!r:.100}")
        texts.append(text)
    return "".join(texts)


def _read_call(wire: object, where: str) -> dict[str, Any]:
    function = wire.get("function") if isinstance(wire, Mapping) else None
    if not isinstance(wire, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise refused(where, "must be {id: ..., type: function, function: {name: ..., arguments: text}}")
    return call_of({"id": wire.get("id"), "name": function["name"], "arguments": function.get("arguments", "")})


def call_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return `{"id", "name", "arguments"}` as chat templates take a call: arguments that are the text of a mapping are a
    mapping."""
    arguments = call["arguments"]
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            read = json.loads(arguments)
            arguments = read if isinstance(read, dict) else arguments
    return {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": arguments}}


def arguments_text(call: Mapping[str, Any]) -> str:
    """Return the arguments of a call as APIs write them."""
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def chat_completion(answered: Answered, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer as `/v1/chat/completions` words it."""
    calls = [_told_call(call) for call in answered.calls]
    content = answered.text if answered.text or not calls else None
    message = {"role": "assistant", "content": content, "refusal": None, **({"tool_calls": calls} if calls else {})}
    choice = {"index": 0, "message": message, "finish_reason": answered.finish, "logprobs": None}
    return {**_head(answered.number, body, "chat.completion"), "choices": [choice], "usage": _usage(answered)}


def chat_events(number: int, body: Mapping[str, Any]) -> Generator[str, str | Answered, None]:
    """Word the stream of an answer: what comes first, pieces of text, and the end, given the whole answer."""
    head = _head(number, body, "chat.completion.chunk")

    def chunk(delta: Mapping[str, Any], finish: str | None = None) -> str:
        return _data({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

    said, text = (yield chunk({"role": "assistant", "content": ""})), ""
    while isinstance(said, str):
        text += said
        said = yield chunk({"content": said})
    told = [chunk({"content": rest})] if (rest := rest_of(said, text)) else []
    told += [chunk({"tool_calls": [{"index": index, **_told_call(call)}]}) for index, call in enumerate(said.calls)]
    told.append(chunk({}, said.finish))
    options = body.get("stream_options")
    if isinstance(options, Mapping) and options.get("include_usage"):
        told.append(_data({**head, "choices": [], "usage": _usage(said)}))
    yield "".join(told) + "data: [DONE]\n\n"


def rest_of(answered: Answered, told: str) -> str:
    """Return the text of an answer behind what was told of it. Should that not be its beginning, as it can be with a
    tokenizer that rewrites text, there is nothing that could mend it."""
    return answered.text[len(told) :] if answered.text.startswith(told) else ""


def _data(chunk: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


def _told_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": call["function"]["name"], "arguments": arguments_text(call)}
    return {"id": call["id"], "type": "function", "function": function}


def _head(number: int, body: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{number:08d}",
        "object": kind,
        "created": int(time.time()),
        "model": body.get("model") or "policy",
    }


def _usage(answered: Answered) -> dict[str, int] | None:
    if not answered.completion_tokens:
        return None
    return {
        "prompt_tokens": answered.prompt_tokens,
        "completion_tokens": answered.completion_tokens,
        "total_tokens": answered.prompt_tokens + answered.completion_tokens,
    }
