"""The columns of data rows by name, alike in reinforcement learning and in supervised training: messages, tools, answers.

A name goes into nested columns by its dots: `extra_info.question`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_train.config.data import DataConfig
from skyrl_train.data.rows import Row
from skyrl_train.errors import DataError
from skyrl_train.registry import did_you_mean
from skyrl_train.system.files import parse_json, shown
from skyrl_train.types import ChatMessage

PROMPT = "prompt"
PROMPTS = (PROMPT, "question", "problem", "query")
"""Columns that hold the prompt where `data.prompt_column` is not set, the first that a row has."""
_ANSWERS = ("reward_model.ground_truth", "answer", "ground_truth", "solution", "completion")
"""Columns that hold the answer where `data.answer_column` is not set: verl's, GSM8K's and their like, TRL's."""
_GSM8K_ANSWER = re.compile(r"-?\d+(\.\d+)?")
_REMEDY = 'Write [{"role": "user", "content": "..."}]'


def look_up(values: Mapping[str, Any], path: str) -> Any:
    """Return the value of a column, by its whole name or with dots into nested ones; None where there is none."""
    if path in values:
        return values[path]
    value: Any = values
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def prompt_column(values: Mapping[str, Any], data: DataConfig) -> str | None:
    """Return the name of the column with the prompt; None where the row has none."""
    names = PROMPTS if data.prompt_column == PROMPT else (data.prompt_column,)
    return next((name for name in names if look_up(values, name) is not None), None)


def answer_columns(row: Row, data: DataConfig) -> dict[str, Any]:
    """Return the columns that rewards and environments find the answer in: `answer`, as the row has it, and the ground truth
    under `reward_spec` (skyrl-gym's environments) and `reward_model` (verl's, and skyrl-gym's `aime`).

    Without `data.answer_column`, a row with a `reward_spec` of its own has all that it needs, and one without any column of
    a known name has no answer: both get none. Raises DataError where the stated column is not there.
    """
    own = data.answer_column
    if not own and "reward_spec" in row.values:
        return {}
    name = next((each for each in ((own,) if own else _ANSWERS) if look_up(row.values, each) not in (None, "")), None)
    if name is None:
        if own:
            raise DataError(
                f"{row.place}: has no {own!r}, which data.answer_column names; it has {names_of(row.values)}. "
                f"{near_column(own, row.values)}Name a column that every row has."
            )
        return {}
    answer = look_up(row.values, name)
    if not isinstance(answer, str) and (name == "completion" or (own and isinstance(answer, (list, tuple)) and answer)):
        answer = str(chat_messages(answer, row.place, name)[-1]["content"])
    found: dict[str, Any] = {} if "answer" in row.values and not own else {"answer": answer}
    for column in ("reward_spec", "reward_model"):
        given = row.values.get(column)
        if own or given is None:
            others = {"method": "rule"} if column == "reward_spec" else {"style": "rule"}
            found[column] = {**(given if isinstance(given, Mapping) else others), "ground_truth": ground_truth(answer)}
    return found


def ground_truth(answer: object) -> object:
    """Return what a response is compared with: a number as its text, of a worked solution of GSM8K's format the number
    behind its `#### `, anything else as it is."""
    if isinstance(answer, str):
        try:
            return extract_gsm8k_answer(answer)
        except ValueError:
            return answer
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        return str(int(answer)) if isinstance(answer, float) and answer.is_integer() else str(answer)
    return answer


def extract_gsm8k_answer(solution: str) -> str:
    """Return the number after the last `#### `, without commas. Raises ValueError where there is none."""
    _, mark, tail = solution.rpartition("#### ")
    answer = tail.strip().replace(",", "").removeprefix("$")
    if not mark or not _GSM8K_ANSWER.fullmatch(answer):
        raise ValueError(f"no number after '#### ' in {solution[-40:]!r}")
    return answer


def chat_messages(value: object, place: str, column: str) -> tuple[ChatMessage, ...]:
    """Return chat messages with a role each, and a text or tool calls. Text parts become one text."""
    if not isinstance(value, (list, tuple)) or not value:
        raise DataError(
            f"{place}: {column!r} must be a list of chat messages or a text; got {shown(value)}. {_REMEDY}."
        )
    return tuple(_message(message, place, f"message {index} of {column!r}") for index, message in enumerate(value))


def _message(value: object, place: str, name: str) -> ChatMessage:
    if not isinstance(value, Mapping):
        raise DataError(f"{place}: {name} must be an object; got {shown(value)}. {_REMEDY}.")
    # Parquet gives each message the keys of all messages; those it lacks are null.
    message = {key: part for key, part in value.items() if part is not None}
    if not isinstance(message.get("role"), str):
        raise DataError(f"{place}: {name} has no text under 'role'; it is {shown(value)}. {_REMEDY}.")
    if message.get("tool_calls"):
        message.setdefault("content", "")
    content = message["content"] = _text(message.get("content"), place, name)
    if content is None:
        raise DataError(f"{place}: {name} has no text under 'content'; it is {shown(value)}. {_REMEDY}.")
    if not content and message["role"] == "assistant" and not message.get("tool_calls"):
        raise DataError(
            f"{place}: {name} is an assistant's without a text and without tool calls. Fix or drop the row."
        )
    return message


def _text(content: object, place: str, name: str) -> str | list[dict[str, str]] | None:
    """Return a text, the text of parts (`[{"type": "text", "text": ...}]`), or these parts where references to images are
    among them; None for anything else.

    Raises DataError for a part that is neither.
    """
    if isinstance(content, str) or not isinstance(content, (list, tuple)):
        return content if isinstance(content, str) else None
    texts: list[str] = []
    parts: list[dict[str, str]] = []
    for index, part in enumerate(content):
        if isinstance(part, Mapping) and part.get("type") == "image" and isinstance(part.get("image"), str):
            parts.append({"type": "image", "image": part["image"]})
            continue
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            raise DataError(
                f"{place}: part {index} of the content of {name} is no text; got {shown(part)}. Only parts "
                '{"type": "text", "text": "..."} are read: leave others out, or drop the row.'
            )
        texts.append(text)
        parts.append({"type": "text", "text": text})
    return "".join(texts) if len(texts) == len(parts) else parts


def tools_of(row: Row) -> tuple[Mapping[str, Any], ...]:
    """Return `tools`, given as a list or as JSON, which is how files with one type per column hold it."""
    tools: object = row.values.get("tools")
    if isinstance(tools, str):
        try:
            tools = parse_json(tools) if tools.strip() else None
        except ValueError as error:
            raise DataError(f"{row.place}: 'tools' is a text that is {error}.") from error
    if tools is None:
        return ()
    if (
        not isinstance(tools, Sequence)
        or isinstance(tools, str)
        or not all(isinstance(tool, Mapping) for tool in tools)
    ):
        raise DataError(f"{row.place}: 'tools' must be a list of objects; got {shown(tools)}.")
    return tuple(tools)


def near_column(name: str, values: Mapping[str, Any]) -> str:
    """Return `Did you mean 'answer'? `, of a row's columns, for a name with dots also of what is inside them; empty where
    none is near."""
    known = list(map(str, values))
    if "." in name:
        known += [f"{key}.{inner}" for key, value in values.items() if isinstance(value, Mapping) for inner in value]
    near = did_you_mean(name, known)
    return f"{near[0].upper()}{near[1:]} " if near else ""


def names_of(values: Mapping[str, Any]) -> str:
    """Return the names of a row's columns for a message."""
    return ", ".join(sorted(map(str, values))) or "nothing"
