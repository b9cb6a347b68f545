from __future__ import annotations

import dataclasses

import pytest

from skyrl_train.config.fields import defaults, nearest, suggest, walk
from skyrl_train.config.schema import Config


@pytest.mark.parametrize(
    ("unknown", "meant"),
    [
        ("trainer.train_batch_sise", "trainer.train_batch_size"),
        ("train_batch_size", "trainer.train_batch_size"),
        ("generator.sampling.temprature", "generator.sampling.temperature"),
        ("temperature", "generator.sampling.temperature"),
        ("algorithm.kl_loss_coef", "trainer.algorithm.kl_loss_coef"),
        ("lr", "trainer.policy.optimizer.lr"),
        ("critic.lr", "critic.optimizer.lr"),
        ("trainr.total_steps", "trainer.total_steps"),
        ("modle", "model"),
        ("trainer.foo", None),
        ("zzz", None),
    ],
)
def test_a_misspelt_or_misplaced_key_is_recognised(unknown: str, meant: str | None) -> None:
    assert suggest(unknown, Config) == meant


def test_the_nearest_option_may_also_contain_the_name() -> None:
    options = ["gsm8k_multiturn", "countdown"]
    assert nearest("gsm8k", options) == "gsm8k_multiturn"
    assert nearest("count_down", options) == "countdown"
    assert nearest("chess", options) is None


def test_every_field_is_visited_once_with_its_default() -> None:
    fields = {field.path: field for field in walk(Config)}
    assert len(fields) == len(list(walk(Config)))
    assert fields["trainer.policy.optimizer.lr"].default == 1e-6
    assert fields["trainer.policy.optimizer"].section
    assert fields["environment.kwargs"].open
    assert not fields["seed"].section


def test_defaults_are_plain_containers() -> None:
    tree = defaults(Config)
    assert tree["data"]["train"] == ["builtin:word_problems/train"]
    assert tree["trainer"]["policy"]["optimizer"]["betas"] == [0.9, 0.999]
    assert set(tree) == {field.name for field in dataclasses.fields(Config)}
