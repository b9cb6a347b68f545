"""The formats in which programs ask for answers: OpenAI's `/v1/chat/completions` and `/v1/responses`, Anthropic's
`/v1/messages`.

A message here is one as chat templates take it: text content, and the arguments of calls as mappings. Of what a request says
of sampling, what bounds an answer is read: most tokens, and stop strings. How tokens are drawn and answers are shaped beyond
that is the trainer's, since that is what is trained on: what asks for it is counted by name (`unsupported`), or refused.

Nothing is kept from request to request: each brings the whole conversation. Errors are RequestError naming the parameter.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_train.rollout.agents.http_server import RequestError
from skyrl_train.system.files import shown
from skyrl_train.types import ChatMessage, SamplingParams

logger = logging.getLogger(__name__)

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TEXTS = ("text", "input_text", "output_text", "refusal")
_MAX_STOPS = 16
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_FUNCTION_RULE = "must be {id: ..., type: function, function: {name: ..., arguments: text}}"
_TRAINERS = ("temperature", "top_p", "top_k", "min_p")
"""They are as the trainer's settings say; the same value may be asked for."""
_AS_IT_IS: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(_TRAINERS, ()),
    "seed": (),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "best_of": (1,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "tool_choice": ("auto", "none", {"type": "auto"}, {"type": "none"}),
    "parallel_tool_calls": (True,),
    "max_tool_calls": (),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "text": ({}, {"format": {"type": "text"}}),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "reasoning": ({},),
    "reasoning_effort": (),
    "thinking": ({"type": "disabled"},),
    "chat_template_kwargs": ({},),
    "verbosity": ("medium",),
    "truncation": ("disabled",),
    "background": (False,),
}
"""Parameters of the three APIs, and of vLLM's, with the values that ask for what is done anyway; null is one of each."""
Events = Generator[str, "str | ChatReply", None]
"""The wording of a stream in one format: it yields what comes first, is then given pieces of text, and the whole answer at
the end, and yields what is told of each."""


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """What a request asks the model."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas of what the model may call, as chat templates take them."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ChatReply:
    """The model's answer as programs are told it."""

    number: int
    """Of the answer within its session."""
    message: ChatMessage
    finish: str
    """Why it ended, in the words of chat completions: stop, length or tool_calls."""
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


# What requests of all formats have in common


def refused(param: str, rule: str) -> RequestError:
    """Return the error of a parameter of a request."""
    return RequestError(f"{param}: {rule}", param=param, code="invalid_value")


def _listed(body: Mapping[str, Any], param: str, rule: str = "must be a list with at least one message") -> list[Any]:
    value = body.get(param)
    if not isinstance(value, list) or not value:
        raise refused(param, rule)
    return value


def _positive(value: object, param: str) -> int | None:
    """Return a number of tokens; None where none is given."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise refused(param, "must be a whole number of at least 1")


def _tools(
    body: Mapping[str, Any], choice: object, shaped: Callable[[Mapping[str, Any]], object]
) -> tuple[Mapping[str, Any], ...]:
    """Return the schemas of tools as chat templates take them, in which shape `shaped` puts one; none where the model may
    not call any."""
    value = body.get("tools")
    if value is None or choice == "none":
        return ()
    if not isinstance(value, list):
        raise refused("tools", "must be a list")
    tools: list[Any] = [shaped(each) if isinstance(each, Mapping) else each for each in value]
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise refused(f"tools[{index}]", "must be {type: function, function: {name: ...}}; there are no others")
    return tuple(tools)


def _stops(value: object) -> tuple[str, ...]:
    good = isinstance(value, (list, tuple)) and all(isinstance(each, str) and each for each in value)
    if not good or len(value) > _MAX_STOPS:  # type: ignore[arg-type]
        raise refused("stop", f"must be a text or at most {_MAX_STOPS} of them")
    return tuple(value)  # type: ignore[arg-type]


def _system(body: Mapping[str, Any], param: str) -> list[ChatMessage]:
    """Return the system's message that stands beside the others; none where there is no such text."""
    text = _text_of(body.get(param), param)
    return [{"role": "system", "content": text}] if text else []


