"""Conversations as token ids: append, never re-tokenise."""

from __future__ import annotations

import pytest

from skyrl_train.errors import DataError
from skyrl_train.rollout.boundary import EnvironmentFailed
from skyrl_train.rollout.chat_tokens import ChatTokens, _missing
from skyrl_train.types import FailureKind, Prompt
from tests.support.fakes import CHATML, make_tokenizer

QUESTION = {"role": "user", "content": "1 + 2?"}
ANSWER = {"role": "assistant", "content": "#### 4"}
TRY_AGAIN = {"role": "user", "content": "Wrong. Try again."}
IM_END, NEWLINE = 3, 4

STRIPS_EARLIER_ANSWERS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] != 'assistant' or loop.last %}{{ message['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NOTHING_AFTER_AN_ANSWER = (
    "{% for message in messages %}{{ message['role'] }}\n{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)
USERS_ONLY = CHATML.replace(
    "{% for message in messages %}",
    "{% for message in messages %}{% if message['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}",
)


def rendered(template: str, *messages: dict[str, str]) -> tuple[int, ...]:
    tokenizer = make_tokenizer(template)
    return tuple(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False))


def answer_tokens(*tail: int) -> tuple[int, ...]:
    return (*make_tokenizer().encode("#### 4"), *tail)


def test_the_first_prompt_is_the_template_with_the_opening_of_an_answer() -> None:
    chat = ChatTokens(make_tokenizer())
    text = make_tokenizer().decode(chat.first_prompt([QUESTION]))
    assert text == "<|im_start|>user\n1 + 2?<|im_end|>\n<|im_start|>assistant\n"


def test_the_next_prompt_appends_and_equals_the_whole_conversation_rendered() -> None:
    chat = ChatTokens(make_tokenizer())
    context = chat.first_prompt([QUESTION])
    response = answer_tokens(IM_END)
    following = chat.next_prompt(
        context=context, response=response, history=[QUESTION, ANSWER], observations=[TRY_AGAIN]
    )
    assert following[: len(context) + len(response)].tolist() == [*context, *response]
    assert tuple(following) == rendered(CHATML, QUESTION, ANSWER, TRY_AGAIN)


def test_a_response_cut_by_its_length_is_closed_as_the_template_would() -> None:
    chat = ChatTokens(make_tokenizer())
    following = chat.next_prompt(
        context=chat.first_prompt([QUESTION]),
        response=answer_tokens(),
        history=[QUESTION, ANSWER],
        observations=[TRY_AGAIN],
    )
    assert tuple(following) == rendered(CHATML, QUESTION, ANSWER, TRY_AGAIN)


def test_tokens_that_text_would_not_give_stay_as_they_were_sampled() -> None:
    chat = ChatTokens(make_tokenizer())
    one, two = make_tokenizer().encode("1 2")
    sampled = (two, one, one, IM_END)
    following = chat.next_prompt(
        context=chat.first_prompt([QUESTION]), response=sampled, history=[QUESTION, ANSWER], observations=[TRY_AGAIN]
    )
    start = len(chat.first_prompt([QUESTION]))
    assert tuple(following[start : start + 4]) == sampled


@pytest.mark.parametrize(
    ("response", "closing"),
    [
        ((9, IM_END), (NEWLINE,)),
        ((9,), (IM_END, NEWLINE)),
        ((9, IM_END, NEWLINE), ()),
        ((9, NEWLINE), (IM_END, NEWLINE)),
    ],
)
def test_only_what_is_missing_after_an_answer_is_added(response: tuple[int, ...], closing: tuple[int, ...]) -> None:
    assert _missing((IM_END, NEWLINE), response) == closing


def test_a_template_that_puts_nothing_after_an_answer_works_too() -> None:
    chat = ChatTokens(make_tokenizer(NOTHING_AFTER_AN_ANSWER))
    following = chat.next_prompt(
        context=chat.first_prompt([QUESTION]),
        response=answer_tokens(),
        history=[QUESTION, ANSWER],
        observations=[TRY_AGAIN],
    )
    assert tuple(following) == rendered(NOTHING_AFTER_AN_ANSWER, QUESTION, ANSWER, TRY_AGAIN)


def test_a_template_that_rewrites_history_is_rendered_anew_and_says_so() -> None:
    chat = ChatTokens(make_tokenizer(STRIPS_EARLIER_ANSWERS))
    following = chat.next_prompt(
        context=chat.first_prompt([QUESTION]),
        response=answer_tokens(IM_END),
        history=[QUESTION, ANSWER],
        observations=[TRY_AGAIN],
    )
    assert not chat.prefix_stable
    assert tuple(following) == rendered(STRIPS_EARLIER_ANSWERS, QUESTION, ANSWER, TRY_AGAIN)


def test_several_observations_and_none_are_both_fine() -> None:
    chat = ChatTokens(make_tokenizer())
    context, response = chat.first_prompt([QUESTION]), answer_tokens(IM_END)
    both = chat.next_prompt(
        context=context, response=response, history=[QUESTION, ANSWER], observations=[TRY_AGAIN, TRY_AGAIN]
    )
    none = chat.next_prompt(context=context, response=response, history=[QUESTION, ANSWER], observations=[])
    assert tuple(both) == rendered(CHATML, QUESTION, ANSWER, TRY_AGAIN, TRY_AGAIN)
    assert tuple(none) == rendered(CHATML, QUESTION, ANSWER)


def test_the_environment_reads_a_response_without_special_tokens() -> None:
    assert ChatTokens(make_tokenizer()).text(answer_tokens(IM_END)) == "#### 4"


def test_messages_that_the_template_refuses_are_an_invalid_observation() -> None:
    chat = ChatTokens(make_tokenizer(USERS_ONLY))
    with pytest.raises(EnvironmentFailed, match=r"chat template refused.*no tools") as caught:
        chat.next_prompt(
            context=chat.first_prompt([QUESTION]),
            response=answer_tokens(IM_END),
            history=[QUESTION, ANSWER],
            observations=[{"role": "tool", "content": "1"}],
        )
    assert caught.value.kind is FailureKind.INVALID_OBSERVATION


def test_a_data_row_that_the_template_refuses_is_named() -> None:
    chat = ChatTokens(make_tokenizer(USERS_ONLY))
    with pytest.raises(DataError, match=r"prompt train-17: the chat template refused the messages: .*no tools"):
        chat.data_prompt(Prompt(uid="train-17", messages=({"role": "tool", "content": "1"},)))


def test_a_chat_template_that_leaves_answers_out_is_refused() -> None:
    with pytest.raises(DataError, match=r"chat template cannot render.*chat_template\.jinja"):
        ChatTokens(make_tokenizer("{{ messages[0]['content'] }}"))


def test_the_prompt_of_a_base_model_is_the_tokens_of_its_text() -> None:
    tokenizer = make_tokenizer()
    asked = ChatTokens(tokenizer, prompt_format="text")
    tokenizer.chat_template = None
    without_template = ChatTokens(tokenizer)
    expected = tokenizer("1 + 2?")["input_ids"]
    for chat in (asked, without_template):
        assert chat.data_prompt(Prompt(uid="a", messages=(QUESTION,))).tolist() == expected


def test_what_is_said_to_a_base_model_follows_its_response_as_text() -> None:
    chat = ChatTokens(make_tokenizer(), prompt_format="text")
    prompt = chat.first_prompt([QUESTION])
    grown = chat.next_prompt(
        context=prompt,
        response=(7, 8),
        history=[QUESTION, ANSWER],
        observations=[{"role": "user", "content": "3"}],
    )
    assert grown.tolist() == [*prompt.tolist(), 7, 8, *make_tokenizer()("3")["input_ids"]]


def test_a_base_model_is_given_no_conversation_and_no_tools() -> None:
    chat = ChatTokens(make_tokenizer(), prompt_format="text")
    for prompt in (
        Prompt(uid="a", messages=(QUESTION, ANSWER), place="t.jsonl, line 3"),
        Prompt(uid="a", messages=(QUESTION,), tools=({"name": "x"},), place="t.jsonl, line 3"),
    ):
        with pytest.raises(DataError, match=r"t.jsonl, line 3: is a conversation, or has tools, and .* plain text"):
            chat.data_prompt(prompt)


def test_tools_of_a_row_and_settings_of_the_template_reach_the_template() -> None:
    template = CHATML.replace(
        "{% if add_generation_prompt %}",
        "{% if tools %}{{ tools[0]['name'] }}{% endif %}{% if add_generation_prompt and not brief %}",
    )
    tokenizer = make_tokenizer(template)
    prompt = Prompt(uid="a", messages=(QUESTION,), tools=({"name": "3"},))
    assert tokenizer.decode(ChatTokens(tokenizer).data_prompt(prompt)).endswith("3<|im_start|>assistant\n")
    brief = ChatTokens(tokenizer, template_kwargs={"brief": True})
    assert tokenizer.decode(brief.data_prompt(prompt)).endswith("<|im_end|>\n3")
