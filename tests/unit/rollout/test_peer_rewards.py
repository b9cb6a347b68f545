"""Reward functions of TRL's and verl's signatures, on trajectories that a scripted engine makes."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.config.models import GeneratorConfig
from skyrl_train.errors import DataError
from skyrl_train.rollout.generator import RolloutGenerator
from skyrl_train.rollout.hosts.scoring import check_reward_columns, reward_problems
from skyrl_train.rollout.rewards.reward_functions import reward_facts
from skyrl_train.types import FailureKind, RolloutBatch, SamplingParams
from tests.support.fakes import FakeEngine, make_prompts, make_tokenizer

TOKENIZER = make_tokenizer()
ANSWERS = ("#### 4", "#### 5", "4")
"""What samples 0, 1 and 2 of the prompt answer."""


# TRL: lists by keyword, in and out


def num_characters(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def is_solution(prompts, completions, solution, **kwargs):
    assert prompts == ["0 + 1?"] * len(completions)
    return [float(completion.split()[-1] == str(wanted)) for completion, wanted in zip(completions, solution)]


def says_it_in_a_message(prompts, completions, **kwargs):
    assert [prompt[-1]["content"] for prompt in prompts] == ["0 + 1?"] * len(prompts)
    replies = [completion[0] for completion in completions]
    assert {reply["role"] for reply in replies} == {"assistant"}
    return [1.0 if reply["content"].startswith("####") else 0.5 for reply in replies]


async def grows_with_the_step(completions, completion_ids, trainer_state, log_metric=None, **kwargs):
    log_metric("seen", len(completions))
    assert [len(ids) > 1 for ids in completion_ids] == [True] * len(completions)
    return np.full(len(completions), float(trainer_state.global_step))


def only_worked(completions: list[str], task: list[str], **kwargs: Any) -> list[float | None]:
    """Applies to the rows of its task alone, and to completions with a mark."""
    pairs = zip(completions, task)
    return [2.0 if each == "sum" and completion.startswith("####") else None for completion, each in pairs]


# verl: one response at a time


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums"
    return float(solution_str.split()[-1] == ground_truth)


def score_and_more(data_source, solution_str, ground_truth, extra_info=None):
    right = solution_str == f"#### {ground_truth}"
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": solution_str}


def of_extra_info(data_source, solution_str, ground_truth, extra_info=None):
    return extra_info["worth"] * extra_info["num_turns"] if "####" in solution_str else 0


def strict(solution_str: str, ground_truth: str, method: str = "strict", **kwargs: Any) -> float:
    assert kwargs == {}
    return float(method == "flexible" and re.search(r"\d", solution_str)[0] == ground_truth)  # type: ignore[index]


class Remembering:
    def __init__(self, worth=1.0):
        self.worth = worth

    async def __call__(self, data_source, solution_str, ground_truth, extra_info=None):
        return self.worth * (ground_truth in solution_str)


def says_anything(solution_str, extra_info=None):
    return float(bool(solution_str))


def without_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"acc": 1.0}


@pytest.fixture
def roll_out() -> Iterator[Callable[..., RolloutBatch]]:
    """The samples of one prompt, of a data row with a text or with messages."""
    made: list[RolloutGenerator] = []

    def make(*rewards: Any, is_text: bool = True, **extras: Any) -> RolloutBatch:
        environment = EnvironmentConfig(
            env_class="single_turn", isolation="thread", rewards=rewards, max_failed_fraction=1.0
        )
        engine = FakeEngine(lambda request: [*TOKENIZER.encode(ANSWERS[int(request.request_id.split("-")[3])]), 3])
        made.append(RolloutGenerator(engine, TOKENIZER, GeneratorConfig(max_turns=1), environment, seed=0))
        prompts = [replace(prompt, is_text=is_text) for prompt in make_prompts(1, **extras)]
        return made[-1].generate(
            prompts, n_samples_per_prompt=3, sampling=SamplingParams(), global_step=7, purpose="train"
        )

    yield make
    for generator in made:
        generator.close()


def named(function: str, **arguments: Any) -> Any:
    target = f"test_peer_rewards:{function}"
    return {"_target_": target, **arguments} if arguments else target


def rewards_of(batch: RolloutBatch) -> list[float | str]:
    return [one.failure.message if one.failure else one.reward for one in batch.trajectories]


@pytest.mark.parametrize(
    ("reward", "is_text", "values"),
    [
        ("num_characters", True, [6.0, 6.0, 1.0]),
        ("is_solution", True, [1.0, 0.0, 1.0]),
        ("says_it_in_a_message", False, [1.0, 1.0, 0.5]),
        ("grows_with_the_step", True, [7.0, 7.0, 7.0]),
        ("only_worked", False, [2.0, 2.0, "none of its rewards applies: only_worked returned None"]),
    ],
)
def test_rewards_of_trls_signature_are_called_as_trl_calls_them(
    roll_out: Any, reward: str, is_text: bool, values: list[float | str]
) -> None:
    assert reward_facts(named(reward)).convention == "trl"
    assert rewards_of(roll_out(named(reward), is_text=is_text, solution=4, task="sum")) == values


@pytest.mark.parametrize(
    ("reward", "values"),
    [
        (named("compute_score"), [1.0, 0.0, 1.0]),
        (named("score_and_more"), [1.0, -1.0, -1.0]),
        (named("of_extra_info"), [3.0, 3.0, 0.0]),
        (named("strict", method="flexible"), [1.0, 0.0, 1.0]),
        (named("Remembering", worth=2.0), [2.0, 0.0, 2.0]),
    ],
)
def test_rewards_of_verls_signature_are_called_as_verl_calls_them(
    roll_out: Any, reward: Any, values: list[float]
) -> None:
    row = {"data_source": "sums", "reward_model": {"ground_truth": "4"}, "extra_info": {"worth": 3}}
    assert reward_facts(reward).convention == "verl"
    assert rewards_of(roll_out(reward, **row)) == values


def test_a_row_without_the_column_reward_model_is_scored_too(roll_out: Any) -> None:
    assert rewards_of(roll_out(named("says_anything"))) == [1.0, 1.0, 1.0]


def test_a_reward_that_does_not_apply_leaves_the_others_to_score_the_trajectory(roll_out: Any) -> None:
    batch = roll_out(named("only_worked"), named("num_characters", weight=0.5), task="sum")
    assert rewards_of(batch) == [5.0, 5.0, 0.5]
    assert [dict(one.rewards) for one in batch.trajectories] == [
        {"only_worked": 2.0, "num_characters": 6.0}, {"only_worked": 2.0, "num_characters": 6.0}, {"num_characters": 1.0},
    ]  # fmt: skip
    batch = roll_out(named("only_worked"), task="product")
    assert {one.failure and one.failure.kind for one in batch.trajectories} == {FailureKind.NOT_SCORED}


def test_numbers_beside_a_score_are_reported_and_not_added_up(roll_out: Any) -> None:
    row = {"data_source": "sums", "reward_model": {"ground_truth": "4"}}
    (first, *_) = roll_out(named("score_and_more", weight=2.0), **row).trajectories
    assert (first.reward, first.rewards) == (2.0, {"score_and_more": 1.0, "score_and_more_acc": 1.0})
    (first, *_) = roll_out(named("score_and_more", weight={"acc": 3.0}), **row).trajectories
    assert (first.reward, first.rewards) == (3.0, {"score": 1.0, "acc": 1.0})
    (first, *_) = roll_out(named("without_score"), **row).trajectories
    assert first.failure.message == "without_score returned acc and no 'score', which is the reward in verl's signature"
    assert first.failure.kind is FailureKind.INVALID_REWARD


def test_columns_that_such_functions_need_are_looked_for_before_anything_is_loaded() -> None:
    environment = EnvironmentConfig(env_class="single_turn", isolation="thread", reward=named("compute_score"))
    assert reward_problems(environment) == []
    check_reward_columns(make_prompts(1, data_source="sums", reward_model={"ground_truth": "4"}), environment)
    with pytest.raises(DataError, match=r"the reward compute_score takes the column 'data_source', and there is none"):
        check_reward_columns(make_prompts(1, answer="4"), environment)
