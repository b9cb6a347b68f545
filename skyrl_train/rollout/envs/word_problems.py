"""The environment of the bundled word problems: answer, and where wrong, be told so and try again.

It speaks the `skyrl-gym` protocol without importing it. The answer is what follows the last `#### ` of a response: an
integer and nothing else, as people write one (`42`, `42.`, `42.0`, `$42`, `1,234`). Anything malformed is a wrong answer,
never an error. The rows may be any with an integer as their ground truth, GSM8K's among them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from skyrl_train.data.tasks import ANSWER_MARK, RETRY_MESSAGE
from skyrl_train.errors import DataError
from skyrl_train.types import ChatMessage

FIRST_TURN_REWARD = 1.0
LATER_TURN_REWARD = 0.5
DEFAULT_MAX_TURNS = 2

_INTEGER = re.compile(r"-?[0-9]{1,18}")
"""Bounded, because Python refuses to read integers of thousands of digits."""
_ANSWER = re.compile(r"(?P<sign>-?)\$?(?P<digits>[0-9]{1,18}|[0-9]{1,3}(,[0-9]{3}){1,5})(\.0{0,18})?")


def parse_answer(response: str) -> int | None:
    """The integer after the last `#### `, or None where there is none or more than an integer follows."""
    _, mark, tail = response.rpartition(ANSWER_MARK)
    answer = _ANSWER.fullmatch(tail.strip())
    return int(answer["sign"] + answer["digits"].replace(",", "")) if mark and answer else None


class WordProblemsEnv:
    """One episode of one problem.

    A right answer ends the episode with reward 1.0 in the first turn and 0.5 later. A wrong one earns 0 and the message
    `Wrong. Try again.`, until `max_turns` (from `extras`, `extras["extra_info"]`, else 2) are used.
    """

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        """
        Args:
            env_config: Taken for the protocol's sake; this environment has no settings of its own.
            extras: The data row: `reward_spec.ground_truth` and perhaps `max_turns` or `extra_info.max_turns`.

        Raises:
            DataError: The row has no integer as its ground truth, or `max_turns` is not a positive integer.
        """
        del env_config
        self._ground_truth = _ground_truth(extras or {})
        self._max_turns = _max_turns(extras or {})
        self._turns = 0
        self._solved_at_turn: int | None = None

    @staticmethod
    def check_row(row: Mapping[str, Any]) -> None:
        """Raises DataError for a row whose ground truth is no integer."""
        _ground_truth(row)

    def init(self, prompt: list[ChatMessage]) -> tuple[list[ChatMessage], dict[str, Any]]:
        return prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        self._turns += 1
        if parse_answer(action) == self._ground_truth:
            self._solved_at_turn = self._turns
            reward = FIRST_TURN_REWARD if self._turns == 1 else LATER_TURN_REWARD
            return {"observations": [], "reward": reward, "done": True, "metadata": {}}
        done = self._turns >= self._max_turns
        observations = [] if done else [{"role": "user", "content": RETRY_MESSAGE}]
        return {"observations": observations, "reward": 0.0, "done": done, "metadata": {}}

    def get_state(self) -> dict[str, int | None]:
        """What the row does not say."""
        return {"turns": self._turns, "solved_at_turn": self._solved_at_turn}

    def set_state(self, state: Mapping[str, int | None]) -> None:
        self._turns, self._solved_at_turn = state["turns"] or 0, state["solved_at_turn"]

    def close(self) -> None:
        """Nothing is held."""

    def get_metrics(self) -> dict[str, float]:
        return {
            "solved": float(self._solved_at_turn is not None),
            "solved_first_turn": float(self._solved_at_turn == 1),
            "turns": float(self._turns),
        }


def _ground_truth(extras: Mapping[str, Any]) -> int:
    reward_spec = extras.get("reward_spec")
    text = reward_spec.get("ground_truth") if isinstance(reward_spec, Mapping) else None
    if text is None or not _INTEGER.fullmatch(str(text)):
        raise DataError(
            f"reward_spec.ground_truth: must be an integer; got {text!r}. "
            'Give each row of env_class word_problems {"reward_spec": {"ground_truth": "9"}}, or name the column with the '
            "answer: data.answer_column."
        )
    return int(text)


def _max_turns(extras: Mapping[str, Any]) -> int:
    extra_info = extras.get("extra_info")
    fallback = extra_info.get("max_turns") if isinstance(extra_info, Mapping) else None
    value = extras.get("max_turns", fallback)
    if value is None:
        return DEFAULT_MAX_TURNS
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise DataError(f"max_turns: must be a positive integer; got {value!r}. Drop it for {DEFAULT_MAX_TURNS} turns.")
    return value
