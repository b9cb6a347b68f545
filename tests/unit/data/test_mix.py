"""Several data sets in one run: their shares, their order, their own environments and sampling."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config import Config
from skyrl_train.config.data import DataConfig, EnvironmentConfig
from skyrl_train.config.door import load_config
from skyrl_train.config.models import GeneratorConfig
from skyrl_train.config.rules import MixedDataset, mixed_datasets, validate_config
from skyrl_train.data.mix import MixedSource
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.rollout import RolloutGenerator
from skyrl_train.runs import load_data
from skyrl_train.trainers import rollout_metrics
from skyrl_train.types import Prompt, SamplingParams
from tests.support.fake_environments import FAKE_ENVIRONMENT, done_with
from tests.support.fakes import FakeEngine, make_tokenizer

TOKENIZER = make_tokenizer()
TRAIN = "builtin:word_problems/train"
A = [Prompt(uid=f"a/{index}", messages=()) for index in range(7)]
B = [Prompt(uid=f"b/{index}", messages=()) for index in range(5)]


def source(*weights: float, batch_size: int = 4, seed: int = 0, shuffle: bool = True) -> MixedSource:
    datasets = [(name, prompts, weight) for name, prompts, weight in zip("ab", (A, B), weights)]
    return MixedSource(datasets, batch_size, shuffle, seed)


def test_slots_are_given_to_the_data_set_that_is_furthest_behind() -> None:
    mixed = source(0.75, 0.25)
    assert [mixed.slots(position) for position in range(2)] == [[0, 0, 1, 0], [0, 0, 1, 0]]


@pytest.mark.parametrize("weights", [(0.7, 0.3), (5.0, 1.0), (1.0, 1.0), (0.9, 0.1)])
def test_each_batch_is_full_and_each_share_is_kept_over_any_stretch(weights: tuple[float, float]) -> None:
    mixed = source(*weights)
    taken: Counter[int] = Counter()
    for position in range(300):
        slots = mixed.slots(position)
        assert len(slots) == len(mixed.batch(position)) == 4
        taken.update(slots)
        share = 4 * (position + 1) * weights[0] / sum(weights)
        assert abs(taken[0] - share) <= 1


def test_every_prompt_of_a_data_set_comes_once_an_epoch() -> None:
    mixed = source(0.75, 0.25)
    uids = [prompt.uid for position in range(35) for prompt in mixed.batch(position)]
    assert Counter(uid for uid in uids if uid.startswith("a")) == {prompt.uid: 15 for prompt in A}
    assert Counter(uid for uid in uids if uid.startswith("b")) == {prompt.uid: 7 for prompt in B}


def test_a_batch_is_a_function_of_seed_and_position_alone() -> None:
    one, other = source(0.6, 0.4), source(0.6, 0.4)
    for position in reversed(range(9)):
        other.batch(position)
    batches = [[prompt.uid for prompt in one.batch(position)] for position in range(9)]
    assert [[prompt.uid for prompt in other.batch(position)] for position in range(9)] == batches
    assert [[prompt.uid for prompt in source(0.6, 0.4, seed=1).batch(position)] for position in range(9)] != batches
    plain = source(0.5, 0.5, shuffle=False).batch(0)
    assert [prompt.uid for prompt in plain] == ["a/0", "b/0", "a/1", "b/1"]


def test_a_data_set_that_is_smaller_than_its_share_of_a_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.mix\[1\]\.weight: gives 6 prompts of a batch to b, which has 5"):
        source(0.5, 0.5, batch_size=12)


def config_of(*mix: dict[str, Any], **sections: Any) -> Config:
    return load_config({"data": {"mix": list(mix)}, **sections})


def test_an_entry_is_laid_over_the_settings_of_the_run() -> None:
    config = config_of(
        {"train": ["x.jsonl"], "weight": 3, "prompt_column": "question", "sampling": {"top_p": 0.9}},
        {"train": "y.jsonl", "name": "other", "environment": {"env_class": "gsm8k", "num_workers": 2}},
        environment={"step_timeout_s": 7.0},
    )
    data = replace(config.data, max_prompt_length=99)
    first, second = mixed_datasets(data, config.environment, config.generator.sampling)[0]
    assert (first.name, first.weight, first.data.prompt_column, first.sampling) == (
        "x",
        3.0,
        "question",
        {"top_p": 0.9},
    )
    assert (first.data.max_prompt_length, first.data.validation, first.environment) == (99, (), config.environment)
    assert (second.name, second.weight, second.data.train) == ("other", 1.0, ("y.jsonl",))
    assert second.environment == replace(config.environment, env_class="gsm8k", num_workers=2)


def test_an_entry_evaluates_as_it_trains_but_for_the_temperature_and_what_it_states() -> None:
    sampling = {"max_generate_length": 32, "top_k": 7, "temperature": 1.0}
    config = config_of({"train": ["x.jsonl"], "sampling": sampling, "eval_sampling": {"top_k": 3}})
    entry = mixed_datasets(config.data, config.environment, config.generator.sampling)[0][0]
    assert (entry.sampling, entry.eval_sampling) == (sampling, {"max_generate_length": 32, "top_k": 3})


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"train": TRAIN, "weight": 0}, r"data.mix[1].weight: must be a number greater than 0; got 0"),
        ({"train": TRAIN, "weight": -1.0}, r"data.mix[1].weight: must be a number greater than 0; got -1.0"),
        ({"train": TRAIN, "weight": "x"}, r"data.mix[1].weight: must be a number greater than 0; got 'x'"),
        ({"weight": 1}, r"data.mix[1].train: must name at least one source"),
        ({"train": TRAIN, "name": "a"}, r"data.mix[1].name: must be another name"),
        ({"train": TRAIN, "wieght": 1}, r"data.mix[1].wieght: is not a setting"),
        ({"train": TRAIN, "shuffle": False}, r"data.mix[1].shuffle: holds for all data sets"),
        (
            {"train": TRAIN, "sampling": {"top_p": 2}},
            r"data.mix[1].sampling.top_p: must be greater than 0 and at most 1",
        ),
        (
            {"train": TRAIN, "sampling": {"temperature": 0.5}},
            r"data.mix[1].sampling.temperature: must be that of the run",
        ),
        ({"train": TRAIN, "environment": {"num_worker": 2}}, r"data.mix[1].environment.num_worker: is not a setting"),
    ],
)
def test_what_is_wrong_with_an_entry_is_named(entry: dict[str, Any], message: str) -> None:
    found = validate_config(config_of({"train": TRAIN, "name": "a"}, entry))
    assert [str(each).startswith(message) for each in found].count(True) == 1, [str(each) for each in found]


def answer(_: object) -> list[int]:
    return [*TOKENIZER.encode("#### 4"), 3]


def test_each_data_set_has_its_own_environment_and_sampling() -> None:
    threads = EnvironmentConfig(env_class=FAKE_ENVIRONMENT, isolation="thread")
    words = EnvironmentConfig(env_class="word_problems")
    mix = [
        MixedDataset(name="a", weight=1, data=DataConfig(), environment=threads, sampling={"max_generate_length": 5}),
        MixedDataset(name="b", weight=1, data=DataConfig(), environment=words, eval_sampling={"top_k": 3}),
    ]
    question = ({"role": "user", "content": "2 + 2?"},)
    truth = {"reward_spec": {"ground_truth": "4"}}
    prompts = [
        Prompt(uid="a/0", dataset="a", messages=question, extras={"steps": [done_with(0.25)]}),
        Prompt(uid="b/0", dataset="b", messages=question, extras=truth),
    ]
    engine = FakeEngine(answer)
    generator = RolloutGenerator(engine, TOKENIZER, GeneratorConfig(), EnvironmentConfig(), 0, mix=mix)
    try:
        for purpose in ("train", "eval"):
            batch = generator.generate(
                prompts, n_samples_per_prompt=1, sampling=SamplingParams(), global_step=1, purpose=purpose
            )
    finally:
        generator.close()
    assert [trajectory.reward for trajectory in batch.trajectories] == [0.25, 1.0]
    asked = [(each.sampling.max_generate_length, each.sampling.top_k) for each in engine.requests]
    assert sorted(asked[:2]) == [(5, -1), (256, -1)]
    assert sorted(asked[2:]) == [(256, -1), (256, 3)]
    metrics = rollout_metrics(batch)
    assert (metrics["dataset/a/reward/mean"], metrics["dataset/b/reward/mean"]) == (0.25, 1.0)
    assert metrics["dataset/b/response_length/mean"] == 3.0


def test_the_prompts_of_a_mix_bear_the_names_of_their_data_sets(tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"question": "2+2?", "answer": "4"}\n' * 8)
    config = config_of(
        {"train": TRAIN, "name": "words", "weight": 0.75, "max_train_prompts": 12},
        {"train": str(own), "weight": 0.25, "validation": str(own)},
        trainer={"train_batch_size": 8, "policy_mini_batch_size": 8, "critic_mini_batch_size": 8},
    )
    data = load_data(config)
    assert data.num_train == 20
    assert [prompt.dataset for prompt in data.train(3)] == ["words", "words", "own", "words"] * 2
    assert {prompt.uid.partition("/")[0] for prompt in data.validation} == {"own"}
    own.write_text('{"question": "2+2?", "answer": "four"}\n')
    with pytest.raises(DataError, match=r"own.jsonl, line 1: reward_spec.ground_truth: must be an integer; got 'four'"):
        load_data(config)
