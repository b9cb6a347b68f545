"""Parsers of tool calls by `environment.tool_format`, those of vLLM, `vllm:NAME`, among them, without an engine.

vLLM's read a whole response, as its server does for a request that is not streamed. A response in which the format's opening
stands and no call is found is a call that cannot be read: the parsers themselves take it for an answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_train.errors import ConfigError, Violation
from skyrl_train.registry import did_you_mean
from skyrl_train.rollout.tools import VLLM_PARSER, Calls, ToolCall, ToolParser, call_from_value, make_parser
from skyrl_train.types import Tokenizer

Schema = Mapping[str, Any]
_OPENINGS = ("tool_call_start_token", "tool_calls_start_token", "bot_token", "tool_call_start")
"""Attributes of parsers that hold what a call begins with."""


def make_tool_parser(name: str, tokenizer: Tokenizer) -> ToolParser | None:
    """Return what reads calls of tools, `environment.tool_format`; None where `auto` finds no format that it knows."""
    return (
        vllm_tool_parser(name.removeprefix(VLLM_PARSER), tokenizer)
        if name.startswith(VLLM_PARSER)
        else make_parser(name, tokenizer)
    )


def vllm_tool_parser(name: str, tokenizer: Tokenizer) -> ToolParser:
    """Return vLLM's parser of that name. Raises ConfigError where there is none, or no vLLM."""
    field, value = "environment.tool_format", repr(f"vllm:{name}")
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        rule, remedy = "needs vLLM, which is not installed here", "take a built-in format, or install the extra `vllm`"
        raise ConfigError([Violation(field=field, rule=rule, value=value, remedy=remedy)]) from error
    known = sorted(ToolParserManager.list_registered())
    if name not in known:
        rule, remedy = "must name one of vLLM's tool parsers", did_you_mean(name, known) or ", ".join(known)
        raise ConfigError([Violation(field=field, rule=rule, value=value, remedy=remedy)])
    parser_class = ToolParserManager.get_tool_parser(name)
    try:
        parser_class(tokenizer, [])
    except Exception as error:  # of any kind: each looks for what it needs in the vocabulary
        rule, remedy = f"does not fit this tokenizer: {error}", "take the format that the model was trained on"
        raise ConfigError([Violation(field=field, rule=rule, value=value, remedy=remedy)]) from error

    def parse(text: str, schemas: Sequence[Schema]) -> Calls:
        tools = [ChatCompletionToolsParam.model_validate(dict(schema)) for schema in schemas]
        request = ChatCompletionRequest(messages=[], model="", tools=tools, skip_special_tokens=False)
        parser = parser_class(tokenizer, tools)
        found = parser.extract_tool_calls(text, request)
        if found.tools_called:
            return tuple(_call(call.function.name, call.function.arguments) for call in found.tool_calls)
        opening = next((mark for each in _OPENINGS if (mark := getattr(parser, each, ""))), "")
        return (ToolCall(name="tool_call", error=f"{name} cannot read it"),) if opening and opening in text else ()

    return parse


def _call(name: str, arguments: str) -> ToolCall:
    try:
        return call_from_value({"name": name, "arguments": json.loads(arguments or "{}")})
    except ValueError as error:
        return ToolCall(name=name, error=str(error))
