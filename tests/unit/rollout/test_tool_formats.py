"""Calls in a model's text, in the format of each family, and the templates that write them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from skyrl_train.errors import ConfigError, DataError
from skyrl_train.rollout.chat_tokens import ChatTokens, check_tools
from skyrl_train.rollout.tools.formats import FORMATS, MAX_CALLS, format_of, make_parser
from skyrl_train.types import Prompt
from tests.support.fakes import CHATML, make_tokenizer
from tests.support.tool_cases import TEMPLATE

ARGUMENTS = {"a": 2, "text": 'say "}" </x>'}
WRITTEN = json.dumps(ARGUMENTS)
BEGIN, SEP, END = (f"<\uff5ctool\u2581{name}\uff5c>" for name in ("call\u2581begin", "sep", "call\u2581end"))
ALL, ALL_END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}


def parse(name: str, text: str) -> list[tuple[str, dict[str, Any], bool]]:
    parser = make_parser(name, make_tokenizer())
    assert parser is not None
    return [(call.name, dict(call.arguments), bool(call.error)) for call in parser(text, [ADD])]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", f'I call.\n<tool_call>\n{{"name": "add", "arguments": {WRITTEN}}}\n</tool_call>'),
        (
            "hermes",
            f'<think>or <tool_call>{{}}</tool_call>?</think><tool_call>{{"name": "add", "arguments": {WRITTEN}}}',
        ),
        ("llama3_json", f'{{"name": "add", "parameters": {WRITTEN}}}'),
        ("llama3_json", f'<|python_tag|>{{"type": "function", "name": "add", "parameters": {WRITTEN}}}'),
        ("mistral", f'[TOOL_CALLS][{{"name": "add", "arguments": {WRITTEN}}}]'),
        ("mistral", f"[TOOL_CALLS]add[ARGS]{WRITTEN}"),
        ("mistral", f"Sure.[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{WRITTEN}"),
        ("deepseek_v3", f"{ALL}{BEGIN}function{SEP}add\n```json\n{WRITTEN}\n```{END}{ALL_END}"),
        ("deepseek_v3", f"{ALL}{BEGIN}add{SEP}{WRITTEN}{END}{ALL_END}"),
        ("harmony", f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{WRITTEN}<|call|>"),
        (
            "harmony",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.add<|channel|>commentary json"
            f"<|message|>{WRITTEN}",
        ),
    ],
)
def test_a_call_is_read(name: str, text: str) -> None:
    assert parse(name, text) == [("add", ARGUMENTS, False)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "a", "arguments": {}}</tool_call>\n<tool_call>{"name": "b"}</tool_call>'),
        ("llama3_json", '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}'),
        ("mistral", '[TOOL_CALLS][{"name": "a", "arguments": {}}, {"name": "b", "arguments": "{}"}]'),
        ("mistral", "[TOOL_CALLS]a{}[TOOL_CALLS]b{}"),
        ("deepseek_v3", f"{ALL}{BEGIN}a{SEP}{{}}{END}{BEGIN}b{SEP}{{}}{END}"),
        ("harmony", "".join(f"<|start|>assistant to=functions.{each}<|message|>{{}}<|call|>" for each in "ab")),
    ],
)
def test_several_calls_are_read_in_order(name: str, text: str) -> None:
    assert parse(name, text) == [("a", {}, False), ("b", {}, False)]


@pytest.mark.parametrize(
    ("name", "text", "called"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 2}', "add"),
        ("hermes", "<tool_call>add(2)</tool_call>", "tool_call"),
        ("llama3_json", '{"name": "add", "parameters": {"a": 2', "add"),
        ("llama3_json", "<|python_tag|>add(2)", "tool_call"),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a"', "add"),
        ("mistral", "[TOOL_CALLS]add[ARGS]{2", "add"),
        ("mistral", "[TOOL_CALLS]", "tool_call"),
        ("mistral", "[TOOL_CALLS][]x", "tool_call"),
        ("deepseek_v3", f"{ALL}{BEGIN}function{SEP}add\n```json\n{{2", "add"),
        ("deepseek_v3", f"{ALL}{BEGIN}", "tool_call"),
        ("harmony", "<|start|>assistant to=functions.add<|message|>{2", "add"),
    ],
)
def test_what_begins_as_a_call_and_cannot_be_read_is_malformed(name: str, text: str, called: str) -> None:
    assert parse(name, text) == [(called, {}, True)]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("text", ["", "#### 5", '{"answer": 5}', "a < b, [1, 2] and {} are no calls", "[[[[{"])
def test_an_answer_holds_no_call(name: str, text: str) -> None:
    assert parse(name, text) == []


def test_more_calls_than_anybody_wants_are_one_mistake() -> None:
    calls = parse("hermes", '<tool_call>{"name": "add"}</tool_call>' * (MAX_CALLS + 5))
    assert len(calls) == MAX_CALLS + 1
    assert calls[-1] == ("tool_call", {}, True)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("... <tool_call>\n{{ tool_call.arguments | tojson }}\n</tool_call>", "hermes"),
        ("{{- '<tool_call>\n<function=' + tool_call.name + '>' }}", None),
        ("{{- '[TOOL_CALLS]' }}", "mistral"),
        ("{{- '<|python_tag|>' + tool_call.name }}", "llama3_json"),
        (f"{{{{'{ALL}'}}}}", "deepseek_v3"),
        ("<|start|>assistant<|channel|>final<|message|>", "harmony"),
        ("<|im_start|>", None),
    ],
)
def test_the_format_is_that_of_the_chat_template(template: str, name: str | None) -> None:
    assert format_of(make_tokenizer(template)) == name


HARMONY = (
    "{% if tools %}tools{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if not last.calls %}{{ raise_exception('no call before') }}{% endif %}"
    "<|im_start|>system\n{{ m.content }}<|im_end|>"
    "{% elif m.tool_calls %}{% set last.calls = true %}<|im_start|>assistant\n= {{ m.tool_calls[0].function.name }} STOP"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As gpt-oss: a call ends otherwise than an answer, and only after a call may a tool answer."""


