"""The loss lies on what the assistant wrote, token by token, whatever the template looks like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from transformers import PreTrainedTokenizerFast

from skyrl_train.config import SFTDataConfig
from skyrl_train.data.sft.examples import Encoder
from skyrl_train.errors import DataError
from tests.support import sft_cases as cases

TALK = ("hello there", "good bye", "what is this", "the answer is 3")


def encode(tokenizer: PreTrainedTokenizerFast, values: Mapping[str, Any], **form: Any) -> tuple[list[int], list[bool]]:
    encoder = Encoder(tokenizer, SFTDataConfig(**form))
    ((ids, mask),) = encoder.tokenise(iter([cases.row(values)]))
    return list(ids), list(mask)


def trained(tokenizer: PreTrainedTokenizerFast, values: Mapping[str, Any], **form: Any) -> list[str]:
    return cases.trained_texts(tokenizer, *encode(tokenizer, values, **form))


FAMILIES = [
    pytest.param(cases.byte_level(cases.CHATML), "{}<|im_end|>", id="chatml"),
    pytest.param(cases.byte_level(cases.HEADERS, eos="<|eot_id|>"), "{}<|eot_id|>", id="headers"),
    pytest.param(cases.byte_level(cases.TURNS, eos="</s>"), "{}<end_of_turn>", id="turns, another eos"),
    pytest.param(cases.metaspace(cases.TURNS, prepend="never"), "{}<end_of_turn>", id="turns, sentencepiece"),
    pytest.param(cases.byte_level(cases.INSTRUCTIONS, eos="</s>"), " {}</s>", id="instructions"),
    pytest.param(cases.metaspace(cases.INSTRUCTIONS), "{}</s>", id="instructions, sentencepiece"),
    pytest.param(cases.metaspace(cases.INSTRUCTIONS, prepend="always"), "{}</s>", id="instructions, old sentencepiece"),
    pytest.param(cases.byte_level(cases.OPENED_REASONING, eos="</s>"), "{}</s>", id="opened reasoning"),
    pytest.param(cases.eager_specials(), "{}<|im_end|>", id="special tokens that swallow blanks"),
]


@pytest.mark.parametrize(("tokenizer", "form"), FAMILIES)
def test_all_assistant_messages_and_their_closing_mark_are_trained(
    tokenizer: PreTrainedTokenizerFast, form: str
) -> None:
    assert trained(tokenizer, cases.chat(*TALK)) == [form.format(text) for text in TALK[1::2]]


@pytest.mark.parametrize(("tokenizer", "form"), FAMILIES)
def test_only_the_last_assistant_message_is_trained_where_asked(tokenizer: PreTrainedTokenizerFast, form: str) -> None:
    assert trained(tokenizer, cases.chat(*TALK), loss_on="last") == [form.format(TALK[-1])]


@pytest.mark.parametrize(("tokenizer", "form"), FAMILIES)
def test_tokens_are_those_of_the_whole_rendered_conversation(tokenizer: PreTrainedTokenizerFast, form: str) -> None:
    del form
    values = cases.chat(*TALK)
    ids, _ = encode(tokenizer, values)
    assert ids == tokenizer.apply_chat_template(values["messages"], tokenize=True, return_dict=False)


@pytest.mark.parametrize(("tokenizer", "form"), FAMILIES[:7])
def test_the_first_trained_token_is_the_first_that_would_be_sampled(
    tokenizer: PreTrainedTokenizerFast, form: str
) -> None:
    del form
    values = cases.chat(*TALK[:2])
    ids, mask = encode(tokenizer, values)
    prompt = tokenizer.apply_chat_template(
        values["messages"][:1], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert ids[: mask.index(True)] == prompt


def test_the_marks_of_a_template_and_the_rendering_agree() -> None:
    tokenizer = cases.byte_level(cases.MARKED_CHATML)
    marked = tokenizer.apply_chat_template(
        cases.chat(*TALK)["messages"], return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = encode(tokenizer, cases.chat(*TALK))
    assert (ids, mask) == (marked["input_ids"], [bool(value) for value in marked["assistant_masks"]])


def test_the_blank_before_an_answer_is_trained_where_no_generation_prompt_has_it() -> None:
    tokenizer = cases.metaspace(cases.INSTRUCTIONS)
    ids, mask = encode(tokenizer, cases.chat("hello there", "good bye"))
    assert tokenizer.convert_ids_to_tokens(ids)[mask.index(True) - 1] == "[/INST]"


def test_a_system_text_that_moves_with_the_last_question_leaves_the_masks_right() -> None:
    tokenizer = cases.byte_level(cases.INSTRUCTIONS, eos="</s>")
    values = cases.chat(*TALK, system="think")
    assert [text.strip() for text in trained(tokenizer, values)] == ["good bye</s>", "the answer is 3</s>"]


REASONED = ("hello there", "<think>one two</think>good bye", "what is this", "<think>three</think>the answer is 3")


def test_reasoning_that_the_template_drops_is_not_trained_and_what_it_keeps_is() -> None:
    tokenizer = cases.byte_level(cases.REASONING)
    assert trained(tokenizer, cases.chat(*REASONED)) == [
        "good bye<|im_end|>",
        "<think>\nthree\n</think>\n\nthe answer is 3<|im_end|>",
    ]


def test_an_empty_reasoning_that_the_template_adds_is_trained() -> None:
    tokenizer = cases.byte_level(cases.REASONING)
    assert trained(tokenizer, cases.chat(*TALK), loss_on="last") == ["<think>\n\n</think>\n\nthe answer is 3<|im_end|>"]


def test_tool_calls_are_the_assistants_and_tool_results_are_not() -> None:
    tokenizer = cases.byte_level(cases.CHATML)
    call = {"type": "function", "function": {"name": "eleven", "arguments": {}}}
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "twelve"},
        {"role": "assistant", "content": "good bye"},
    ]
    values = {"messages": messages, "tools": '[{"type": "function", "function": {"name": "eleven"}}]'}
    ids, mask = encode(tokenizer, values)
    assert cases.trained_texts(tokenizer, ids, mask) == [
        "<tool_call>eleven</tool_call><|im_end|>",
        "good bye<|im_end|>",
    ]
    assert "Tools: " in tokenizer.decode(ids)


def test_a_conversation_that_the_assistant_opens_has_loss_on_its_opening() -> None:
    tokenizer = cases.byte_level(cases.CHATML)
    values = {"messages": [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "bye"}]}
    assert trained(tokenizer, values) == ["hello<|im_end|>"]


def test_an_answer_that_ends_in_blanks_keeps_them_before_the_closing_mark() -> None:
    assert trained(cases.byte_level(cases.CHATML), cases.chat("hello", "good bye \n")) == ["good bye \n<|im_end|>"]


def test_a_prompt_that_ends_within_a_word_is_tokenised_as_it_will_be_asked() -> None:
    """The prompt ends in "assistant: ", so the model never gets to write the token " good"."""
    tokenizer = cases.byte_level(cases.PLAIN_ROLES, eos="</s>")
    values = cases.chat("hello", "good bye")
    ids, mask = encode(tokenizer, values)
    assert cases.trained_texts(tokenizer, ids, mask) == ["good bye"]
    prompt = tokenizer.apply_chat_template(
        values["messages"][:1], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert ids[: mask.index(True)] == prompt
    assert ids != tokenizer.apply_chat_template(values["messages"], tokenize=True, return_dict=False)


def test_a_newline_after_an_answer_does_not_join_its_last_token() -> None:
    tokenizer = cases.byte_level(cases.PLAIN_ROLES, eos="</s>")
    assert trained(tokenizer, cases.chat("hello", "good\n", "what", "bye")) == ["good\n", "bye"]


def test_a_message_without_text_in_a_template_that_rewrites_is_found_too() -> None:
    tokenizer = cases.byte_level(cases.REASONING)
    values = cases.chat(*TALK)
    values["messages"][1] = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "eleven"}}]}
    assert trained(tokenizer, values)[0] == "<|im_end|>"


MOVING = """\
{%- for message in messages -%}{{- message.content | length -}}{%- endfor -%}
{%- for message in messages -%}{{- message.content -}}{%- endfor -%}
"""


def test_a_template_in_which_answers_cannot_be_found_is_refused_with_the_remedy() -> None:
    with pytest.raises(DataError, match=r"line 1: cannot tell where the text of message 1 begins.*data.loss_on=last"):
        encode(cases.byte_level(MOVING), cases.chat(*TALK))


@pytest.mark.parametrize(
    ("tokenizer", "values", "message"),
    [
        (cases.byte_level(None), cases.chat(*TALK), "cannot render a question and an answer.*data.chat_template=false"),
        (cases.byte_level(cases.TURNS), cases.chat(*TALK, system="x"), "line 1: the chat template refused.*no system"),
        (cases.byte_level(), cases.chat("hello"), r"line 1: no message of an assistant to train on \(roles: user\)"),
    ],
)
def test_rows_that_cannot_be_masked_are_refused(
    tokenizer: PreTrainedTokenizerFast, values: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        encode(tokenizer, values)


CONTENT = st.text(st.characters(codec="utf-8", exclude_characters="<|>\x00"), min_size=1, max_size=12).filter(
    lambda text: bool(text.strip())
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(CONTENT, CONTENT), min_size=1, max_size=3))
def test_whatever_is_said_the_answers_and_nothing_else_are_trained(turns: list[tuple[str, str]]) -> None:
    values = cases.chat(*(text for turn in turns for text in turn))
    ids, mask = encode(cases.byte_level(), values)
    assert cases.trained_texts(cases.byte_level(), ids, mask) == [f"{answer}<|im_end|>" for _, answer in turns]
    assert cases.byte_level().decode(ids) == cases.byte_level().apply_chat_template(values["messages"], tokenize=False)


def test_prompt_and_completion_as_text_are_trained_on_the_completion_and_an_end() -> None:
    tokenizer = cases.byte_level(eos="</s>")
    values = {"prompt": "what is this", "completion": " the answer"}
    ids, mask = encode(tokenizer, values, chat_template=False)
    assert tokenizer.decode(ids) == "what is this the answer</s>"
    assert cases.trained_texts(tokenizer, ids, mask) == [" the answer</s>"]


def test_prompt_and_completion_become_a_conversation_unless_told_otherwise() -> None:
    values = {"prompt": "what is this", "completion": "the answer"}
    assert encode(cases.byte_level(), values) == encode(cases.byte_level(), cases.chat("what is this", "the answer"))


def test_answers_within_a_prompt_of_messages_are_not_trained() -> None:
    talk = cases.chat(*TALK)["messages"]
    values = {"prompt": talk[:3], "completion": talk[3:]}
    assert trained(cases.byte_level(), values, loss_on="all") == ["the answer is 3<|im_end|>"]


def test_a_completion_may_be_a_text_deep_in_the_row() -> None:
    values = {"prompt": cases.chat("hello")["messages"], "extra_info": {"answer": "good bye"}}
    assert trained(cases.byte_level(), values, completion_column="extra_info.answer") == ["good bye<|im_end|>"]


def test_alpaca_rows_ask_with_instruction_and_input() -> None:
    tokenizer = cases.byte_level()
    values = {"instruction": "what is", "input": "this", "output": "the answer"}
    ids, mask = encode(tokenizer, values)
    assert tokenizer.decode(ids) == (
        "<|im_start|>user\nwhat is\n\nthis<|im_end|>\n<|im_start|>assistant\nthe answer<|im_end|>\n"
    )
    assert cases.trained_texts(tokenizer, ids, mask) == ["the answer<|im_end|>"]
    plain, mask = encode(cases.byte_level(eos="</s>"), values, chat_template=False)
    assert tokenizer.decode(plain) == "what is\n\nthis\n\nthe answer</s>"


def test_text_is_trained_whole_but_for_the_token_that_nothing_predicts() -> None:
    tokenizer = cases.byte_level(eos="</s>")
    ids, mask = encode(tokenizer, {"text": "hello there"})
    assert mask == [False] + [True] * (len(ids) - 1)
    assert tokenizer.decode(ids) == "hello there</s>"
    with_start, mask = encode(cases.byte_level(eos="</s>", bos=True), {"text": "hello there"})
    assert with_start == [cases.SPECIAL.index("<s>"), *ids]
    assert mask == [False] + [True] * len(ids)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"question": "x"}, "no format fits .*the row has question. Name its columns with data.prompt_column"),
        ({"messages": []}, "'messages' must be a list of chat messages or a text; got"),
        ({"messages": [{"content": "x"}]}, "message 0 of 'messages' has no text under 'role'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "a part .* without an image, and none is left",
        ),
        ({"messages": [{"role": "user"}]}, "message 0 of 'messages' has no text under 'content'"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "without a text and without tool calls"),
        ({"text": 3}, "'text' must be a text; got 3"),
        ({"instruction": "x", "output": 3}, "'output' must be a text; got 3"),
        ({**cases.chat("a", "b"), "tools": "{"}, "'tools' is a text that is not valid JSON"),
        ({**cases.chat("a", "b"), "tools": {"name": "x"}}, "'tools' must be a list of objects"),
        ({"text": ""}, "nothing to train on: no token has loss"),
    ],
)
def test_rows_that_lack_something_are_refused_by_name(values: Mapping[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"train.jsonl, line 1: .*{message}"):
        encode(cases.byte_level(), values)


def test_a_stated_format_is_not_guessed_around() -> None:
    with pytest.raises(DataError, match=r"data\.format=text needs 'text'; the row has messages"):
        encode(cases.byte_level(), cases.chat("a", "b"), format="text")
