"""vLLM's own parsers of tool calls, without an engine, beside ours."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl_train.errors import ConfigError
from skyrl_train.inference.vllm import vllm_tool_parser
from skyrl_train.rollout.tools import make_parser
from tests.support.fakes import make_tokenizer

pytestmark = pytest.mark.cluster
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", 'I call.<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}</tool_call><tool_call>{"name": "b", "arguments": {}}'),
        ("llama3_json", '{"name": "add", "parameters": {"a": 2}}'),
        ("hermes", "#### 5"),
        ("llama3_json", "#### 5"),
    ],
)
def test_the_parser_of_that_name_finds_the_calls_that_ours_finds(name: str, text: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|python_tag|>"]})
    theirs, ours = vllm_tool_parser(name, tokenizer), make_parser(name, tokenizer)
    assert ours is not None
    assert theirs(text, [ADD]) == ours(text, [ADD])


def test_a_call_that_it_cannot_read_is_malformed() -> None:
    (call,) = vllm_tool_parser("hermes", make_tokenizer())('<tool_call>{"name": "add"', [ADD])
    assert call.error == "hermes cannot read it"


def test_a_parser_that_does_not_fit_the_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"does not fit this tokenizer: .*<\|python_tag\|>"):
        vllm_tool_parser("llama3_json", make_tokenizer())


def test_an_unknown_parser_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'hermes'"):
        vllm_tool_parser("hermess", make_tokenizer())
