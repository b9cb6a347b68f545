"""Rows that their environment cannot use are refused before a model is loaded."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import pytest

from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.errors import DataError, SkyrlTrainError
from skyrl_train.registry import PartSpec
from skyrl_train.rollout.row_checks import check_all_rows
from skyrl_train.types import Prompt

CHECKING = "tests.support.fake_environments:Checking"


def prompts_with(*extras: Mapping[str, Any]) -> list[Prompt]:
    return [
        Prompt(uid=f"t-{number}", messages=(), extras=row, place=f"t.jsonl, line {number}")
        for number, row in enumerate(extras, start=1)
    ]


def truth(value: object) -> dict[str, Any]:
    return {"reward_spec": {"ground_truth": value}}


def refused(environment: EnvironmentConfig, *rows: Mapping[str, Any]) -> str:
    with pytest.raises(DataError) as caught:
        check_all_rows(prompts_with(*rows), environment)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("env_class", "good", "bad", "message"),
    [
        ("word_problems", truth("4"), {"answer": "4"}, "reward_spec.ground_truth: must be an integer; got None"),
        ("gsm8k", truth("4"), truth(4), "reward_spec.ground_truth: must be a number, written as a text .*; got 4."),
        ("gsm8k_multi_turn", truth("-4.5"), truth("1,000"), "must be a number"),
        ("aime", {"reward_model": {"ground_truth": "4"}}, truth("4"), "reward_model.ground_truth: .*; got nothing"),
        ("lcb", truth("[]"), truth("print(1)"), "must be a JSON text"),
        ("search", truth({"target": ["4"]}), truth("4"), 'must be {"target": '),
        ("text2sql", {"db_id": "a", "data": "b", **truth("x")}, {"db_id": "a", **truth("x")}, "data: must name"),
    ],
)
def test_a_row_without_what_a_bundled_environment_reads_is_named(
    env_class: str, good: Mapping[str, Any], bad: Mapping[str, Any], message: str
) -> None:
    environment = EnvironmentConfig(env_class=env_class)
    check_all_rows(prompts_with(good, good), environment)
    with pytest.raises(DataError, match=rf"^t\.jsonl, line 2: .*{message}.*\(1 other rows of 4 are refused, too\)\.$"):
        check_all_rows(prompts_with(good, bad, good, bad), environment)


def test_rows_are_checked_by_the_environments_that_they_name() -> None:
    environment = EnvironmentConfig(env_class=None)
    rows = [Prompt(uid="a", messages=(), env_class="aime", extras=truth("4"))]
    with pytest.raises(
        DataError, match=r"prompt a: reward_model\.ground_truth: must be a text, for the environment aime"
    ):
        check_all_rows(rows, environment)


def test_the_code_of_a_custom_environment_is_asked_in_a_worker_process() -> None:
    spec: PartSpec = {"_target_": CHECKING, "least": 2}
    error = refused(EnvironmentConfig(env_class=spec), *({"n": 2} for _ in range(2500)), {"n": "x"}, {"n": 1})
    assert error.startswith("t.jsonl, line 2501: n: must be at least 2; got 'x' (process ")
    assert str(os.getpid()) not in error


def test_a_trusted_environment_is_asked_here_and_one_without_a_check_takes_all() -> None:
    error = refused(EnvironmentConfig(env_class=CHECKING, isolation="thread"), {"n": -1})
    assert str(os.getpid()) in error
    check_all_rows(prompts_with({}), EnvironmentConfig(env_class="tests.support.fake_environments:FakeEnvironment"))


def test_what_a_check_breaks_on_is_a_problem_of_the_row_and_a_crash_ends_the_run() -> None:
    trusted = EnvironmentConfig(env_class=CHECKING, isolation="thread")
    assert "Checking.check_row refused the row (KeyError: 'n')" in refused(trusted, {"m": 1})
    with pytest.raises(SkyrlTrainError, match=r"Checking.check_row: its worker process exited with status 3"):
        check_all_rows(prompts_with({"crash": True}), EnvironmentConfig(env_class=CHECKING))


@pytest.mark.slow
def test_a_hundred_thousand_rows_take_seconds() -> None:
    rows = [Prompt(uid=str(index), messages=(), extras=truth("4")) for index in range(100_000)]
    start = time.process_time()
    for name in ("word_problems", "gsm8k"):
        check_all_rows(rows, EnvironmentConfig(env_class=name))
    assert time.process_time() - start < 10
