"""Plain data: what JSON holds, and how what an environment gives is made into it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import islice
from typing import Any, SupportsFloat

from skyrl_train.errors import counted
from skyrl_train.system.files import is_text, shown

_FLOAT32_MAX = 3.4028234663852886e38
_MAX_DEPTH = 32
_MAX_INTEGER_BITS = 1024
_MAX_METRICS = 1000
MAX_METRIC_NAME = 200
_MAX_STATE_CHARACTERS = 1 << 20
"""As JSON, which is written to the journal after each call."""


def numbers_only(metrics: object) -> dict[str, float]:
    """Return the finite numbers among an environment's metrics, whose names are texts of at most 200 characters; what is
    beyond the first thousand is left out."""
    if not isinstance(metrics, Mapping):
        return {}
    numbers: dict[str, float] = {}
    for key, value in islice(metrics.items(), _MAX_METRICS):
        name, number = str(key), number_in(value, _FLOAT32_MAX)
        if number is not None and len(name) <= MAX_METRIC_NAME and is_text(name):
            numbers[name] = number
    return numbers


def plain(value: object, where: str, depth: int = 0) -> Any:
    """Return `value` as plain data: containers copied, tuples as lists, numpy's scalars as Python's.

    `where` names the value in messages, e.g. `message 0`. Raises ValueError naming the part that is no plain data.
    """
    value = scalar(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if is_text(value):
            return str(value)
        raise ValueError(f"{where} is a text that UTF-8 cannot hold (a lone surrogate)")
    if isinstance(value, int) and value.bit_length() <= _MAX_INTEGER_BITS:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if depth > _MAX_DEPTH:
        raise ValueError(f"{where} is nested more than {_MAX_DEPTH} deep")
    if isinstance(value, (list, tuple)):
        return [plain(each, f"{where}[{index}]", depth + 1) for index, each in enumerate(value)]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and is_text(key) for key in value):
            return {str(key): plain(each, f"{where}.{key}", depth + 1) for key, each in value.items()}
        raise ValueError(f"{where} has a key that is no text")
    rule = "must be a text, a number, true, false, null, a list or a mapping of them"
    raise ValueError(f"{where} is {shown(value)} ({type(value).__name__}); {rule}")


def plain_state(value: object) -> Any:
    """Return an environment's state as plain data. Raises ValueError naming what is none, or how large it is."""
    state = plain(value, "the state")
    if (size := len(json.dumps(state))) > _MAX_STATE_CHARACTERS:
        raise ValueError(
            f"the state has {counted(size, 'character', ',')} as JSON; must have at most {_MAX_STATE_CHARACTERS:,}. "
            "Leave get_state out, or keep in it what cannot be derived from the row"
        )
    return state


def scalar(value: Any) -> Any:
    """Return numpy's (or torch's) single numbers as Python's, without importing either."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "dtype") else value


def number_in(value: object, most: float) -> float | None:
    try:
        # a protocol takes far longer to look for than what most numbers are
        if isinstance(value, (float, int, SupportsFloat)) and abs(number := float(value)) <= most:
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    return None
