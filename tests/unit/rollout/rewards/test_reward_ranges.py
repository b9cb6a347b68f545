"""Each ready-made reward says its lowest and its highest value, reaches both, and cannot go beyond."""

from __future__ import annotations

import math
from typing import Any

import pytest

from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.config.models import GeneratorConfig
from skyrl_train.parts import REWARDS
from skyrl_train.rollout.generator import RolloutGenerator
from skyrl_train.rollout.rewards import within
from skyrl_train.rollout.rewards.reward_functions import call_reward, reward_facts
from skyrl_train.types import FailureKind, SamplingParams, Trajectory
from tests.support.fakes import FakeEngine, make_prompts, make_tokenizer

JUDGE = {"_target_": "judge", "url": "http://127.0.0.1:9", "model": "m"}
ENDS: dict[str, list[tuple[Any, dict[str, Any]]]] = {
    "exact_match": [
        ("exact_match", {"completion": "a", "answer": "a"}),
        ("exact_match", {"completion": "b", "answer": "a"}),
    ],
    "choice": [("choice", {"completion": "(A)", "answer": "A"}), ("choice", {"completion": "(B)", "answer": "A"})],
    "math_verify": [
        ("math_verify", {"completion": "1", "answer": "1"}),
        ("math_verify", {"completion": "2", "answer": "1"}),
    ],
    "json_schema": [
        ("json_schema", {"completion": "1", "schema": {"type": "number"}}),
        ("json_schema", {"completion": "a", "schema": {"type": "number"}}),
    ],
    "regex": [({"_target_": "regex", "pattern": "a"}, {"completion": each}) for each in "ab"],
    "code": [
        ({"_target_": "code", "sandbox": "off"}, {"completion": "x = 1", "tests": [f"assert x == {n}"]}) for n in (1, 2)
    ],
    "length_penalty": [
        ({"_target_": "length_penalty", "start": 1, "end": 2}, {"response_length": length}) for length in (0, 10**9)
    ],
    "not_stopped_penalty": [("not_stopped_penalty", {"stop_reason": each}) for each in ("stop", "length")],
}


@pytest.mark.parametrize("name", sorted(set(REWARDS) - {"judge", "model"}))
def test_a_reward_reaches_both_ends_of_the_range_that_it_declares(name: str) -> None:
    ends = []
    for spec, facts in ENDS[name]:
        sample = {
            "completion_messages": [],
            "messages": [],
            "num_turns": 1,
            "stop_reason": "stop",
            "response_length": 1,
        }
        given = {"prompt": [], "uid": "p", **{key: facts[key] for key in facts if key not in {*sample, "completion"}}}
        value: Any = call_reward(spec, given, [{**sample, "completion": "", **facts}])
        ends.append(value[name] if isinstance(value, dict) else value)
    assert reward_facts(ENDS[name][0][0]).range == (min(ends), max(ends))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (JUDGE, (0.0, 1.0)),
        ({**JUDGE, "reply": "grades", "grades": {"good": 2.0, "bad": -1.0}}, (-1.0, 2.0)),
        ({**JUDGE, "rubric": [{"name": "a", "weight": 3.0}, {"name": "b", "weight": -0.5}]}, (-0.5, 3.0)),
        ({"_target_": "model", "path": "x"}, (-100.0, 100.0)),
        ({"_target_": "model", "path": "x", "range": [0, 1]}, (0.0, 1.0)),
    ],
)
def test_settings_of_judges_and_models_say_their_range(spec: Any, expected: tuple[float, float]) -> None:
    assert reward_facts(spec).range == expected


@within(-1.0, 2.0)
def says(completion: str, value: float) -> float:
    return value


@within(0.0, 1.0)
def names(completion: str, value: float) -> dict[str, float]:
    return {"first": 1.0, "second": value}


@within(0.0, 1.0, counts=("seen",))
def counts(completion: str, value: float) -> dict[str, float]:
    return {"seen": 7.0} if value < 0 else {"seen": 7.0, "first": 0.5, "second": value}


def scored(target: str, value: float) -> Trajectory:
    """A trajectory of one response after its reward was asked."""
    tokenizer = make_tokenizer()
    reward = {"_target_": f"{__name__.rpartition('.')[2]}:{target}", "value": value}
    environment = EnvironmentConfig(env_class="single_turn", reward=reward, isolation="thread", max_failed_fraction=1.0)
    engine = FakeEngine(lambda _: [*tokenizer.encode("4"), 3])
    generator = RolloutGenerator(engine, tokenizer, GeneratorConfig(max_turns=1), environment, seed=0)
    try:
        prompts = make_prompts(1)
        (trajectory,) = generator.generate(
            prompts, n_samples_per_prompt=1, sampling=SamplingParams(), global_step=1, purpose="train"
        ).trajectories
    finally:
        generator.close()
    return trajectory


def test_several_rewards_keep_their_names_beside_what_is_counted_which_alone_is_none() -> None:
    assert scored("counts", 0.25).rewards == {"first": 0.5, "second": 0.25, "counts_seen": 7.0}
    failure = scored("counts", -1.0).failure
    assert failure is not None
    assert (failure.kind, failure.message) == (
        FailureKind.INVALID_REWARD,
        "counts returned seen alone, which is no reward",
    )


@pytest.mark.parametrize("value", [-1.0, 2.0])
def test_a_value_at_the_end_of_the_range_is_a_reward(value: float) -> None:
    assert scored("says", value).reward == value


@pytest.mark.parametrize(
    ("target", "value", "message"),
    [
        ("says", 500000000.0, "says returned says=500000000.0, outside the range -1 to 2 that it declares"),
        ("says", -1.0000001, "says returned says=-1.0000001, outside the range -1 to 2 that it declares"),
        ("names", 1.5, "names returned second=1.5, outside the range 0 to 1 that it declares"),
    ],
)
def test_a_value_outside_the_range_fails_its_trajectory_and_is_neither_clipped_nor_0(
    target: str, value: float, message: str
) -> None:
    failure = scored(target, value).failure
    assert failure is not None
    assert (failure.kind, failure.message) == (FailureKind.INVALID_REWARD, message)


@pytest.mark.parametrize("ends", [(0.0, math.inf), (1.0, 0.0), (math.nan, 1.0)])
def test_a_range_is_finite_and_in_order(ends: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="must be finite"):
        within(*ends)
