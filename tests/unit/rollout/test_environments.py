"""Names to environments."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.errors import ConfigError
from skyrl_train.rollout.envs.environments import check_environment, make_environment, resolve_environment, reward_lines
from skyrl_train.rollout.envs.word_problems import WordProblemsEnv
from tests.support.fake_environments import FAKE_ENVIRONMENT, FakeEnvironment

ROW = {"reward_spec": {"method": "rule", "ground_truth": "4"}, "extra_info": {}, "max_turns": 3}


def test_a_built_in_environment_is_found_by_name() -> None:
    assert isinstance(make_environment("word_problems", ROW), WordProblemsEnv)


@pytest.mark.parametrize(
    ("env_class", "row"),
    [
        ("gsm8k", ROW),
        ("gsm8k_multi_turn", ROW),
        ("aime", {"reward_model": {"ground_truth": "4"}}),
        ("search", {"reward_spec": {"ground_truth": {"target": ["4"]}}}),
        ("searchcode", ROW),
        ({"_target_": "lcb", "sandbox": "off"}, {"reward_spec": {"ground_truth": "[]"}}),
    ],
)
def test_environments_registered_in_skyrl_gym_are_found_by_name(env_class: Any, row: dict[str, Any]) -> None:
    environment = make_environment(env_class, row)
    assert environment.init([{"role": "user", "content": "2+2?"}])[0] == [{"role": "user", "content": "2+2?"}]
    environment.close()


def test_gsm8k_multi_turn_takes_the_configured_number_of_turns() -> None:
    environment = make_environment("gsm8k_multi_turn", ROW)
    assert [environment.step("#### 5")["done"] for _ in range(3)] == [False, False, True]


def test_text2sql_finds_its_databases_under_db_path(tmp_path: Path) -> None:
    folder = tmp_path / "spider" / "database" / "pets"
    folder.mkdir(parents=True)
    sqlite3.connect(folder / "pets.sqlite").close()
    row = {"db_id": "pets", "data": "spider", "reward_spec": {"ground_truth": "select 1"}}
    environment: Any = make_environment({"_target_": "text2sql", "db_path": str(tmp_path)}, row)
    assert environment.db_file == str(folder / "pets.sqlite")


def test_arguments_are_laid_over_the_environments_own_defaults() -> None:
    row = {"reward_spec": {"ground_truth": {"target": ["4"]}}}
    environment: Any = make_environment({"_target_": "search", "search_url": "http://127.0.0.1:9/x"}, row)
    search = environment.tool_group
    assert (search.search_url, search.topk) == ("http://127.0.0.1:9/x", 3)


def test_a_misspelt_setting_of_an_environment_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"environment.env_class.serch_url.*Did you mean 'search_url'\?"):
        check_environment({"_target_": "search", "serch_url": "x"})


class Guessing(FakeEnvironment):
    def __init__(self, env_config: Any, extras: Any, *, depth: int, tries: int = 3) -> None:
        super().__init__(env_config, extras)
        self.depth, self.tries = depth, tries


def test_a_custom_environment_is_constructed_with_its_arguments() -> None:
    spec = {"_target_": "test_environments.Guessing", "depth": 2, "env_config": {"hints": True}}
    check_environment(spec)
    environment: Any = make_environment(spec, {"reward_spec": {}})
    assert isinstance(environment, Guessing)
    assert (environment.depth, environment.tries, environment.env_config.hints) == (2, 3, True)
    assert environment.extras == {"reward_spec": {}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depth": 2, "trys": 4}, r"environment.env_class.trys: is no argument .*Did you mean 'tries'\?"),
        ({"tries": 4}, r"environment.env_class.depth: must be given to test_environments:Guessing"),
    ],
)
def test_arguments_of_a_custom_environment_are_checked(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_environment({"_target_": "test_environments:Guessing", **arguments})


def test_what_an_environment_writes_into_its_row_stays_there() -> None:
    row: dict[str, Any] = {"extra_info": {"tries": []}}
    environment: Any = make_environment(FAKE_ENVIRONMENT, row)
    environment.extras["extra_info"]["tries"].append(1)
    assert row == {"extra_info": {"tries": []}}


@pytest.mark.parametrize(
    ("env_class", "message"),
    [
        ("gsm8k_multiturn", r"must be one of aime, gsm8k, .*word_problems.*Did you mean 'gsm8k_multi_turn'\?"),
        ("no_such_package.envs:Mine", "ModuleNotFoundError"),
        ("tests.support.fakes:CHATML", "must name a class or a function"),
    ],
)
def test_a_name_that_leads_nowhere_is_a_config_error(env_class: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_environment(env_class)


def test_a_run_on_threads_says_first_what_nobody_can_end() -> None:
    on_threads, apart = (EnvironmentConfig(reward="exact_match", isolation=each) for each in ("thread", "process"))
    assert reward_lines(on_threads)[0].startswith("isolation   thread: a call that never lets others run")
    assert not any("isolation" in line for line in reward_lines(apart))
