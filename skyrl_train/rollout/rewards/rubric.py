"""What a judge is asked for, and what its reply says: criteria, how scores stand in a reply, and on which scale.

    number    a line `clarity: 7` for each criterion         grades    a line `clarity: B`
    json      an object `{"reasoning": "...", "clarity": 7}`, which the server is asked for by a JSON schema

A reply without a score of the scale for some criterion is a failure with that reason, never a 0.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from skyrl_train.config.environment import is_one_score
from skyrl_train.errors import Violation
from skyrl_train.rollout.boundary.session import Broken
from skyrl_train.system.files import parse_json
from skyrl_train.telemetry.logs import redact_text
from skyrl_train.types import FailureKind

_GRADES = {"A": 1.0, "B": 0.75, "C": 0.5, "D": 0.25, "F": 0.0}
_NUMBER = r"-?\d+(?:\.\d+)?(?!\.?\d)(?!\s*-\s*\d)"
"""Not the first of two, as in `7-8`."""


class Rubric:
    """Criteria with a weight each."""

    def __init__(
        self,
        criteria: Sequence[Mapping[str, Any]],
        *,
        reply: str,
        pattern: str,
        scale: Sequence[float],
        grades: Mapping[str, float] | None,
    ) -> None:
        """The arguments are those of `Judge`; `violations` says what is wrong with them."""
        self._criteria = {str(each.get("name", "")): each for each in criteria}
        self._is_one_score = is_one_score(criteria)
        self._num_given, self._reply, self._pattern = len(criteria), reply, pattern
        self._scale = tuple(scale)
        self._grades = {str(name).upper(): float(value) for name, value in (grades or _GRADES).items()}

    def violations(self, setting: str) -> Iterator[Violation]:
        """What is wrong with the settings; `setting` is where they are."""
        if not all(self._criteria) or not self._criteria or len(self._criteria) < self._num_given:
            remedy = "write rubric: [{name: clarity, criterion: ..., weight: 1}]"
            rule = "must give each criterion a name of its own"
            yield Violation.of(f"{setting}.rubric", list(self._criteria), rule, remedy)
        if self._reply not in ("number", "json", "grades"):
            yield Violation.of(f"{setting}.reply", self._reply, "must be number, json or grades", "write reply: number")
        if len(self._scale) != 2 or not self._scale[0] < self._scale[1]:
            rule, remedy = "must be the lowest and the highest number", "write scale: [0, 10]"
            yield Violation.of(f"{setting}.scale", list(self._scale), rule, remedy)
        if self._pattern and (problem := self._pattern_problem()):
            yield Violation.of(f"{setting}.pattern", self._pattern, problem, "write one such as '{name} is (\\d+)'")

    @property
    def range(self) -> tuple[float, float]:
        """The lowest and the highest value of `score`."""
        grades = self._grades.values() if self._reply == "grades" else (0.0, 1.0)
        weights = [float(each.get("weight", 1.0)) for each in self._criteria.values()]
        ends = [weight * grade for weight in weights for grade in (min(grades), max(grades))]
        return min(ends), max(ends)

    def instructions(self) -> str:
        """Return what a judge is told of criteria and of the form of its reply."""
        criteria = "\n".join(f"- {name}: {each.get('criterion', name)}" for name, each in self._criteria.items())
        is_grade = self._reply == "grades"
        form = "\n".join(f"{name}: {'GRADE' if is_grade else 'NUMBER'}" for name in self._criteria)
        if self._reply == "json":
            form = json.dumps({"reasoning": "...", **dict.fromkeys(self._criteria, self._scale[1])})
        return f"Grade the answer with {self._wanted()} for each of\n{criteria}\n\nEnd your reply with\n{form}"

    def response_format(self) -> dict[str, Any]:
        """Return the field of a request that asks for an object of the rubric; empty where lines are asked for."""
        if self._reply != "json":
            return {}
        properties = {"reasoning": {"type": "string"}, **{name: {"type": "number"} for name in self._criteria}}
        schema = {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "grades", "strict": True, "schema": schema}}
        return {"response_format": form}

    def score(self, reply: str) -> float | dict[str, float]:
        """Return weight times score, 0 to 1 or as the grades say: one for each criterion, by its name; of a judge without a
        rubric one number.

        Raises Broken (invalid_reward) naming the first criterion that the reply has no score for.
        """
        found = (
            _object_in(reply) if self._reply == "json" else {name: self._last(name, reply) for name in self._criteria}
        )
        scores = {
            name: float(criterion.get("weight", 1.0)) * self._score(name, found.get(name), reply)
            for name, criterion in self._criteria.items()
        }
        return next(iter(scores.values())) if self._is_one_score else scores

    def _score(self, name: str, value: Any, reply: str) -> float:
        if self._reply == "grades":
            if isinstance(value, str) and value.upper() in self._grades:
                return self._grades[value.upper()]
        elif isinstance(value, (str, int, float)) and not isinstance(value, bool):
            low, high = self._scale
            try:
                number = float(value)
            except (ValueError, OverflowError):
                number = float("nan")
            if low <= number <= high:
                return (number - low) / (high - low)
        raise Broken(
            FailureKind.INVALID_REWARD,
            f"judge: its reply has {'nothing' if value is None else repr(value)[:40]} for {name!r}, which must be "
            f"{self._wanted()}; it ends with {redact_text(reply[-120:])!r}",
        )

    def _wanted(self) -> str:
        if self._reply == "grades":
            return f"one of {', '.join(self._grades)}"
        return f"a number from {self._scale[0]:g} to {self._scale[1]:g}"

    def _last(self, name: str, reply: str) -> str | None:
        """Return the value of the last line that gives the criterion one."""
        found = re.findall(self._expression(name), reply)
        return found[-1] if found else None

    def _expression(self, name: str) -> str:
        if self._pattern:
            return self._pattern.replace("{name}", re.escape(name))
        letters = "|".join(re.escape(grade) for grade in sorted(self._grades, key=len, reverse=True))
        value = rf"(?:{letters})(?![\w+-])" if self._reply == "grades" else _NUMBER
        return rf"(?im)^\W*{re.escape(name)}\W*[:=][\s*_`\"'(]*({value})"

    def _pattern_problem(self) -> str:
        try:
            num_groups = re.compile(self._expression(next(iter(self._criteria), ""))).groups
        except re.error as error:
            return f"must be a regular expression ({error})"
        if num_groups != 1:
            return "must have one group, which is the value"
        is_ambiguous = len(self._criteria) > 1 and "{name}" not in self._pattern
        return "must have {name} in it, since there are several criteria" if is_ambiguous else ""


def _object_in(text: str) -> dict[str, Any]:
    """Return the object in a text, fences and words around it left out; empty where there is none."""
    try:
        found = parse_json(text[text.index("{") : text.rindex("}") + 1])
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
