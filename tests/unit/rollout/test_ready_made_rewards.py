"""Rewards by name, on responses as models write them."""

from __future__ import annotations

import os
from typing import Any

import pytest

from skyrl_train.rollout.rewards.reward_functions import call_reward, reward_violations


def score(spec: Any, completion: str, **facts: Any) -> Any:
    sample = {"completion": completion, "completion_messages": [], "messages": [], "stop_reason": "stop", **facts}
    sample = {"response_length": 1, "num_turns": 1, **sample}
    columns = {name: sample.pop(name) for name in ("answer", "tests", "schema") if name in sample}
    scored = call_reward(spec, {"prompt": [], "uid": "p0", **columns}, [sample])
    return scored["code"] if isinstance(scored, dict) else scored


@pytest.mark.parametrize(
    ("spec", "completion", "facts", "expected"),
    [
        ("exact_match", " 42\n", {"answer": 42}, 1.0),
        ("exact_match", "It is 42", {"answer": 42}, 0.0),
        ({"_target_": "exact_match", "ignore_case": True}, "Paris", {"answer": "paris"}, 1.0),
        ("choice", "I think A, but the answer is (C).", {"answer": "C"}, 1.0),
        ("choice", "The answer is A. No: the answer is **B**", {"answer": "B"}, 1.0),
        ("choice", "Thus \\boxed{d}", {"answer": "(D)"}, 1.0),
        ("choice", "A dog, I say", {"answer": "A"}, 0.0),
        ("choice", "b", {"answer": "B"}, 1.0),
        ("choice", "I do not know.", {"answer": ""}, 0.0),
        ("math_verify", "so it is $\\boxed{\\frac{1}{2}}$", {"answer": "0.5"}, 1.0),
        ("math_verify", "The answer is 1,000", {"answer": "1000"}, 1.0),
        ("math_verify", "The answer is 7", {"answer": "8"}, 0.0),
        ("math_verify", "so $x^2+2x+1$", {"answer": "$(x+1)^2$"}, 1.0),
        ({"_target_": "json_schema", "schema": {"type": "object", "required": ["a"]}}, '{"a": 1}', {}, 1.0),
        ({"_target_": "json_schema", "schema": {"type": "object"}}, "Here:\n```json\n[1]\n```", {}, 0.0),
        ("json_schema", "[1", {"schema": '{"type": "array"}'}, 0.0),
        ({"_target_": "regex", "pattern": "^<think>.*</think>", "flags": "s"}, "<think>\n</think>4", {}, 1.0),
        ({"_target_": "regex", "pattern": "#### (.*)", "answer_group": 1}, "#### 3\n#### 4 ", {"answer": 4}, 1.0),
        ({"_target_": "length_penalty", "start": 10, "end": 20}, "", {"response_length": 15}, -0.5),
        ({"_target_": "length_penalty", "start": 10, "end": 20}, "", {"response_length": 99}, -1.0),
        ("not_stopped_penalty", "", {"stop_reason": "length"}, -1.0),
        ("not_stopped_penalty", "", {}, 0.0),
    ],
)
def test_a_reward_by_name(spec: Any, completion: str, facts: dict[str, Any], expected: float) -> None:
    assert score(spec, completion, **facts) == expected


def test_a_row_whose_schema_is_no_json_is_no_reward_of_0() -> None:
    with pytest.raises(ValueError, match="Expecting property name"):
        score("json_schema", "{}", schema="{type: array}")


ADD = "```python\ndef add(a, b):\n    return a + b\n```"
TESTS = ["assert add(1, 2) == 3", "assert add(2, 2) == 5"]


def test_code_passes_all_tests_or_a_share_of_them() -> None:
    assert score("code", ADD, tests=TESTS[0]) == 1.0
    assert score("code", ADD, tests=TESTS) == 0.0
    assert score({"_target_": "code", "partial": True}, ADD, tests=TESTS) == 0.5


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(0)",
        "x = 'a' * (1 << 31)",
        "open('f', 'wb').write(b'a' * (20 << 20))",
        "def add(:",
        "raise OSError",
    ],
)
def test_code_that_ends_early_exceeds_a_limit_or_raises_passes_nothing(code: str) -> None:
    assert score("code", f"{code}\nadd = lambda a, b: a + b", tests=TESTS[:1]) == 0.0


def test_code_does_not_see_the_variables_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    assert score("code", "import os", tests=["assert 'SECRET_TOKEN' not in os.environ"]) == 1.0
    assert os.environ["SECRET_TOKEN"] == "s3cret"


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"_target_": "regex", "pattern": "("}, "missing )"),
        ({"_target_": "regex", "pattern": "a", "answer_group": 1}, "the pattern has 0 groups"),
        ({"_target_": "json_schema", "schema": {"type": "objekt"}}, "SchemaError"),
        ({"_target_": "length_penalty", "start": 10}, "environment.reward.end: must be given to length_penalty"),
        ({"_target_": "length_penalty", "start": 10, "end": 5}, "below end=5"),
    ],
)
def test_arguments_that_make_no_reward_are_refused(spec: Any, problem: str) -> None:
    (found,) = reward_violations(spec, "environment.reward")
    assert problem in str(found)
