"""Custom rules of batch sizes, filters and orders of prompts."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from skyrl_train.algorithms import mask_rows
from skyrl_train.config import Config, TrainerConfig
from skyrl_train.config.algorithm import AlgorithmConfig, FilterConfig
from skyrl_train.config.door import load_config
from skyrl_train.config.rules import validate_config
from skyrl_train.data import PromptSource
from skyrl_train.errors import BatchError, DataError, Violation
from skyrl_train.runs import assembler
from skyrl_train.types import Outcome, Prompt, RolloutBatch, Trajectory
from tests.support.batch_builders import make_turn


def at_most(config: Config, refused: Collection[str], *, prompts: int) -> list[Violation]:
    size = config.trainer.train_batch_size
    return [Violation(field="trainer.train_batch_size", rule="is too large", value=str(size), remedy="")][
        size <= prompts :
    ]


def test_rules_of_batch_sizes_are_added_or_take_the_place_of_those_that_there_are() -> None:
    rule = {"_target_": "test_custom_rows:at_most", "prompts": 8}
    sizes = {"train_batch_size": 30, "policy_mini_batch_size": 16, "critic_mini_batch_size": 15}

    def rules_broken(*rules: Any) -> list[str]:
        trainer = {**sizes, "batch_rules": list(rules)}
        return [violation.rule[:12] for violation in validate_config(load_config({"trainer": trainer}))]

    assert rules_broken("sizes") == ["must divide "]
    assert rules_broken("sizes", rule) == ["must divide ", "is too large"]
    assert rules_broken(rule) == ["is too large"]
    assert rules_broken({**rule, "prompts": 30}) == []
    assert rules_broken({"_target_": "test_custom_rows:at_most"}) == ["must be give"]


def short_ones(rollouts: RolloutBatch, *, tokens: int) -> list[bool]:
    return [len(each.turns[-1].response_token_ids) <= tokens for each in rollouts.trajectories]


def of_the_first(rollouts: RolloutBatch) -> list[bool]:
    return [True]


def test_a_custom_filter_takes_trajectories_out_of_the_loss() -> None:
    turns = [make_turn([1], [2] * length, reward=1.0) for length in (1, 3)]
    trajectories = tuple(
        Trajectory(prompt_uid="a", sample_index=index, turns=(turn,), outcome=Outcome.DONE)
        for index, turn in enumerate(turns)
    )
    rollouts = RolloutBatch(prompts=(Prompt(uid="a", messages=()),), trajectories=trajectories, n_samples_per_prompt=2)
    trainer = TrainerConfig(train_batch_size=1, policy_mini_batch_size=1)
    config = Config(trainer=trainer)
    batch = assembler(config, rows="per_trajectory")(rollouts, step=0, weight_version=0)

    def kept(spec: Any) -> list[bool]:
        algorithm = AlgorithmConfig(filters=FilterConfig(keep=(spec,)))
        masked = mask_rows(batch, rollouts, algorithm)
        return [bool(masked.padded("loss_mask")[row].any()) for row in range(2)]

    assert kept({"_target_": "test_custom_rows:short_ones", "tokens": 2}) == [True, False]
    assert kept({"_target_": "test_custom_rows:short_ones", "tokens": 3}) == [True, True]
    with pytest.raises(BatchError, match="'test_custom_rows:of_the_first' must say True or False of each of 2"):
        kept("test_custom_rows:of_the_first")


def backwards(num_prompts: int, epoch: int, seed: int, *, skip: int = 0) -> list[int]:
    return list(range(num_prompts))[::-1][skip:]


def test_prompts_come_in_a_custom_order() -> None:
    prompts = [Prompt(uid=str(index), messages=()) for index in range(4)]
    source = PromptSource(prompts, 2, True, 0, order="test_custom_rows:backwards")
    assert [prompt.uid for position in range(2) for prompt in source.batch(position)] == ["3", "2", "1", "0"]
    short = PromptSource(prompts, 2, True, 0, order={"_target_": "test_custom_rows:backwards", "skip": 1})
    with pytest.raises(
        DataError, match=r"data.order=test_custom_rows:backwards\(skip=1\) must name each of 4 prompts once"
    ):
        short.batch(0)
