"""Rows of supervised data in the ecosystem's formats, as conversations or as plain text.

    chat                {"messages": [{"role": "user", ...}, {"role": "assistant", ...}], "tools": [...]}
    prompt_completion   {"prompt": text or messages, "completion": text or messages}
    alpaca              {"instruction": text, "input": text, "output": text, "system": text}
    text                {"text": text}

`auto` looks at a row's columns, in this order. Which columns hold prompt and completion can be set, with dots into
nested ones: `extra_info.answer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_train.config import SFTDataConfig
from skyrl_train.data.columns import chat_messages, look_up, names_of, tools_of
from skyrl_train.data.rows import Row
from skyrl_train.errors import DataError
from skyrl_train.system.files import json_problem, shown
from skyrl_train.types import ChatMessage


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Rendered by the chat template."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """What the model may call, as the template takes it."""
    num_given: int = 0
    """Messages of the prompt: never trained on, whatever their role."""


@dataclass(frozen=True, kw_only=True)
class PlainText:
    """Trained as it is, without a template; an end-of-sequence token follows."""

    prompt: str
    """Read, not trained on; may be empty."""
    completion: str


Content = Conversation | PlainText


def read_content(row: Row, data: SFTDataConfig) -> Content:
    """Return what to train on in `row`. Raises DataError naming the row, what it has and what it needs."""
    content = _read_content(row, data)
    if problem := json_problem(vars(content)):
        raise DataError(f"{row.place}: {problem}. Write a text in its place, or drop the row.")
    return content


def _read_content(row: Row, data: SFTDataConfig) -> Content:
    if data.format != "auto":
        needed, read = _READERS[data.format]
        missing = [name for name in needed(data) if look_up(row.values, name) is None]
        if missing:
            raise _unreadable(row, f"data.format={data.format} needs {' and '.join(map(repr, missing))}")
        return read(row, data)
    for needed, read in _READERS.values():
        if all(look_up(row.values, name) is not None for name in needed(data)):
            return read(row, data)
    known = "; ".join(f"{name}: {' and '.join(needed(data))}" for name, (needed, _) in _READERS.items())
    raise _unreadable(row, f"no format fits ({known})")


def _unreadable(row: Row, problem: str) -> DataError:
    return DataError(
        f"{row.place}: {problem}; the row has {names_of(row.values)}. "
        "Name its columns with data.prompt_column and data.completion_column, or rename them."
    )


def _read_chat(row: Row, data: SFTDataConfig) -> Content:
    del data
    messages = chat_messages(row.values["messages"], row.place, "messages")
    return Conversation(messages=messages, tools=tools_of(row))


def _read_prompt_completion(row: Row, data: SFTDataConfig) -> Content:
    prompt = look_up(row.values, data.prompt_column)
    completion = look_up(row.values, data.completion_column)
    if isinstance(prompt, str) and isinstance(completion, str) and not data.chat_template:
        return PlainText(prompt=prompt, completion=completion)
    given = _said_by("user", prompt) or chat_messages(prompt, row.place, data.prompt_column)
    trained = _said_by("assistant", completion) or chat_messages(completion, row.place, data.completion_column)
    return Conversation(messages=(*given, *trained), tools=tools_of(row), num_given=len(given))


def _read_alpaca(row: Row, data: SFTDataConfig) -> Content:
    parts = {name: row.values.get(name) or "" for name in ("system", "instruction", "input", "output")}
    for name, value in parts.items():
        if not isinstance(value, str):
            raise DataError(f"{row.place}: {name!r} must be a text; got {shown(value)}.")
    question = "\n\n".join(parts[name] for name in ("instruction", "input") if parts[name])
    if not data.chat_template:
        prompt = "\n\n".join(part for part in (parts["system"], question) if part)
        return PlainText(prompt=f"{prompt}\n\n", completion=parts["output"])
    given = (*(_said_by("system", parts["system"]) if parts["system"] else ()), *_said_by("user", question))
    return Conversation(messages=(*given, *_said_by("assistant", parts["output"])), num_given=len(given))


def _read_text(row: Row, data: SFTDataConfig) -> Content:
    del data
    text = row.values["text"]
    if not isinstance(text, str):
        raise DataError(f"{row.place}: 'text' must be a text; got {shown(text)}.")
    return PlainText(prompt="", completion=text)


_READERS: dict[str, tuple[Callable[[SFTDataConfig], tuple[str, ...]], Callable[[Row, SFTDataConfig], Content]]] = {
    "chat": (lambda _: ("messages",), _read_chat),
    "prompt_completion": (lambda data: (data.prompt_column, data.completion_column), _read_prompt_completion),
    "alpaca": (lambda _: ("instruction", "output"), _read_alpaca),
    "text": (lambda _: ("text",), _read_text),
}
"""Format to the columns it needs and its reader, in the order in which `auto` tries them."""


def _said_by(role: str, text: object) -> tuple[ChatMessage, ...]:
    """Return one message; none where `text` is not a text."""
    return ({"role": role, "content": text},) if isinstance(text, str) else ()
