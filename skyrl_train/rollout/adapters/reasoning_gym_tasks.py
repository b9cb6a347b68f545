"""Tasks of the package reasoning-gym, scored as the package scores them: `environment=reasoning_gym`.

    environment.env_class='{_target_: reasoning_gym, answer: tags, max_turns: 3, format_reward: 0.1}'

The rows are those of `data=reasoning_gym`. An answer is read out of the response, as `answer` says, and given to the task's
own scorer. Where that does not call it right and turns are left, the model is told the score and may answer again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from skyrl_train.data.tasks import COLUMN, package, score
from skyrl_train.errors import DataError, Violation
from skyrl_train.registry import did_you_mean
from skyrl_train.types import ChatMessage

SETTING = "environment.env_class"
READINGS = ("auto", "tags", "marked", "last_number", "last_line", "text")
_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_MARKED = re.compile(r"####(.*)")
_NUMBER = re.compile(r"(?<!\d)-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")


def read_answer(response: str, reading: str, wanted: object) -> tuple[str | None, bool]:
    """Return the answer in a response, None where it has none, and whether it stood in a form that says so.

    Args:
        reading: `tags`: in the last `<answer>...</answer>`, as the package reads it; `marked`: on the line behind the last
            `####`; `last_number`: the last number, without commas; `last_line`: that is not empty; `text`: all of it.
            `auto`: in tags, else marked, else anywhere; there the last number where `wanted` is one, else all that stands
            in the tags or behind the mark, else the last line.
        wanted: The right answer, whose kind `auto` looks at.
    """
    tagged, marked = _TAGS.findall(response), _MARKED.findall(response)
    forms = {"tags": tagged, "marked": marked, "auto": tagged or marked}
    stated = forms.get(reading, [response])
    is_stated = bool(stated)
    place = stated[-1] if stated else (response if reading == "auto" else "")
    if reading == "auto":
        is_number = _NUMBER.fullmatch(str(wanted).strip()) is not None
        reading = "last_number" if is_number else "text" if is_stated else "last_line"
    if reading == "last_number":
        found = [number.replace(",", "") for number in _NUMBER.findall(place)]
    elif reading == "last_line":
        found = [line.strip() for line in place.splitlines() if line.strip()]
    else:
        found = [place.strip()]
    return (found[-1], is_stated) if found and found[-1] else (None, False)


class ReasoningGymEnvironment:
    """One question. The reward is the score of the last answer, and what its form is worth."""

    def __init__(
        self,
        env_config: Any,
        extras: Mapping[str, Any],
        *,
        answer: str = "auto",
        max_turns: int = 1,
        exact: bool = False,
        format_reward: float = 0.0,
    ) -> None:
        """
        Args:
            answer: How it is read out of a response: `read_answer`.
            max_turns: Answers at most; `generator.max_turns` holds as well.
            exact: Give 1 or 0 in place of the package's score, which may be in between.
            format_reward: Added where the last answer stood in the form that `answer` names; with `auto`, in tags or marked.
        """
        del env_config
        self.check_row(extras)
        self._source, self._wanted = extras[COLUMN], extras.get("answer")
        self._reading, self._exact, self._format_reward = answer, exact, format_reward
        self._max_turns = min(max_turns, int(extras.get("max_turns", max_turns)))
        self._state: dict[str, float] = {"turns": 0, "solved_at_turn": 0, "score": 0.0, "format": 0.0}

    @staticmethod
    def violations(**arguments: Any) -> Iterator[Violation]:
        """What is wrong with the arguments, and whether the package can be imported."""
        reading, turns = arguments.get("answer", "auto"), arguments.get("max_turns", 1)
        bonus, exact = arguments.get("format_reward", 0.0), arguments.get("exact", False)
        if reading not in READINGS:
            remedy = did_you_mean(str(reading), list(READINGS)) or "docs/environments.md says what each reads"
            yield Violation.of(f"{SETTING}.answer", reading, f"must be one of {', '.join(READINGS)}", remedy)
        if isinstance(turns, bool) or not isinstance(turns, int) or turns < 1:
            yield Violation.of(f"{SETTING}.max_turns", turns, "must be a whole number, 1 at least", "try max_turns: 3")
        if isinstance(bonus, bool) or not isinstance(bonus, (int, float)) or not math.isfinite(bonus):
            yield Violation.of(f"{SETTING}.format_reward", bonus, "must be a finite number", "try format_reward: 0.1")
        if not isinstance(exact, bool):
            yield Violation.of(f"{SETTING}.exact", exact, "must be true or false", "write exact: true")
        try:
            package()
        except DataError as error:
            rule, _, remedy = str(error).partition(": ")[2].partition(": ")
            yield Violation.of(SETTING, COLUMN, rule, remedy or "install it again")

    @staticmethod
    def check_row(row: Mapping[str, Any]) -> None:
        """Raises DataError for a row that is none of `data=reasoning_gym`."""
        source = row.get(COLUMN)
        if not isinstance(source, Mapping) or not {"task", "arguments", "version", "entry"} <= set(source):
            raise DataError(f"{COLUMN}: must be what data=reasoning_gym puts there; got {str(source)[:80]!r}")

    def init(self, prompt: list[ChatMessage]) -> tuple[list[ChatMessage], dict[str, Any]]:
        return prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        """Raises whatever the task's scorer raises, and ValueError for a score that is no finite number."""
        answer, is_told = read_answer(action, self._reading, self._wanted)
        scored = score(self._source, answer)
        if not math.isfinite(scored):
            raise ValueError(f"the scorer of {self._source['task']} gave {scored}")
        turns = int(self._state["turns"]) + 1
        is_right = scored >= 1.0
        solved_at_turn = turns if is_right else 0
        self._state = {"turns": turns, "solved_at_turn": solved_at_turn, "score": scored, "format": float(is_told)}
        if is_right or turns >= self._max_turns:
            reward = float(is_right) if self._exact else scored
            reward += self._format_reward * is_told
            return {"observations": [], "reward": reward, "done": True, "metadata": {}}
        verdict = "There is no answer in it" if answer is None else f"Your answer scores {scored:.2f} of 1"
        observation = {"role": "user", "content": f"{verdict}. Try again."}
        return {"observations": [observation], "reward": 0.0, "done": False, "metadata": {}}

    def get_state(self) -> dict[str, float]:
        """What the row does not say."""
        return dict(self._state)

    def set_state(self, state: Mapping[str, float]) -> None:
        self._state = dict(state)

    def close(self) -> None:
        """Nothing is held."""

    def get_metrics(self) -> dict[str, float]:
        """`solved` is exact correctness, which evaluations count; `score` is the package's, `format` the form's."""
        solved_at = self._state["solved_at_turn"]
        told = {name: self._state[name] for name in ("turns", "score", "format")}
        return {"solved": float(solved_at > 0), "solved_first_turn": float(solved_at == 1), **told}
