"""Rewards of functions, on trajectories that a scripted engine makes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.config.environment import IN_TRAINER
from skyrl_train.config.models import GeneratorConfig
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.parts import REWARDS
from skyrl_train.rollout.generator import RolloutGenerator
from skyrl_train.rollout.hosts.scoring import check_reward_columns, reward_problems
from skyrl_train.types import FailureKind, RolloutBatch, SamplingParams
from tests.support.fake_environments import FAKE_ENVIRONMENT, FakeEnvironment, go_on_with
from tests.support.fakes import FakeEngine, make_prompts, make_tokenizer

TOKENIZER = make_tokenizer()
FUNCTIONS = "tests.support.scored_functions"
ANSWERS = ("#### 4", "#### 5", "4")
"""What samples 0, 1 and 2 of each prompt answer."""


@pytest.fixture
def roll_out() -> Iterator[Callable[..., RolloutBatch]]:
    """Samples of one prompt, whose answers are `ANSWERS`, in an environment of a single turn unless another is stated."""
    made: list[RolloutGenerator] = []
    FakeEnvironment.reset()

    def make(
        *rewards: Any, n: int = 3, max_turns: int = 1, extras: dict[str, Any] | None = None, **changes: Any
    ) -> Any:
        environment = {
            "env_class": "single_turn",
            "isolation": "thread",
            "rewards": rewards,
            "max_failed_fraction": 1.0,
        }
        engine = FakeEngine(lambda request: [*TOKENIZER.encode(ANSWERS[int(request.request_id.split("-")[3])]), 3])
        config = EnvironmentConfig(**{**environment, **changes})
        made.append(RolloutGenerator(engine, TOKENIZER, GeneratorConfig(max_turns=max_turns), config, seed=0))
        prompts = make_prompts(1, answer=4, **(extras or {}))
        return made[-1].generate(
            prompts, n_samples_per_prompt=n, sampling=SamplingParams(), global_step=1, purpose="train"
        )

    yield make
    FakeEnvironment.release.set()
    for generator in made:
        generator.close()


def named(function: str, **arguments: Any) -> Any:
    target = f"{FUNCTIONS}:{function}"
    return {"_target_": target, **arguments} if arguments else target


def rewards_of(batch: RolloutBatch) -> list[float | None]:
    return [None if trajectory.failed else trajectory.reward for trajectory in batch.trajectories]


def test_a_reward_is_a_function_of_the_completion_and_of_columns_by_name(roll_out: Any) -> None:
    batch = roll_out(reward=named("has_answer"))
    assert rewards_of(batch) == [1.0, 0.0, 0.0]
    assert [dict(trajectory.rewards) for trajectory in batch.trajectories] == [
        {"has_answer": 1.0}, {"has_answer": 0.0}, {"has_answer": 0.0},
    ]  # fmt: skip


def test_several_rewards_are_weighted_and_each_is_kept_by_name_before_its_weight(roll_out: Any) -> None:
    batch = roll_out(
        named("has_answer", weight=0.5), named("facts", weight={"turns": 0.25}), named("Scaled", scale=2.0, weight=-1)
    )
    assert rewards_of(batch) == [0.5 + 0.25 - 2, 0.25 - 2, 0.25 - 2]
    assert batch.trajectories[1].rewards == {
        "has_answer": 0.0, "stopped": 1.0, "turns": 1.0, "length": 6.0, "Scaled": 2.0,
    }  # fmt: skip


def test_rewards_are_added_to_those_of_an_environment_of_several_turns(roll_out: Any) -> None:
    steps = [go_on_with("again", -1.0), {"observations": [], "reward": 0.25, "done": True, "metadata": {}}]
    batch = roll_out(named("conversation"), n=1, max_turns=3, env_class=FAKE_ENVIRONMENT, extras={"steps": steps})
    (trajectory,) = batch.trajectories
    assert [turn.reward for turn in trajectory.turns] == [-1.0, 1.25]
    assert trajectory.rewards == {"environment": -0.75, "conversation": 1.0}


@pytest.mark.parametrize(
    ("reward", "kinds", "message"),
    [
        (
            "broken",
            {1: FailureKind.INVALID_REWARD, 2: FailureKind.REWARD_ERROR},
            "broken: KeyError: 'no rule for 4' at LINE in broken: raise KeyError(\"no rule for 4\")",
        ),
        ("unsure", {2: FailureKind.NOT_SCORED}, "unsure returned None: not scored"),
        ("endless", {2: FailureKind.REWARD_TIMEOUT}, "endless.score did not answer within 0.5 s"),
        ("lengths", {2: FailureKind.REWARD_ERROR}, 'lengths: ValueError: 4 at LINE in lengths: raise ValueError("4")'),
    ],
)
def test_what_a_function_does_wrong_fails_that_trajectory_alone(
    roll_out: Any, reward: str, kinds: dict[int, FailureKind], message: str
) -> None:
    batch = roll_out(named(reward), step_timeout_s=0.5)
    failures = {index: one.failure for index, one in enumerate(batch.trajectories) if one.failure is not None}
    assert {index: failure.kind for index, failure in failures.items()} == kinds
    assert re.sub(r" at \S+scored_functions.py:\d+ in", " at LINE in", failures[2].message) == message
    assert rewards_of(batch)[0] == (6.0 if reward == "lengths" else 1.0)


def test_a_reward_of_the_group_sees_the_samples_that_have_not_failed(roll_out: Any) -> None:
    assert rewards_of(roll_out(named("unsure"), named("longest"))) == [2.0, 2.0, None]
    assert rewards_of(roll_out(named("longest"))) == [1.0, 1.0, 0.0]


def test_too_few_values_fail_the_group_with_the_reason(roll_out: Any) -> None:
    batch = roll_out(named("too_few"))
    assert {str(one.failure and one.failure.message) for one in batch.trajectories} == {
        "too_few returned 2 values; must be a list with one value for each of 3 trajectories"
    }


@pytest.mark.slow
def test_functions_run_in_worker_processes_which_a_deadline_ends(roll_out: Any) -> None:
    batch = roll_out(named("endless"), named("has_answer"), named("longest"), step_timeout_s=2.0, isolation="auto")
    assert rewards_of(batch) == [3.0, 2.0, None]
    assert batch.trajectories[2].failure.kind is FailureKind.REWARD_TIMEOUT


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        ("exact_macth", "environment.rewards[0]: must be one of exact_match"),
        (named("NO_FUNCTION"), "must name a function or a class, and this is int"),
        (
            named("of_nothing"),
            f"must take completion, by that name; got {FUNCTIONS}:of_nothing(reply)",
        ),
        (
            named("has_answer", scale=2),
            f"environment.rewards[0].scale: is no argument of {FUNCTIONS}:has_answer",
        ),
        (named("Scaled"), f"environment.rewards[0].scale: must be given to {FUNCTIONS}:Scaled"),
    ],
)
def test_what_cannot_be_called_is_said_before_anything_is_loaded(isolation: Any, reward: Any, problem: str) -> None:
    found = reward_problems(EnvironmentConfig(env_class="single_turn", isolation=isolation, rewards=(reward,)))
    assert problem in "\n".join(map(str, found))


def test_a_row_without_a_column_that_a_reward_takes_is_named() -> None:
    environment = EnvironmentConfig(env_class="single_turn", isolation="thread", reward=named("has_answer"))
    check_reward_columns(make_prompts(1, reward_spec={"ground_truth": "4"}), environment)
    with pytest.raises(
        DataError,
        match=r"p0: the reward has_answer takes the column 'answer', and there is none: the row's columns are solution",
    ):
        check_reward_columns(make_prompts(1, solution=4), environment)
    with pytest.raises(DataError, match=r"the row's columns are anser. Did you mean 'anser'\? data.answer_column"):
        check_reward_columns(make_prompts(1, anser=4), environment)


def test_arguments_that_no_process_can_be_sent_are_refused() -> None:
    environment = EnvironmentConfig(env_class="single_turn", reward={"_target_": "a:b", "part": object()})
    with pytest.raises(ConfigError, match=r"environment.reward.part: must be plain data"):
        raise ConfigError(reward_problems(environment))


def test_the_functions_of_the_documentation_do_what_it_says() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "rewards.md").read_text(encoding="utf-8")
    ready_made = text.partition("## Ready-made")[2].partition("\n## ")[0]
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, names)
    assert names["score"]("it is 4", answer="4") == 1.0
    assert names["lengths"](["abc", "a"], answer=["a", "b"]) == [-0.02, 0.0]
    assert names["rank"](["long one", "ab"], answer="a") == [0.5, 1.0]
    assert (names["lengths"].reward_form, names["rank"].reward_form) == ("batched", "group")
    assert set(re.findall(r"^\| `(\w+)` \|", ready_made, re.MULTILINE)) == set(REWARDS) - IN_TRAINER
