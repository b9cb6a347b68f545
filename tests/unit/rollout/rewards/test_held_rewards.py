"""Judges and reward models as settings: what is refused before a model loads, and what a resumed run may change."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from skyrl_train.config import Config
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.config.environment import ONE_SCORE, REWARD_RULES, reward_entries, with_reward_components
from skyrl_train.config.models import PlacementConfig
from skyrl_train.config.rules import validate_config
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.rollout.hosts.scoring import check_reward_columns, reward_problems, server_problems
from skyrl_train.trainers.checkpoints import changes_since, flat_config, settings_of
from skyrl_train.types import Prompt

JUDGE = {"_target_": "judge", "url": "http://127.0.0.1:9", "model": "m"}


def environment_of(*rewards: Any) -> EnvironmentConfig:
    return EnvironmentConfig(env_class="single_turn", rewards=rewards)


def config_of(*rewards: Any) -> Config:
    return replace(Config(), environment=environment_of(*rewards))


@pytest.mark.parametrize(
    ("reward", "field", "said"),
    [
        ({"_target_": "judge"}, "url", "must be given"),
        ({**JUDGE, "modle": "m"}, "modle", "is no argument of judge"),
        ({**JUDGE, "model": ""}, "model", "must name a model"),
        ({**JUDGE, "url": "judge"}, "url", "must be the address of a server, http://HOST:PORT"),
        ({"_target_": "model", "url": "host:80", "served_model": "m"}, "url", "must be the address of a server"),
        ({**JUDGE, "template": "{answer}"}, "template", "must be text with {completion} in it"),
        ({**JUDGE, "scale": 10}, "", "must be what judge takes"),
        ({**JUDGE, "rubric": ["clarity"]}, "", "must be what judge takes"),
        ({"_target_": "model"}, "", "must name a model"),
        ({"_target_": "model", "path": "a", "dtype": "float16"}, "dtype", "must be float32 or bfloat16"),
    ],
)
def test_a_mistake_is_refused_in_one_line_that_names_the_setting(reward: Any, field: str, said: str) -> None:
    found = reward_problems(environment_of(reward))
    assert found[0].field == "environment.rewards[0]" + (f".{field}" if field else "")
    assert said in str(found[0])
    assert "\n" not in str(found[0])


def test_a_row_without_what_the_template_names_is_refused_by_name() -> None:
    environment = environment_of({**JUDGE, "template": "{completion} {reward_spec.ground_truth} {answer}"})
    message = ({"role": "user", "content": "?"},)
    sound = Prompt(uid="one", messages=message, extras={"reward_spec": {"ground_truth": "4"}})
    check_reward_columns([sound], environment)
    other = Prompt(uid="two", messages=message, extras={"solution": "4"})
    with pytest.raises(DataError, match=r"prompt two: the reward judge takes the column 'reward_spec.ground_truth'"):
        check_reward_columns([sound, other], environment)


def test_a_server_that_is_down_is_told_for_each_reward_that_asks_one() -> None:
    model = {"_target_": "model", "url": "http://127.0.0.1:9", "served_model": "m"}
    found = asyncio.run(server_problems(environment_of(JUDGE, model, {**JUDGE, "system": "another"})))
    assert [each.field for each in found] == [f"environment.rewards[{index}].url" for index in range(3)]
    assert all("must be the address of a server" in each.rule and "does not answer" in each.rule for each in found)
    assert [each.value for each in found] == [f"'{address}'" for address in (JUDGE["url"], model["url"], JUDGE["url"])]


CLEAR = {"name": "clear", "criterion": "Is it clear?"}


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, ["judge"]),
        ({"rubric": list(ONE_SCORE)}, ["judge"]),
        ({"rubric": [CLEAR]}, ["clear"]),
        ({"rubric": [CLEAR, {"name": "right"}]}, ["clear", "right"]),
        ({"rubric": [CLEAR, {"name": "right"}], "weight": {"right": 1.0}}, ["right"]),
    ],
)
def test_components_are_called_as_the_criteria_of_the_rubric(settings: Any, names: list[str]) -> None:
    (entry,) = reward_entries(environment_of({**JUDGE, **settings}))
    assert [*entry.weights] == names
    algorithm = with_reward_components(
        AlgorithmConfig(advantage_estimator="gdpo"), environment_of({**JUDGE, **settings})
    )
    assert [*algorithm.reward_components] == names


def test_two_judges_with_a_criterion_of_one_name_are_refused() -> None:
    judges = [{**JUDGE, "rubric": [CLEAR]}, {**JUDGE, "model": "other", "rubric": [CLEAR]}]
    (found,) = [each for each in validate_config(config_of(*judges)) if each.field == "environment.rewards[1]"]
    assert "gives a reward named 'clear', which there is already" in found.rule


def test_an_entry_of_the_list_may_be_named() -> None:
    pattern = {"_target_": "regex", "pattern": "[0-9]", "name": "digits", "weight": 0}
    named, other = reward_entries(environment_of(pattern, "regex"))
    assert (named.name, named.spec) == ("digits", {"_target_": "regex", "pattern": "[0-9]"})
    assert (dict(named.weights), other.name) == ({"digits": 0}, "regex")


def test_an_actor_needs_ray() -> None:
    config = config_of({"_target_": "model", "path": "a", "placement": "ray"})
    found = [each for each in validate_config(config) if each.field == "environment.rewards[0].placement"]
    assert len(found) == 1
    assert "add placement=ray" in found[0].remedy.lower()
    on_ray = replace(config, placement=PlacementConfig(backend="ray"))
    assert not [each for each in validate_config(on_ray) if each.field.startswith("environment.rewards")]
    assert len(REWARD_RULES) > 1


def test_where_a_judge_is_and_how_it_is_asked_may_change_and_what_it_is_asked_may_not() -> None:
    def changed(one: Any, other: Any) -> list[str]:
        return [
            each.setting
            for each in changes_since(flat_config(settings_of(one)), flat_config(settings_of(other)), Config)
        ]

    before = config_of(JUDGE, "exact_match")
    moved = {**JUDGE, "url": "https://elsewhere", "cache": "a", "price": {"prompt": 1.0}, "max_concurrency": 4}
    assert changed(before, config_of(moved, "exact_match")) == []
    assert changed(before, config_of({**JUDGE, "model": "n"}, "exact_match")) == ["environment.rewards"]
    assert changed(before, config_of({**JUDGE, "sampling": {"temperature": 1.0}}, "exact_match")) != []
    alone = replace(Config(), environment=EnvironmentConfig(reward=JUDGE))
    assert changed(alone, replace(Config(), environment=EnvironmentConfig(reward=moved))) == []
    other = replace(Config(), environment=EnvironmentConfig(reward={**JUDGE, "template": "{completion}!"}))
    assert changed(alone, other) == ["environment.reward"]


def test_a_reward_that_cannot_be_made_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="must be what judge takes"):
        check_reward_columns([], environment_of({**JUDGE, "sampling": 3}))
