from __future__ import annotations

import dataclasses

import pytest

from skyrl_train.config.derived import sft_learner_settings
from skyrl_train.config.fields.fields import (
    Free,
    LayoutOnly,
    PositiveInt,
    Resume,
    SchemaField,
    defaults,
    is_refused,
    recorded,
    walk,
)
from skyrl_train.config.fields.names import nearest, suggest
from skyrl_train.config.schema import Config, LoopConfig, RunConfig, TrainerConfig
from skyrl_train.config.sft import SFTConfig, SFTTrainerConfig


def unclassified(schema: type) -> list[SchemaField]:
    """Settings of which nothing says what a change means to a run that goes on."""
    return [field for field in walk(schema) if not field.section and field.resume is None]


@dataclasses.dataclass(frozen=True)
class Inner:
    plain: PositiveInt = 1
    own: LayoutOnly[PositiveInt] = 1


@dataclasses.dataclass(frozen=True)
class Outer:
    section: Inner = dataclasses.field(default_factory=Inner)
    classified: Free[Inner] = dataclasses.field(default_factory=Inner)
    bare: int = 0


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
        ("generator.n_sampels", "generator.n_samples_per_prompt"),
        ("data.max_prompt", "data.max_prompt_length"),
        ("trainer.algorithm.entropy", "trainer.algorithm.entropy_coef"),
        ("generator.temperature", "generator.sampling.temperature"),
        ("trainer.xyzzy", None),
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
    assert fields["generator.vllm.engine_args"].open
    assert fields["environment.env_class"].open
    assert not fields["seed"].section


def test_defaults_are_plain_containers() -> None:
    tree = defaults(Config)
    assert tree["data"]["train"] == ["builtin:word_problems/train"]
    assert tree["trainer"]["policy"]["optimizer"]["betas"] == [0.9, 0.999]
    assert set(tree) == {field.name for field in dataclasses.fields(Config)}


@pytest.mark.parametrize("schema", [Config, SFTConfig])
def test_every_field_states_whether_it_may_change_on_resume(schema: type) -> None:
    missing = [field.path for field in unclassified(schema)]
    assert missing == [], "declare them as Free[...], LayoutOnly[...], Forks[...] or Fixed[...]"


def test_a_field_without_a_class_is_found() -> None:
    assert [field.path for field in unclassified(Outer)] == ["section.plain", "bare"]


def test_a_field_has_the_class_that_it_states_or_that_of_its_section() -> None:
    fields = {field.path: field.resume for field in walk(Config)}
    assert fields["generator.sampling.temperature"] is Resume.FORKS
    assert fields["generator.eval_sampling.temperature"] is Resume.FREE
    assert fields["placement.call_timeout_s"] is Resume.FREE
    assert fields["placement.colocate_all"] is Resume.LAYOUT
    assert fields["model.lora.rank"] is Resume.FIXED


def test_what_nothing_reads_without_another_setting_names_it() -> None:
    fields = {field.path: [setting for setting, _ in field.read_with] for field in walk(Config)}
    assert fields["critic.model.lora.targets"] == ["critic.model.path", "critic.model.path", "critic.model.lora.rank"]
    assert fields["model.lora.alpha"] == ["model.lora.rank"]
    assert fields["model.lora.rank"] == fields["model.path"] == []


def test_supervised_training_shares_the_settings_that_are_declared_once() -> None:
    assert issubclass(SFTConfig, RunConfig)
    assert issubclass(SFTTrainerConfig, LoopConfig)
    twice = {field.name for field in dataclasses.fields(TrainerConfig)} - {
        field.name for field in dataclasses.fields(LoopConfig)
    }
    own = {field.name for field in dataclasses.fields(SFTTrainerConfig)} & twice
    assert own == {"eval_batch_size"}, "what it counts differs"
    config = SFTConfig(seed=7, trainer=SFTTrainerConfig(memory_retries=5, layout="packed"))
    learner = sft_learner_settings(config)
    assert (learner.seed, learner.micro_batching.memory_retries, learner.micro_batching.layout) == (7, 5, "packed")


def test_what_is_read_of_a_section_is_recorded_by_properties_too() -> None:
    read: list[str] = []
    config = recorded(Config(), read.append)
    assert config.trainer.policy.optimizer.lr == Config().trainer.policy.optimizer.lr
    assert not config.trainer.algorithm.off_policy.enabled
    assert read[0] == "trainer.policy.optimizer.lr"
    assert "trainer.algorithm.off_policy.weight" in read[1:]
    assert all(path.startswith("trainer.algorithm.off_policy.") for path in read[1:])


def test_a_changed_copy_is_recorded_like_the_original() -> None:
    read: list[str] = []
    changed = dataclasses.replace(recorded(Config().strategy, read.append, "strategy."), cpu_offload=True)
    read.clear()
    assert changed.cpu_offload
    assert read == ["strategy.cpu_offload"]


@pytest.mark.parametrize(
    ("refused", "expected"),
    [("a.b", True), ("a.b[0]", True), ("a.b.key", True), ("a", True), ("a.bc", False), ("a.c", False)],
)
def test_a_setting_is_refused_with_its_entries_and_its_section(refused: str, expected: bool) -> None:
    assert is_refused("a.b", {refused}) is expected
