"""Conversations as token ids: the first prompt by the chat template, every later one by appending.

A conversation grows by the template's delta for what the environment said, never by re-tokenising the model's own
text: what was sampled stays in the context token by token. The delta is the difference between the renderings of a
fixed short conversation with and without the new messages, which is valid where the template is prefix-stable. That is
checked once per tokenizer; where it is not (some templates strip earlier reasoning), the whole conversation is
rendered again. Which earlier turn the result continues, if any, is then found by comparing tokens
(`types.find_parent`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from skyrl_train.errors import DataError
from skyrl_train.rollout.env_boundary import Broken, describe
from skyrl_train.types import ChatMessage, FailureKind, Prompt, TokenIds, Tokenizer, token_ids

_QUESTION = "1"
_ANSWERS = (("2", "3"), ("b", "c"), ("yes", "no"))
"""Pairs of short answers; a small vocabulary may know only some of them."""
_PROBE: tuple[ChatMessage, ...] = ({"role": "user", "content": "1"},)


class ChatTokens:
    """The conversation's side of a tokenizer. Raises DataError where the tokenizer has no usable chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        try:
            self._short, self._base, self._after_answer = self._look_at_template()
            probe = self._render((*self._short, *_PROBE), add_generation_prompt=True)
        except Exception as error:
            raise DataError(
                f"the tokenizer's chat template cannot render a user and an assistant message ({describe(error)}). "
                "Use a model with a chat template, or put a chat_template.jinja beside the tokenizer."
            ) from error
        self.prefix_stable = probe[: len(self._base)] == self._base
        self._delta = functools.lru_cache(maxsize=4096)(self._delta_of_json)

    def first_prompt(self, messages: Sequence[ChatMessage]) -> TokenIds:
        """Return the conversation so far and the opening of the assistant's turn, `[prompt]`.

        Raises Broken (invalid_observation) where the template refuses the messages.
        """
        try:
            return token_ids(self._render(messages, add_generation_prompt=True))
        except Exception as error:
            raise Broken(
                FailureKind.INVALID_OBSERVATION, f"the chat template refused the messages: {describe(error)}"
            ) from error

    def data_prompt(self, prompt: Prompt) -> TokenIds:
        """Return the `first_prompt` of a data row. Raises DataError naming the row that the template refuses."""
        try:
            return self.first_prompt(prompt.messages)
        except Broken as broken:
            raise DataError(f"prompt {prompt.uid}: {broken.message}. Fix or drop the row.") from broken

    def next_prompt(
        self,
        *,
        context: TokenIds,
        response: tuple[int, ...],
        history: Sequence[ChatMessage],
        observations: Sequence[ChatMessage],
    ) -> TokenIds:
        """Return the prompt after the environment answered, `[prompt]`.

        Args:
            context: The previous prompt, `[previous prompt]`.
            response: The tokens sampled after it.
            history: The conversation as messages up to and including that response (used where the template is not
                prefix-stable).
            observations: What the environment said.
        """
        if self.prefix_stable:
            try:
                delta = self._delta(json.dumps([dict(message) for message in observations]))
            except Exception as error:
                raise Broken(
                    FailureKind.INVALID_OBSERVATION, f"the chat template refused the messages: {describe(error)}"
                ) from error
            if delta is not None:
                added = np.array([*response, *self.closing(response), *delta], dtype=np.int32)
                return token_ids(np.concatenate([context, added]))
        return self.first_prompt([*history, *observations])

    def closing(self, response: tuple[int, ...]) -> tuple[int, ...]:
        """Return what the template puts after an answer and `response` does not yet end with.

        With `<|im_end|>` and a newline after each answer: only the newline for a response that ended by itself, both
        for one that was cut by its length. These tokens were not sampled and belong to the next prompt.
        """
        after = self._after_answer
        for overlap in range(min(len(after), len(response)), 0, -1):
            if response[-overlap:] == after[:overlap]:
                return after[overlap:]
        return after

    def text(self, response: Sequence[int]) -> str:
        """Return a response as the environment reads it: without special tokens."""
        return str(self._tokenizer.decode(list(response), skip_special_tokens=True))

    def _look_at_template(self) -> tuple[tuple[ChatMessage, ...], tuple[int, ...], tuple[int, ...]]:
        """Return a short conversation, its tokens, and those of them that follow the answer."""
        for answers in _ANSWERS:
            conversations = [
                ({"role": "user", "content": _QUESTION}, {"role": "assistant", "content": answer}) for answer in answers
            ]
            left, right = (self._render(conversation, add_generation_prompt=False) for conversation in conversations)
            if left != right:
                return conversations[0], left, _common_suffix(left, right)
        raise ValueError("it leaves the assistant's text out, or the vocabulary knows no letter and no digit")

    def _delta_of_json(self, observations_json: str) -> tuple[int, ...] | None:
        """Return the tokens of the observations and the next opening; None where these messages break the prefix."""
        observations: list[ChatMessage] = json.loads(observations_json)
        full = self._render((*self._short, *observations), add_generation_prompt=True)
        return full[len(self._base) :] if full[: len(self._base)] == self._base else None

    def _render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool) -> tuple[int, ...]:
        rendered = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
            return_dict=False,
        )
        return tuple(int(token_id) for token_id in rendered)


def _common_suffix(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    length = 0
    while length < min(len(left), len(right)) and left[-1 - length] == right[-1 - length]:
        length += 1
    return left[len(left) - length :]


def with_context(prompt: Prompt, name: str) -> Prompt:
    """Return the data row with its column `name` (dots go into nested columns) after its last message's text.

    Raises DataError naming the row and the column where it has no such text.
    """
    value: Any = prompt.extras
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    last = prompt.messages[-1] if prompt.messages else {}
    if not isinstance(value, (str, int, float)) or not str(value) or not isinstance(last.get("content"), str):
        raise DataError(
            f"prompt {prompt.uid} has no text {name!r} to show the teacher after its last message. "
            "Set generator.privileged_context to a column that every row has."
        )
    return replace(prompt, messages=(*prompt.messages[:-1], {**last, "content": f"{last['content']}\n\n{value}"}))
