"""The arguments of a request, and which trajectories they choose."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from skyrl_train.errors import counted
from skyrl_train.telemetry.reading import Run

_AMONG = ("purpose", "environment", "dataset", "outcome", "failure_kind", "stop_reason", "uid", "sample")
_WITHIN = {"reward": "reward", "tokens": "tokens", "turns": "num_turns", "step": "step", "cut": "cut", "age": "age"}
_OF_REWARDS = "rewards/"
"""What the names of a reward's components begin with where they stand among metrics."""
_LONGEST_PATTERN = 1000
_LARGEST_COUNT = 2**31 - 1
_MOST_VALUES = 100
"""Of one filter."""


class NotThereError(LookupError):
    """What is asked for is in no file, or not any more."""


class Arguments:
    """The arguments of a request by name. An empty value is none."""

    def __init__(self, query: Sequence[tuple[str, str]]) -> None:
        self._values: dict[str, list[str]] = {}
        self._read: set[str] = set()
        for name, value in query:
            self._values.setdefault(name, [])
            if value != "":
                self._values[name].append(value)

    def check_all_read(self) -> None:
        """Raises ValueError for arguments that mean nothing here."""
        if unknown := sorted(set(self._values) - self._read):
            raise ValueError(f"{unknown[0]} is no argument here; there are {', '.join(sorted(self._read))}")

    def all(self, name: str) -> list[str]:
        """Return the values of an argument that may be given several times."""
        self._read.add(name)
        return self._values.get(name, [])

    def text(self, name: str) -> str:
        """Return a value, or an empty one."""
        values = self.all(name)
        return values[-1] if values else ""

    def whole(self, name: str) -> int | None:
        """Return a whole number, None where there is none. Raises ValueError."""
        text = self.text(name)
        try:
            value = int(text) if text else None
        except ValueError:
            value = _LARGEST_COUNT + 1
        if value is not None and abs(value) > _LARGEST_COUNT:
            raise ValueError(f"{name}={text[:40]} must be a whole number")
        return value

    def count(self, name: str, missing: int, *, most: int = _LARGEST_COUNT) -> int:
        """Return a number of rows. Raises ValueError."""
        value = self.whole(name)
        value = missing if value is None else value
        if not 0 <= value <= most:
            raise ValueError(f"{name}={value} must be from 0 to {most}")
        return value

    def number(self, name: str) -> float | None:
        """Return a finite number, None where there is none. Raises ValueError."""
        text = self.text(name)
        try:
            value = float(text) if text else None
        except ValueError:
            value = math.nan
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{name}={text[:40]} must be a finite number")
        return value


Endpoint = Callable[[Arguments, list[str]], dict[str, Any]]
"""Answers arguments, and appends what could not be read to the list of problems. Raises ValueError for wrong arguments,
NotThereError."""
RunEndpoint = Callable[[Run, Arguments, list[str]], dict[str, Any]]
"""The same of a run."""


@dataclass(frozen=True, kw_only=True)
class Filters:
    """Which trajectories are wanted: all conditions at once."""

    among: Mapping[str, Sequence[str]]
    """By column: any of these values."""
    within: Mapping[str, tuple[float | None, float | None]]
    """By column: the smallest and the largest."""
    text: str
    """A regular expression (RE2) that is found in a text of the trajectory; empty for none."""

    @classmethod
    def of(cls, arguments: Arguments) -> Filters:
        """Return those that the arguments name. Raises ValueError."""
        among = {name: arguments.all(name) for name in _AMONG}
        within = {name: (arguments.number(f"{name}_min"), arguments.number(f"{name}_max")) for name in _WITHIN}
        if metric := metric_column(arguments):
            within[metric] = (arguments.number("metric_min"), arguments.number("metric_max"))
        text = arguments.text("text")
        if len(text) > _LONGEST_PATTERN:
            raise ValueError(f"text has {counted(len(text), 'character')}; a pattern has at most {_LONGEST_PATTERN}")
        for name, values in among.items():
            if len(values) > _MOST_VALUES:
                raise ValueError(f"{name} is given {len(values)} times; at most {_MOST_VALUES} are taken")
        return cls(among=among, within=within, text=text)

    @property
    def steps(self) -> tuple[float, float]:
        """The first and the last step."""
        low, high = self.within["step"]
        return -math.inf if low is None else low, math.inf if high is None else high

    def conditions(self) -> tuple[list[str], list[object]]:
        """Return conditions in SQL, all of which must hold, and their parameters. The text is not among them."""
        found: list[str] = []
        parameters: list[object] = []
        for name, values in self.among.items():
            if values:
                column = f"{name}::VARCHAR" if name == "sample" else name
                found.append(f"{column} IN ({', '.join('?' * len(values))})")
                parameters += values
        for name, (low, high) in self.within.items():
            for sign, bound in ((">=", low), ("<=", high)):
                if bound is not None:
                    found.append(f"{_WITHIN.get(name, name)} {sign} ?")
                    parameters.append(bound)
        return found, parameters


def chosen_run(runs: Mapping[str, Run], arguments: Arguments) -> Run:
    """Return the run that is asked for; the only one, where none is named. Raises ValueError."""
    name = arguments.text("run") or (next(iter(runs)) if len(runs) == 1 else "")
    if name not in runs:
        raise ValueError(f"run={name[:80]} is not one of {', '.join(runs)}")
    return runs[name]


def metric_column(arguments: Arguments) -> str:
    """Return the expression of the number that `metric` names: one of the environment's metrics, of tool calls, or of the
    components of a reward; empty where none is named."""
    name = arguments.text("metric")
    column, key = ("rewards", name.removeprefix(_OF_REWARDS)) if name.startswith(_OF_REWARDS) else ("metrics", name)
    return f"{column}['" + key.replace("'", "''") + "']" if name else ""


def in_order(arguments: Arguments, columns: Mapping[str, str], first: str, then: str) -> str:
    """Return what stands after ORDER BY: the column that is asked for, those without a value last. Raises ValueError."""
    name, order = arguments.text("sort") or first, arguments.text("order") or "desc"
    if name not in columns:
        raise ValueError(f"sort={name[:40]} is not one of {', '.join(columns)}")
    directions: Mapping[str, Literal["ASC", "DESC"]] = {"asc": "ASC", "desc": "DESC"}
    if order not in directions:
        raise ValueError(f"order={order[:40]} is not one of asc, desc")
    return f"{columns[name]} {directions[order]} NULLS LAST, {then}"
