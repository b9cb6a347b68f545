"""Rows of supervised data in the ecosystem's formats, as conversations or as plain text.

    chat                {"messages": [{"role": "user", ...}, {"role": "assistant", ...}], "tools": [...]}
    prompt_completion   {"prompt": text or messages, "completion": text or messages}
    alpaca              {"instruction": text, "input": text, "output": text, "system": text}
    text                {"text": text}

`auto` looks at a row's columns, in this order. Which columns hold prompt and completion can be set, with dots into
nested ones: `extra_info.answer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from skyrl_train.data.rows import Row
from skyrl_train.errors import DataError
from skyrl_train.telemetry.json_text import json_problem, parse_json
from skyrl_train.types import ChatMessage

Format = Literal["auto", "chat", "prompt_completion", "alpaca", "text"]


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


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """How rows are read."""

    format: Format = "auto"
    prompt_column: str = "prompt"
    completion_column: str = "completion"
    chat_template: bool = True
    """True: prompt and completion (and Alpaca's columns) given as text become a user's and an assistant's message."""


def read_content(row: Row, form: RowFormat) -> Content:
    """Return what to train on in `row`. Raises DataError naming the row, what it has and what it needs."""
    content = _read_content(row, form)
    if problem := json_problem(vars(content)):
        raise DataError(f"{row.place}: {problem}. Write a text in its place, or drop the row.")
    return content


def _read_content(row: Row, form: RowFormat) -> Content:
    if form.format != "auto":
        needed, read = _READERS[form.format]
        missing = [name for name in needed(form) if _look_up(row.values, name) is None]
        if missing:
            raise _unreadable(row, f"data.format={form.format} needs {' and '.join(map(repr, missing))}")
        return read(row, form)
    for needed, read in _READERS.values():
        if all(_look_up(row.values, name) is not None for name in needed(form)):
            return read(row, form)
    known = "; ".join(f"{name}: {' and '.join(needed(form))}" for name, (needed, _) in _READERS.items())
    raise _unreadable(row, f"no format fits ({known})")


def _unreadable(row: Row, problem: str) -> DataError:
    columns = ", ".join(sorted(map(str, row.values))) or "nothing"
    return DataError(
        f"{row.place}: {problem}; the row has {columns}. "
        "Name its columns with data.prompt_column and data.completion_column, or rename them."
    )


def _look_up(values: Mapping[str, Any], path: str) -> Any:
    """Return the value under a column's name, or under dots into nested columns; None where there is none."""
    if path in values:
        return values[path]
    value: Any = values
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _read_chat(row: Row, form: RowFormat) -> Content:
    del form
    messages = _messages(row.values["messages"], row.place, "messages")
    return Conversation(messages=messages, tools=_tools(row))


def _read_prompt_completion(row: Row, form: RowFormat) -> Content:
    prompt = _look_up(row.values, form.prompt_column)
    completion = _look_up(row.values, form.completion_column)
    if isinstance(prompt, str) and isinstance(completion, str) and not form.chat_template:
        return PlainText(prompt=prompt, completion=completion)
    given = _said_by("user", prompt) or _messages(prompt, row.place, form.prompt_column)
    trained = _said_by("assistant", completion) or _messages(completion, row.place, form.completion_column)
    return Conversation(messages=(*given, *trained), tools=_tools(row), num_given=len(given))


def _read_alpaca(row: Row, form: RowFormat) -> Content:
    parts = {name: row.values.get(name) or "" for name in ("system", "instruction", "input", "output")}
    for name, value in parts.items():
        if not isinstance(value, str):
            raise DataError(f"{row.place}: {name!r} must be a text; got {_short(value)}.")
    question = "\n\n".join(parts[name] for name in ("instruction", "input") if parts[name])
    if not form.chat_template:
        prompt = "\n\n".join(part for part in (parts["system"], question) if part)
        return PlainText(prompt=f"{prompt}\n\n", completion=parts["output"])
    given = (*(_said_by("system", parts["system"]) if parts["system"] else ()), *_said_by("user", question))
    return Conversation(messages=(*given, *_said_by("assistant", parts["output"])), num_given=len(given))


def _read_text(row: Row, form: RowFormat) -> Content:
    del form
    text = row.values["text"]
    if not isinstance(text, str):
        raise DataError(f"{row.place}: 'text' must be a text; got {_short(text)}.")
    return PlainText(prompt="", completion=text)


_READERS: dict[str, tuple[Callable[[RowFormat], tuple[str, ...]], Callable[[Row, RowFormat], Content]]] = {
    "chat": (lambda _: ("messages",), _read_chat),
    "prompt_completion": (lambda form: (form.prompt_column, form.completion_column), _read_prompt_completion),
    "alpaca": (lambda _: ("instruction", "output"), _read_alpaca),
    "text": (lambda _: ("text",), _read_text),
}
"""Format to the columns it needs and its reader, in the order in which `auto` tries them."""


def _said_by(role: str, text: object) -> tuple[ChatMessage, ...]:
    """Return one message; none where `text` is not a text."""
    return ({"role": role, "content": text},) if isinstance(text, str) else ()


def _messages(value: object, place: str, column: str) -> tuple[ChatMessage, ...]:
    """Return chat messages with a role each, and a text or tool calls."""
    remedy = 'Write [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}].'
    if not isinstance(value, (list, tuple)) or not value:
        raise DataError(f"{place}: {column!r} must be a list of chat messages; got {_short(value)}. {remedy}")
    return tuple(_message(message, place, f"message {index} of {column!r}") for index, message in enumerate(value))


def _message(value: object, place: str, name: str) -> ChatMessage:
    if not isinstance(value, Mapping):
        raise DataError(f"{place}: {name} must be an object; got {_short(value)}.")
    # Parquet gives each message the keys of all messages; those it lacks are null.
    message = {key: part for key, part in value.items() if part is not None}
    if not isinstance(message.get("role"), str):
        raise DataError(f"{place}: {name} has no role; it is {_short(value)}.")
    content = message.setdefault("content", "")
    if not isinstance(content, str):
        raise DataError(f"{place}: {name} must have a text under 'content'; got {_short(content)}.")
    if not content and message["role"] == "assistant" and not message.get("tool_calls"):
        raise DataError(
            f"{place}: {name} is an assistant's without a text and without tool calls. Fix or drop the row."
        )
    return message


def _tools(row: Row) -> tuple[Mapping[str, Any], ...]:
    """Return `tools`, given as a list or as JSON, which is how files with one type per column hold it."""
    tools: object = row.values.get("tools")
    if isinstance(tools, str):
        try:
            tools = parse_json(tools)
        except ValueError as error:
            raise DataError(f"{row.place}: 'tools' is a text that is {error}.") from error
    if tools is None:
        return ()
    if (
        not isinstance(tools, Sequence)
        or isinstance(tools, str)
        or not all(isinstance(tool, Mapping) for tool in tools)
    ):
        raise DataError(f"{row.place}: 'tools' must be a list of objects; got {_short(tools)}.")
    return tuple(tools)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
