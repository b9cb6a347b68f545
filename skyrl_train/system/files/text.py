"""JSON from outside, which may hold anything, and JSON of ours, which has to be written whatever it holds."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 64
"""Lists and objects within one another that a value from outside may have; Python's own JSON gives up near a thousand."""
_MAX_INTEGER_BITS = 4096
"""More have more digits than Python turns into text."""
_SHOWN = 80
"""Characters of a value in a message."""
_REPR = reprlib.Repr()
# Bounds the work of showing a huge value; what it gives is cut after that.
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = _SHOWN + 1
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = _REPR.maxset = _SHOWN // 2


def parse_json(text: str | bytes) -> Any:
    """Return the value that a JSON text holds. Raises ValueError, in a few words, whatever else it is."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(f"not valid JSON ({error.msg} at {line}column {error.colno})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text ({error.reason} at byte {error.start})") from None
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    except ValueError:
        raise ValueError("JSON with an integer of more than 4300 digits") from None


def json_problem(value: object) -> str:
    """Return where and why a value cannot be written as JSON in UTF-8, e.g. `'score[2]' is nan`; empty where it can.

    What JSON has no type for, such as a date, is written as its text and is no problem.
    """
    found = _problem(value, 0)
    return "" if found is None else f"{found[0].removeprefix('.')!r} {found[1]}"


def json_text(value: object) -> str:
    """Return JSON that UTF-8 can hold, whatever the value holds: NaN and infinities become their names, half characters
    their escapes, what cannot be shown the name of its type."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=str)
        if is_text(text):
            return text
    except Exception:  # of the value, or of an object in it that has no text
        pass
    return json.dumps(_writable(value, 0), ensure_ascii=False, allow_nan=False)


def json_line(record: Mapping[str, Any]) -> bytes:
    """Return a line of JSON in UTF-8, whatever the record holds, as `json_text` does."""
    return f"{json_text(record)}\n".encode()


def writable_text(text: str) -> str:
    """Return a text that UTF-8 can hold: half characters become their escapes."""
    return text if is_text(text) else text.encode(errors="backslashreplace").decode()


def _problem(value: object, depth: int) -> tuple[str, str] | None:
    """Return the path within `value` and what is wrong there."""
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, str):
        return None if is_text(value) else ("", "has half of a character (a lone surrogate), which UTF-8 cannot hold")
    if isinstance(value, float):
        return None if math.isfinite(value) else ("", f"is {value}, and JSON has no such number")
    if isinstance(value, int):
        return None if value.bit_length() <= _MAX_INTEGER_BITS else ("", "is an integer of more than 1200 digits")
    if not isinstance(value, (Mapping, list, tuple)):
        return None if _text_of(value) is not None else ("", f"is a {type(value).__name__} that has no text")
    if depth >= MAX_DEPTH:
        return "", f"is nested deeper than {MAX_DEPTH} levels"
    if isinstance(value, Mapping):
        for key, each in value.items():
            if not isinstance(key, str) or not is_text(key):
                return "", f"has the name {_name(key)}, which is no text"
            if (found := _problem(each, depth + 1)) is not None:
                return f".{key}{found[0]}", found[1]
        return None
    for index, each in enumerate(value):
        if (found := _problem(each, depth + 1)) is not None:
            return f"[{index}]{found[0]}", found[1]
    return None


def _writable(value: object, depth: int) -> Any:
    """Return what is written in place of a value."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if value.bit_length() <= _MAX_INTEGER_BITS else hex(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping) and depth < MAX_DEPTH:
        return {_name(key): _writable(each, depth + 1) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and depth < MAX_DEPTH:
        return [_writable(each, depth + 1) for each in value]
    return _name(value)


def _name(value: object) -> str:
    text = _text_of(value)
    return writable_text(f"<{type(value).__name__}>" if text is None else text)


def shown(value: object) -> str:
    """Return a value from outside for an error message, as Python writes it, in at most 80 characters, whatever it is."""
    try:
        text = _REPR.repr(value)
    except Exception:  # of an object that fails, or a number with too many digits
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _text_of(value: object) -> str | None:
    try:
        return str(value)
    except Exception:
        return None


def is_text(value: str) -> bool:
    """Return whether UTF-8 can hold a text: it has no lone surrogate."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
