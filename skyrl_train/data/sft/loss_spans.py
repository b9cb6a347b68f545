"""Which characters of a rendered conversation the assistant wrote: where the loss goes.

What the assistant wrote begins where the generation prompt ends, and ends with the mark that closes its turn
(`<|im_end|>`, `<|eot_id|>`, `</s>`, ...), which the model must learn to write. Both are found by rendering, so that no
template has to be known:

- begin: the rendering of the messages before it with a generation prompt is a prefix of the whole. Where it is not
  (templates that rewrite earlier turns), the message is rendered once more with another text in its place: what
  differs is the message.
- end: the closing mark is what follows an answer in a short conversation, without the blanks after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from skyrl_train.data.conversations import Conversation
from skyrl_train.data.sources.images import ImageReading
from skyrl_train.errors import DataError
from skyrl_train.types import ChatMessage, Tokenizer

LossOn = Literal["last", "all"]
Span = tuple[int, int]

_STAND_IN = "zqx7STANDIN7xqz"


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A conversation as text."""

    text: str
    spans: tuple[Span, ...]
    """`[start, stop)` characters of each trained message, in order."""


def trained_messages(conversation: Conversation, loss_on: LossOn, place: str) -> list[int]:
    """Return the assistant's messages that are trained on: all after the prompt, or the last. Raises DataError for none."""
    found = [
        index
        for index, message in enumerate(conversation.messages)
        if message["role"] == "assistant" and index >= conversation.num_given
    ]
    if not found:
        roles = ", ".join(message["role"] for message in conversation.messages)
        raise DataError(f"{place}: no message of an assistant to train on (roles: {roles}). Fix or drop the row.")
    return found if loss_on == "all" else found[-1:]


class LossSpans:
    """Renders conversations with one tokenizer's template and finds what the assistant wrote."""

    def __init__(
        self, tokenizer: Tokenizer, template_kwargs: Mapping[str, Any], images: ImageReading | None = None
    ) -> None:
        """`template_kwargs` are handed to the template; `images` is how they are read, where the model reads any. Raises
        DataError where it cannot render a conversation."""
        self._tokenizer, self._images = tokenizer, images
        self._kwargs = dict(template_kwargs)
        question: ChatMessage = {"role": "user", "content": "1"}
        try:
            asked, opened = (self._render([question], generation_prompt=opens) for opens in (False, True))
            left, right = (self._render([question, {"role": "assistant", "content": text}]) for text in ("2", "3"))
        except Exception as error:  # templates raise errors of their own
            raise DataError(
                f"the chat template cannot render a question and an answer ({type(error).__name__}: {error}). Use a "
                "model with a chat template, or data.chat_template=false for rows of texts."
            ) from error
        if left == right:
            raise DataError("the chat template leaves the assistant's text out. Use a model with another template.")
        self._has_generation_prompt = asked != opened
        self._closing = _common_suffix(left, right).rstrip()

    def render(self, conversation: Conversation, trained: Sequence[int], place: str) -> Rendered:
        """Return the text and the spans of the messages `trained`. Raises DataError naming the row."""
        messages, tools = conversation.messages, conversation.tools
        try:
            text = self._render(messages, tools)
        except Exception as error:
            raise DataError(
                f"{place}: the chat template refused the messages: {error}. Fix or drop the row."
            ) from error
        spans = []
        for index in trained:
            start = self._start(text, messages, tools, index, place)
            spans.append((start, self._stop(text, start, messages[index], place)))
        return Rendered(text=text, spans=tuple(spans))

    def _start(
        self, text: str, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], index: int, place: str
    ) -> int:
        before = self._before(messages, tools, index)
        if before is not None and text.startswith(before) and self._has_generation_prompt:
            return len(before)
        start = self._start_of_content(text, messages, tools, index)
        if start is None:
            raise DataError(
                f"{place}: cannot tell where the text of message {index} begins in the rendered conversation, because "
                "the template rewrites earlier messages. Set data.loss_on=last, or use another template."
            )
        if before is not None and text.startswith(before) and not text[len(before) : start].strip():
            return len(before)  # no generation prompt: the blank before an answer is part of its first token
        return start

    def _before(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], index: int) -> str | None:
        """Return what precedes the assistant's own text when it is generated; None where the template refuses that."""
        try:
            return self._render(messages[:index], tools, generation_prompt=True)
        except Exception:  # e.g. a template that reads messages[0] of a conversation that the assistant opens
            return None

    def _start_of_content(
        self, text: str, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], index: int
    ) -> int | None:
        """Find where the content of message `index` begins: there another content would stand."""
        replaced = [*messages[:index], {**messages[index], "content": _STAND_IN}, *messages[index + 1 :]]
        other = self._render(replaced, tools)
        start = other.find(_STAND_IN)
        return start if start >= 0 and other[:start] == text[:start] else None

    def _stop(self, text: str, start: int, message: ChatMessage, place: str) -> int:
        content = str(message["content"])
        if not text.startswith(content, start):
            content = content.strip()  # as many templates do
        if not self._closing:  # a template without such a mark: the content and no more
            found = text.find(content, start)
            return found + len(content) if found >= 0 else len(text)
        search_from = start
        if self._closing.strip() in content:
            search_from = text.find(content, start) + len(content)
            if search_from < start + len(content):
                raise DataError(
                    f"{place}: the assistant's text contains {self._closing.strip()!r}, which ends its turn. "
                    "Fix or drop the row."
                )
        closing = text.find(self._closing, search_from)
        return closing + len(self._closing) if closing >= 0 else len(text)

    def _render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        generation_prompt: bool = False,
    ) -> str:
        rendered = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **self._kwargs,
        )
        return str(rendered) if self._images is None else self._images.written(str(rendered), self._tokenizer)


def _common_suffix(left: str, right: str) -> str:
    length = 0
    while length < min(len(left), len(right)) and left[-1 - length] == right[-1 - length]:
        length += 1
    return left[len(left) - length :]
