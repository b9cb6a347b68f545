"""The environment of the word problems: what is rewarded, when it ends, and what counts as an answer."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl_train.errors import DataError
from skyrl_train.rollout.envs.word_problems import WordProblemsEnv, parse_answer

EXTRAS = {"reward_spec": {"method": "rule", "ground_truth": "9"}}
RETRY = [{"role": "user", "content": "Wrong. Try again."}]


def test_the_first_messages_are_the_prompt() -> None:
    prompt = [{"role": "user", "content": "4+5?"}]
    assert WordProblemsEnv(env_config={}, extras=EXTRAS).init(prompt) == (prompt, {})


def test_a_right_answer_in_the_first_turn_earns_one_and_ends() -> None:
    env = WordProblemsEnv(extras=EXTRAS)
    assert env.step("4+5=9\n#### 9") == {"observations": [], "reward": 1.0, "done": True, "metadata": {}}
    assert env.get_metrics() == {"solved": 1.0, "solved_first_turn": 1.0, "turns": 1.0}


def test_a_wrong_answer_is_told_so_and_a_right_second_one_earns_a_half() -> None:
    env = WordProblemsEnv(extras=EXTRAS)
    assert env.step("#### 8") == {"observations": RETRY, "reward": 0.0, "done": False, "metadata": {}}
    assert env.step("#### 9") == {"observations": [], "reward": 0.5, "done": True, "metadata": {}}
    assert env.get_metrics() == {"solved": 1.0, "solved_first_turn": 0.0, "turns": 2.0}


def test_two_wrong_answers_end_with_nothing() -> None:
    env = WordProblemsEnv(extras=EXTRAS)
    env.step("#### 8")
    assert env.step("#### 7") == {"observations": [], "reward": 0.0, "done": True, "metadata": {}}
    assert env.get_metrics() == {"solved": 0.0, "solved_first_turn": 0.0, "turns": 2.0}


@pytest.mark.parametrize(
    "extras",
    [{**EXTRAS, "max_turns": 1}, {**EXTRAS, "extra_info": {"max_turns": 1}}],
    ids=["of the row", "of its extra_info"],
)
def test_the_number_of_turns_comes_from_the_row(extras: dict[str, Any]) -> None:
    assert WordProblemsEnv(extras=extras).step("#### 8")["done"] is True


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("#### 9", 9),
        ("4+5=9\n#### 9\n", 9),
        ("#### -9", -9),
        ("#### 8\n#### 9", 9),
        ("", None),
        ("9", None),
        ("####9", None),
        ("#### ", None),
        ("#### 9 apples", None),
        ("#### 9\nor 8", None),
        ("#### 9.", 9),
        ("#### 9.0", 9),
        ("#### 9.00", 9),
        ("#### $9", 9),
        ("#### -$9.", -9),
        ("#### 1,000", 1000),
        ("#### $1,234,567.00", 1234567),
        ("#### 8.\nNo, that is wrong.\n#### 9.", 9),
        ("#### 9.5", None),
        ("#### 1,00", None),
        ("#### 9 $", None),
        ("#### .", None),
        ("#### $", None),
        ("#### nine", None),
        ("#### ٩", None),
        ("#### " + "9" * 5000, None),
    ],
)
def test_an_answer_is_the_integer_after_the_last_mark_and_nothing_else(response: str, answer: int | None) -> None:
    assert parse_answer(response) == answer


@pytest.mark.parametrize(
    "extras", [None, {}, {"reward_spec": {}}, {"reward_spec": "9"}, {"reward_spec": {"ground_truth": "nine"}}]
)
def test_a_row_without_an_integer_as_ground_truth_is_refused(extras: dict[str, Any] | None) -> None:
    with pytest.raises(DataError, match=r"reward_spec\.ground_truth: must be an integer; got .*"):
        WordProblemsEnv(extras=extras)


@pytest.mark.parametrize("max_turns", [0, -1, "2", True, 1.5])
def test_a_number_of_turns_that_is_not_positive_is_refused(max_turns: Any) -> None:
    with pytest.raises(DataError, match="max_turns: must be a positive integer; got"):
        WordProblemsEnv(extras={**EXTRAS, "max_turns": max_turns})