def message_of(wire: object, where: str = "a message") -> ChatMessage:
    """Return a message as chat templates take it. Raises RequestError for what is none, or more than text."""
    role = wire.get("role") if isinstance(wire, Mapping) else None
    if not isinstance(wire, Mapping) or not isinstance(role, str) or role not in _ROLES:
        raise refused(where, f"must be a mapping whose role is one of {', '.join(_ROLES)}")
    message: dict[str, Any] = {"role": _ROLES[role], "content": _text_of(wire.get("content"), where)}
    calls = wire.get("tool_calls") or ()
    if not isinstance(calls, (list, tuple)):
        raise refused(f"{where}.tool_calls", "must be a list")
    if calls:
        message["tool_calls"] = [_read_call(each, f"{where}.tool_calls[{index}]") for index, each in enumerate(calls)]
    for name in ("tool_call_id", "name"):
        if wire.get(name):
            message[name] = str(wire[name])
    return message


def _text_of(content: object, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if kind not in _TEXTS or not isinstance(text, str):
            raise refused(where, f"has a part that is no text: {part!r:.100}")
        texts.append(text)
    return "".join(texts)


def _read_call(wire: object, where: str) -> dict[str, Any]:
    function = wire.get("function") if isinstance(wire, Mapping) else None
    if not isinstance(wire, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise refused(where, _FUNCTION_RULE)
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


def _arguments_text(call: Mapping[str, Any]) -> str:
    """Return the arguments of a call as OpenAI's formats write them."""
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


@dataclass(frozen=True)
class Wire:
    """One format: how a request is read, and how its answer is told, whole or as a stream."""

    read: Callable[[Mapping[str, Any]], ChatRequest]
    whole: Callable[[ChatReply, Mapping[str, Any]], Mapping[str, Any]]
    """Given the answer and the body of the request."""
    events: Callable[[int, Mapping[str, Any], int], Events]
    """Given the number of the answer, the body of the request and the tokens of its prompt."""


def _stream(begin: str, piece: Callable[[str, bool], str], end: Callable[[ChatReply, str, bool], str]) -> Events:
    """Word a stream: `piece` is given text and whether it is the first, `end` the answer, its text that was not told, and
    whether any was."""
    said, text = (yield begin), ""
    while isinstance(said, str):
        is_first, text = not text, text + said
        said = yield piece(said, is_first)
    # Where what was told is not its beginning, as it can be with a tokenizer that rewrites text, nothing mends it.
    yield end(said, said.text[len(text) :] if said.text.startswith(text) else "", bool(text))


def _written(events: Iterable[Mapping[str, Any]]) -> str:
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)


# OpenAI's chat completions


def read_chat(body: Mapping[str, Any]) -> ChatRequest:
    """Return what a request to `/v1/chat/completions` asks. Raises RequestError."""
    messages = _listed(body, "messages")
    if body.get("n") not in (None, 1):
        raise refused("n", "must be 1: an answer is one of a trajectory; ask once more for another")
    stop, most = body.get("stop") or (), body.get("max_completion_tokens")
    return ChatRequest(
        messages=tuple(message_of(each, f"messages[{index}]") for index, each in enumerate(messages)),
        tools=_tools(body, body.get("tool_choice"), lambda tool: tool),
        max_tokens=_positive(body.get("max_tokens") if most is None else most, "max_tokens"),
        stop=_stops((stop,) if isinstance(stop, str) else stop),
    )


def chat_completion(reply: ChatReply, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer as `/v1/chat/completions` words it."""
    calls = [_told_call(call) for call in reply.calls]
    content = reply.text if reply.text or not calls else None
    message = {"role": "assistant", "content": content, "refusal": None, **({"tool_calls": calls} if calls else {})}
    choice = {"index": 0, "message": message, "finish_reason": reply.finish, "logprobs": None}
    return {**_chat_head(reply.number, body, "chat.completion"), "choices": [choice], "usage": _chat_usage(reply)}


def chat_events(number: int, body: Mapping[str, Any], _prompt_tokens: int = 0) -> Events:
    """Word the stream of an answer as `/v1/chat/completions` does."""
    head = _chat_head(number, body, "chat.completion.chunk")

    def data(**more: Any) -> str:
        return f"data: {json.dumps({**head, **more})}\n\n"

    def chunk(delta: Mapping[str, Any], finish: str | None = None) -> str:
        return data(choices=[{"index": 0, "delta": delta, "finish_reason": finish}])

    def end(reply: ChatReply, rest: str, _is_begun: bool) -> str:
        told = [chunk({"content": rest})] if rest else []
        calls = enumerate(reply.calls)
        told += [chunk({"tool_calls": [{"index": index, **_told_call(call)}]}) for index, call in calls]
        told.append(chunk({}, reply.finish))
        options = body.get("stream_options")
        if isinstance(options, Mapping) and options.get("include_usage"):
            told.append(data(choices=[], usage=_chat_usage(reply)))
        return "".join(told) + "data: [DONE]\n\n"

    return _stream(chunk({"role": "assistant", "content": ""}), lambda text, _: chunk({"content": text}), end)


def _told_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": call["function"]["name"], "arguments": _arguments_text(call)}
    return {"id": call["id"], "type": "function", "function": function}


def _chat_head(number: int, body: Mapping[str, Any], kind: str) -> dict[str, Any]:
    model = body.get("model") or "policy"
    return {"id": f"chatcmpl-{number:08d}", "object": kind, "created": int(time.time()), "model": model}


def _chat_usage(reply: ChatReply) -> dict[str, int] | None:
    if not reply.completion_tokens:
        return None
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }


# Anthropic's messages: contents of blocks, in which calls of tools and their results stand beside texts


def _read_messages(body: Mapping[str, Any]) -> ChatRequest:
    given, choice = _listed(body, "messages"), body.get("tool_choice")
    messages = _system(body, "system")
    for index, message in enumerate(given):
        messages += _messages_of_blocks(message, f"messages[{index}]")
    return ChatRequest(
        messages=tuple(messages),
        tools=_tools(body, choice.get("type") if isinstance(choice, Mapping) else None, _tool_of_input_schema),
        max_tokens=_positive(body.get("max_tokens"), "max_tokens"),
        stop=_stops(body.get("stop_sequences") or ()),
    )


def _tool_of_input_schema(tool: Mapping[str, Any]) -> object:
    """Return a tool as chat templates take it; None where it is none that the model could call."""
    if tool.get("type", "custom") != "custom":
        return None
    description = {"description": tool["description"]} if "description" in tool else {}
    parameters = tool.get("input_schema", {})
    return {"type": "function", "function": {"name": tool.get("name"), **description, "parameters": parameters}}


def _messages_of_blocks(wire: object, where: str) -> list[ChatMessage]:
    """Return the messages that one with blocks is: results of tools are each a message, before the text."""
    role = wire.get("role") if isinstance(wire, Mapping) else None
    if not isinstance(wire, Mapping) or role not in ("user", "assistant", "system"):
        raise refused(where, "must be a mapping whose role is user or assistant")
    content = wire.get("content")
    if isinstance(content, str):
        return [message_of(wire, where)]
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise refused(where, "must have a text, or a list of blocks")
    results, calls, others = list[ChatMessage](), list[dict[str, Any]](), list[Any]()
    for block in content:
        kind = block.get("type")
        if kind == "tool_result" and role == "user":
            told = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")}
            results.append(message_of(told, where))
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "function": function})
        elif kind in ("tool_result", "tool_use"):
            raise refused(where, "results of tools are the user's, and calls the assistant's")
        else:
            others.append(block)
    if results and not others:
        return results
    said = {"role": role, "content": others, **({"tool_calls": calls} if calls else {})}
    return [*results, message_of(said, where)]


def _anthropic_message(reply: ChatReply, body: Mapping[str, Any]) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    if reply.text or not reply.calls:
        blocks.append({"type": "text", "text": reply.text})
    for call in reply.calls:
        name, arguments = call["function"]["name"], dict(call["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
    return {
        "id": f"msg_{reply.number:08d}",
        "type": "message",
        "role": "assistant",
        "model": body.get("model") or "policy",
        "content": blocks,
        "stop_reason": _STOP_REASONS[reply.finish],
        "stop_sequence": None,
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens},
    }


def _anthropic_events(number: int, body: Mapping[str, Any], prompt_tokens: int) -> Events:
    empty = ChatReply(number=number, message={"content": ""}, finish="stop", prompt_tokens=prompt_tokens)
    begun = {**_anthropic_message(empty, body), "content": [], "stop_reason": None}
    opening = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}

    def delta(index: int, **kind: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": index, "delta": kind}

    def piece(text: str, is_first: bool) -> str:
        return _written([*([opening] if is_first else []), delta(0, type="text_delta", text=text)])

    def end(reply: ChatReply, rest: str, is_begun: bool) -> str:
        whole, events = _anthropic_message(reply, body), list[dict[str, Any]]()
        for index, block in enumerate(whole["content"]):
            if block["type"] == "text":
                events += [] if is_begun else [opening]
                events += [delta(0, type="text_delta", text=rest)] if rest or not is_begun else []
            else:
                arguments = json.dumps(block["input"], ensure_ascii=False)
                events.append({"type": "content_block_start", "index": index, "content_block": {**block, "input": {}}})
                events.append(delta(index, type="input_json_delta", partial_json=arguments))
            events.append({"type": "content_block_stop", "index": index})
        stop = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
        events += [{"type": "message_delta", "delta": stop, "usage": whole["usage"]}, {"type": "message_stop"}]
        return _written(events)

    return _stream(_written([{"type": "message_start", "message": begun}]), piece, end)


# OpenAI's responses, without what a server would keep


def _read_response(body: Mapping[str, Any]) -> ChatRequest:
    for name in ("previous_response_id", "conversation"):
        if body.get(name) is not None:
            raise refused(name, "nothing is kept from request to request; send the whole conversation as input")
    if isinstance(given := body.get("input"), str):
        body = {**body, "input": [{"role": "user", "content": given}]}
    items = _listed(body, "input", "must be a text or a list with at least one item")
    messages = _system(body, "instructions")
    for index, item in enumerate(items):
        _add_item(messages, item, f"input[{index}]")
    return ChatRequest(
        messages=tuple(messages),
        tools=_tools(body, body.get("tool_choice"), _tool_of_function),
        max_tokens=_positive(body.get("max_output_tokens"), "max_output_tokens"),
    )


def _tool_of_function(tool: Mapping[str, Any]) -> object:
    """Return a tool whose name and parameters stand beside its type as chat templates take it."""
    function = {name: value for name, value in tool.items() if name not in ("type", "strict")}
    return {"type": tool.get("type"), "function": function}


def _add_item(messages: list[ChatMessage], item: object, where: str) -> None:
    """Add an item to the conversation: calls belong to the message before them."""
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


def _response(reply: ChatReply, body: Mapping[str, Any]) -> dict[str, Any]:
    was_cut = reply.finish == "length"
    items: list[dict[str, Any]] = []
    if reply.text or not reply.calls:
        part = {"type": "output_text", "text": reply.text, "annotations": []}
        items.append({"type": "message", "role": "assistant", "content": [part]})
    for call in reply.calls:
        name, arguments = call["function"]["name"], _arguments_text(call)
        items.append({"type": "function_call", "call_id": call["id"], "name": name, "arguments": arguments})
    identity = f"{reply.number:08d}"
    return {
        "id": f"resp_{identity}",
        "object": "response",
        "created_at": int(time.time()),
        "model": body.get("model") or "policy",
        "status": "incomplete" if was_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if was_cut else None,
        "error": None,
        "output": [
            {"id": f"item_{identity}_{index}", "status": "completed", **each} for index, each in enumerate(items)
        ],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": reply.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        },
    }


def _response_events(number: int, body: Mapping[str, Any], _prompt_tokens: int) -> Events:
    numbers = itertools.count()
    empty = _response(ChatReply(number=number, message={"content": ""}, finish="stop"), body)
    (text_item,) = empty["output"]
    place = {"output_index": 0, "item_id": text_item["id"], "content_index": 0}
    opening = [
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": {**text_item, "content": [], "status": "in_progress"},
        },
        {"type": "response.content_part.added", **place, "part": text_item["content"][0]},
    ]

    def written(events: Iterable[Mapping[str, Any]]) -> str:
        return _written({**event, "sequence_number": next(numbers)} for event in events)

    def delta(text: str) -> dict[str, Any]:
        return {"type": "response.output_text.delta", **place, "delta": text, "logprobs": []}

    def end(reply: ChatReply, rest: str, is_begun: bool) -> str:
        whole, events = _response(reply, body), list[dict[str, Any]]()
        for index, item in enumerate(whole["output"]):
            if item["type"] == "message":
                (part,) = item["content"]
                events += [] if is_begun else opening
                events += [delta(rest)] if rest or not is_begun else []
                done = {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": []}
                events += [done, {"type": "response.content_part.done", **place, "part": part}]
            else:
                events += _call_events(item, index)
            events.append({"type": "response.output_item.done", "output_index": index, "item": item})
        return written([*events, {"type": f"response.{whole['status']}", "response": whole}])

    begun = {**empty, "status": "in_progress", "output": [], "usage": None}
    return _stream(
        written([{"type": "response.created", "response": begun}]),
        lambda text, is_first: written([*(opening if is_first else []), delta(text)]),
        end,
    )


def _call_events(item: Mapping[str, Any], index: int) -> list[dict[str, Any]]:
    """Return the events of a call, but for its end."""
    place, arguments = {"output_index": index, "item_id": item["id"]}, item["arguments"]
    begun = {**item, "arguments": "", "status": "in_progress"}
    done = {"type": "response.function_call_arguments.done", "arguments": arguments, "name": item["name"]}
    return [
        {"type": "response.output_item.added", "output_index": index, "item": begun},
        {"type": "response.function_call_arguments.delta", **place, "delta": arguments},
        {**done, **place},
    ]


WIRES: Mapping[str, Wire] = {
    "/v1/chat/completions": Wire(read_chat, chat_completion, chat_events),
    "/v1/responses": Wire(_read_response, _response, _response_events),
    "/v1/messages": Wire(_read_messages, _anthropic_message, _anthropic_events),
}
"""The formats of requests, by the paths that they come to."""


# What is not done


def unsupported(body: Mapping[str, Any], sampling: SamplingParams) -> dict[str, str]:
    """Return, by name, what a request asks for and does not get, and what it gets instead."""
    found: dict[str, str] = {}
    for name, values in _AS_IT_IS.items():
        value = body.get(name)
        own = getattr(sampling, name) if name in _TRAINERS else None
        if value is None or value in values or (own is not None and value == own):
            continue
        instead = f"it is {own:g} here" if own is not None else "it is not done here"
        found[name] = f"{name}={shown(value)}: {instead}, as answers are trained on as generator.sampling draws them"
    return found


def tell_once(found: Mapping[str, str]) -> None:
    """Log each name the first time that this process sees it."""
    for name, what in found.items():
        if name not in _TOLD:
            _TOLD.add(name)
            logger.warning(
                "an agent asks for %s. Counted as env/agent/ignored/%s, and not told again; "
                "generator.agent_loop.unsupported=refuse refuses such requests",
                what,
                name,
            )


_TOLD: set[str] = set()