def test_a_template_that_wants_a_call_before_its_result_is_given_one() -> None:
    tokenizer = make_tokenizer("{% set last = namespace(calls=false) %}" + HARMONY)
    chat, stop = ChatTokens(tokenizer), tokenizer.encode(" STOP")
    context = chat.first_prompt([{"role": "user", "content": "1"}], [ADD])
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "0", "function": {"name": "add", "arguments": {}}}],
    }
    prompt = chat.next_prompt(
        context=context,
        response=(*tokenizer.encode("= +"), *stop),
        history=[{"role": "user", "content": "1"}, call],
        observations=[{"role": "tool", "content": "3"}],
        tools=[ADD],
    )
    added = prompt[len(context) :].tolist()
    assert tokenizer.decode(added) == "= + STOP<|im_start|>system\n3<|im_end|><|im_start|>assistant\n"


def test_a_template_that_rewrites_answers_keeps_the_turn_that_a_tool_answers() -> None:
    """As Qwen3's: reasoning is dropped from turns before the last question, which a tool's result is none."""
    strips = TEMPLATE.replace(
        "{{ message.content }}", "{{ message.content if loop.last or message.role != 'assistant' }}"
    )
    tokenizer = make_tokenizer(strips.replace("{% for call", "{% if message.tool_calls %}={% endif %}{% for call"))
    chat = ChatTokens(tokenizer)
    assert not chat.prefix_stable
    context = chat.first_prompt([{"role": "user", "content": "1"}], [ADD])
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "0", "function": {"name": "add", "arguments": {}}}],
    }
    response = tuple(tokenizer.encode("Try again<|im_end|>"))
    prompt = chat.next_prompt(
        context=context,
        response=response,
        history=[{"role": "user", "content": "1"}, call],
        observations=[{"role": "tool", "content": "3"}],
        tools=[ADD],
    )
    assert prompt[: len(context) + len(response)].tolist() == [*context.tolist(), *response]


def test_a_template_that_ignores_tools_is_known() -> None:
    assert not ChatTokens(make_tokenizer()).shows([ADD])
    assert ChatTokens(make_tokenizer(TEMPLATE)).shows([ADD])


def test_tools_that_the_model_would_not_see_or_call_are_refused_before_it_is_loaded() -> None:
    row = Prompt(uid="7", messages=({"role": "user", "content": "1"},), tools=(ADD,))

    def check(template: str, tools: list[Any], prompts: list[Prompt], **changes: Any) -> None:
        settings: dict[str, Any] = {"reads_calls": True, "environment": "word_problems", **changes}
        check_tools(prompts, tools, ChatTokens(make_tokenizer(template)), **settings)

    check(TEMPLATE, [ADD], [row])
    check(CHATML, [], [])
    with pytest.raises(ConfigError, match="its chat template ignores tools; got add"):
        check(CHATML, [ADD], [])
    with pytest.raises(ConfigError, match=r"need environment.tool_format"):
        check(TEMPLATE, [ADD], [], reads_calls=False)
    with pytest.raises(DataError, match=r"7: offers the tool 'add', and environment.tools has none"):
        check(TEMPLATE, [], [row])
    with pytest.raises(DataError, match=r"7: 'tools' has \{'name': 'add'\}, which is no schema of a function"):
        check(TEMPLATE, [ADD], [replace(row, tools=({"name": "add"},))])
    with pytest.raises(ConfigError, match="its chat template ignores tools"):
        check(CHATML, [], [row], environment="my_code:WithTools")
