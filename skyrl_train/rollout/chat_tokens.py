"""Conversations as token ids: the first prompt by the chat template, every later one by appending.

A conversation grows by the template's delta for what the environment said, never by re-tokenising the model's own
text: what was sampled stays in the context token by token. The delta is the difference between the renderings of a
fixed short conversation with and without the new messages, which is valid where the template is prefix-stable. That is
checked once per tokenizer; where it is not (some templates strip earlier reasoning), the whole conversation is
rendered again. Which earlier turn the result continues, if any, is then found by comparing tokens
(`types.find_parent`).

A base model has no template: its prompts are the tokens of their text, and what the environment says is appended as text.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from skyrl_train.data.sources import ImageReading, references_in, refuse_images
from skyrl_train.errors import ConfigError, DataError, Violation
from skyrl_train.images import ImageSpans, expanded
from skyrl_train.parts import ENVIRONMENTS, TOOLS
from skyrl_train.registry import PartSpec, split_spec
from skyrl_train.rollout.boundary import EnvironmentFailed, column_in, describe, invalid_observation
from skyrl_train.rollout.tools.toolbox import Schema
from skyrl_train.system.files import shown
from skyrl_train.types import ChatMessage, Prompt, TokenIds, Tokenizer, token_ids

_QUESTION = "1"
_ANSWERS = (("2", "3"), ("b", "c"), ("yes", "no"))
"""Pairs of short answers; a small vocabulary may know only some of them."""
_NO_KWARGS: Mapping[str, Any] = {}
_PROBE: tuple[ChatMessage, ...] = ({"role": "user", "content": "1"},)


class ChatTokens:
    """The conversation's side of a tokenizer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_format: Literal["auto", "chat", "text"] = "auto",
        template_kwargs: Mapping[str, Any] = _NO_KWARGS,
        images: ImageReading | None = None,
    ) -> None:
        """`prompt_format` and `template_kwargs` as in `data`; `images`: how they are read, None for a model that reads none.
        Raises DataError where the chat template is of no use."""
        self._tokenizer, self._template_kwargs = tokenizer, template_kwargs
        self._images = images
        self._special_ids = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self.is_text = prompt_format == "text" or (prompt_format == "auto" and not tokenizer.chat_template)
        if self.is_text:
            return
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

    def first_prompt(self, messages: Sequence[ChatMessage], tools: Sequence[Schema] = ()) -> TokenIds:
        """Return the conversation so far and the opening of the assistant's turn, `[prompt]`; `tools` are those that the
        model may call. A base model gets the texts with an empty line between them, after what its tokenizer puts before
        every text.

        Raises EnvironmentFailed (invalid_observation) where the template refuses the messages.
        """
        if self.is_text:
            return token_ids(self._tokenizer(_text_of(messages))["input_ids"])
        try:
            return token_ids(self._render(messages, tools=tools, add_generation_prompt=True))
        except Exception as error:
            raise invalid_observation(f"the chat template refused the messages: {describe(error)}") from error

    def data_prompt(self, prompt: Prompt, tools: Sequence[Schema] = ()) -> TokenIds:
        """Return the `first_prompt` of a data row, with `tools`, or those of its own. Raises DataError naming the row that
        the template refuses, or that is more than a text where there is none."""
        place, tools = prompt.place or f"prompt {prompt.uid}", tools or prompt.tools
        if self.is_text and (tools or any(each["role"] not in ("system", "user") for each in prompt.messages)):
            raise DataError(
                f"{place}: is a conversation, or has tools, and the model reads plain text: there is no chat template, or "
                "data.prompt_format=text. Make 'prompt' one text, or put a chat_template.jinja beside the tokenizer."
            )
        if self._images is None:
            refuse_images(prompt)  # which the template may refuse, or leave out
        try:
            return self.first_prompt(prompt.messages, tools)
        except EnvironmentFailed as broken:
            raise DataError(f"{place}: {broken.message}. Fix or drop the row.") from broken

    def next_prompt(
        self,
        *,
        context: TokenIds,
        response: tuple[int, ...],
        history: Sequence[ChatMessage],
        observations: Sequence[ChatMessage],
        tools: Sequence[Schema] = (),
    ) -> TokenIds:
        """Return the prompt after the environment answered, `[prompt]`.

        Args:
            context: The previous prompt, `[previous prompt]`.
            response: The tokens sampled after it.
            history: The conversation as messages up to and including that response (used where the template is not
                prefix-stable).
            observations: What the environment, or the tools, said; to a base model its texts follow the response as they
                are.
            tools: What the model may call.
        """
        if self.is_text:
            text = self._tokenizer(_text_of(observations), add_special_tokens=False)["input_ids"]
            return token_ids(np.concatenate([context, np.array([*response, *text], dtype=np.int32)]))
        said = history[-1] if history and history[-1].get("tool_calls") else None
        # Templates that rewrite earlier turns keep those that a tool's result follows; the delta says whether they do.
        if self.prefix_stable or said is not None:
            try:
                delta = self._delta(*(json.dumps(each) for each in (said, observations, tools)))
            except Exception as error:
                raise invalid_observation(f"the chat template refused the messages: {describe(error)}") from error
            if delta is not None:
                after_turn, opening = delta
                added = np.array([*response, *_missing(after_turn, response), *opening], dtype=np.int32)
                return token_ids(np.concatenate([context, added]))
        return self.first_prompt([*history, *observations], tools)

    def with_references(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Return what an environment said with references in place of its images. Raises EnvironmentFailed
        (invalid_observation)."""
        if self._images is None or self.is_text:
            if references_in(messages):
                lacks = "there is no chat template" if self.is_text else "the model reads none"
                raise invalid_observation(f"an environment or a tool showed an image, and {lacks}")
            return list(messages)
        try:
            return self._images.with_references(messages)
        except DataError as error:
            raise invalid_observation(str(error)) from error

    def images_in(self, prompt: TokenIds, messages: Sequence[ChatMessage], start: int = 0) -> ImageSpans:
        """Return where the images of `messages`, whose tokens begin at `start`, stand in a prompt. Raises EnvironmentFailed
        (invalid_observation)."""
        if self._images is None:
            return ()
        try:
            return self._images.spans(prompt, messages, start)
        except (ValueError, DataError) as error:
            raise invalid_observation(describe(error)) from error

    @functools.cached_property
    def longest_token(self) -> int:
        """The most characters that a token of the vocabulary stands for."""
        return max(map(len, self._tokenizer.get_vocab()))

    def text(self, response: Sequence[int]) -> str:
        """Return a response as the environment reads it: without special tokens."""
        return str(self._tokenizer.decode(list(response), skip_special_tokens=True))

    def text_with_calls(self, response: Sequence[int]) -> str:
        """Return a response as parsers of tool calls read it: with special tokens, but for the one that ended it."""
        ended = len(response) > 0 and response[-1] in self._special_ids
        return str(self._tokenizer.decode(list(response[:-1] if ended else response), skip_special_tokens=False))

    def shows(self, tools: Sequence[Schema]) -> bool:
        """Whether the template puts the tools into a prompt."""
        if self.is_text:
            return False
        with_tools, without = (self._render(_PROBE, tools=each, add_generation_prompt=True) for each in (tools, ()))
        return with_tools != without

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

    def _delta_of_json(
        self, said_json: str, observations_json: str, tools_json: str
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return what ends the assistant's turn, and the tokens of the observations and the next opening; None where these
        messages break the prefix.

        They follow a short answer, or the calls in `said_json`, without which some templates refuse what a tool answers.
        """
        said, observations, tools = json.loads(said_json), json.loads(observations_json), json.loads(tools_json)
        before = self._short if said is None else (*_PROBE, {**said, "content": ""})
        base = self._render(before, tools=tools, add_generation_prompt=False) if said or tools else self._base
        full = self._render((*before, *observations), tools=tools, add_generation_prompt=True)
        return (_common_suffix(base, self._after_answer), full[len(base) :]) if full[: len(base)] == base else None

    def _render(
        self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool, tools: Sequence[Schema] = ()
    ) -> tuple[int, ...]:
        render = functools.partial(
            self._tokenizer.apply_chat_template,
            [dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            **({"tools": [dict(tool) for tool in tools]} if tools else {}),
            **self._template_kwargs,
        )
        if self._images is not None and self._images.marks is not None and references_in(messages):
            text = self._images.written(str(render(tokenize=False)), self._tokenizer)
            rendered = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            rendered = render(tokenize=True, return_dict=False)
        token_ids = tuple(int(token_id) for token_id in rendered)
        if self._images is not None:
            return tuple(expanded(token_ids, self._images.placeholder, self._images.of(messages)))
        if references_in(messages):
            raise ValueError("it has images, and the model reads none: give model.path one that does")
        return token_ids


def _missing(after: tuple[int, ...], response: tuple[int, ...]) -> tuple[int, ...]:
    """Return `after` without what of its beginning `response` ends with.

    With `<|im_end|>` and a newline after each answer: only the newline for a response that ended by itself, both for one
    that was cut by its length. These tokens were not sampled and belong to the next prompt.
    """
    for overlap in range(min(len(after), len(response)), 0, -1):
        if response[-overlap:] == after[:overlap]:
            return after[overlap:]
    return after


def _text_of(messages: Sequence[ChatMessage]) -> str:
    return "\n\n".join(str(message["content"]) for message in messages)


def _common_suffix(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    length = 0
    while length < min(len(left), len(right)) and left[-1 - length] == right[-1 - length]:
        length += 1
    return left[len(left) - length :]


def with_context(prompt: Prompt, name: str) -> Prompt:
    """Return the data row with its column `name` (dots go into nested columns) after its last message's text.

    Raises DataError naming the row and the column where it has no such text.
    """
    value = column_in(prompt.extras, name)
    last = prompt.messages[-1] if prompt.messages else {}
    if not isinstance(value, (str, int, float)) or not str(value) or not isinstance(last.get("content"), str):
        raise DataError(
            f"prompt {prompt.uid} has no text {name!r} to show the teacher after its last message. "
            "Set generator.privileged_context to a column that every row has."
        )
    return replace(prompt, messages=(*prompt.messages[:-1], {**last, "content": f"{last['content']}\n\n{value}"}))


def check_tools(
    prompts: Sequence[Prompt],
    tools: Sequence[Schema],
    chat: ChatTokens,
    *,
    reads_calls: bool,
    environment: PartSpec | None,
) -> None:
    """Check, before a model is loaded, that the model sees the tools and that its calls can be read.

    Args:
        tools: `environment.tools`, as chat templates take them.
        reads_calls: Whether the format of calls is known.
        environment: `environment.env_class`; a bundled one has no tools of its own.

    Raises ConfigError, or DataError for a row that offers a tool that there is not.
    """
    names = [tool["function"]["name"] for tool in tools]
    all_tools = {tool["function"]["name"]: tool for tool in tools}
    for prompt in prompts:
        for tool in prompt.tools:
            function = tool.get("function")
            name = function.get("name") if isinstance(function, Mapping) else None
            if not isinstance(name, str):
                raise DataError(
                    f"{prompt.place or prompt.uid}: 'tools' has {shown(tool)}, which is no schema of a function. Write "
                    '{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}.'
                )
            if name not in names and environment is not None and split_spec(environment)[0] in ENVIRONMENTS:
                known = ", ".join(names) or "none"
                raise DataError(
                    f"{prompt.place or prompt.uid}: offers the tool {name!r}, and environment.tools has {known}. "
                    f"Add a function of that name to environment.tools, or drop it from the row."
                )
            all_tools[name] = tool
    rule = remedy = ""
    if all_tools and not chat.shows(list(all_tools.values())):
        rule = "cannot be shown to the model: its chat template ignores tools"
        remedy = "Use a model whose template renders `tools`, or put such a chat_template.jinja beside it"
    elif all_tools and not reads_calls:
        rule = "need environment.tool_format: the chat template writes calls in no format that is known"
        remedy = "Set it to the format that the model was trained on"
    if rule:
        raise ConfigError([Violation(field=TOOLS.setting, rule=rule, value=", ".join(all_tools), remedy=remedy)])
