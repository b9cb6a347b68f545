from __future__ import annotations

from typing import Annotated, Any, get_args, get_origin

import pytest
import yaml
from omegaconf import OmegaConf

from skyrl_train.config.door.load import load_config, load_root, read_root
from skyrl_train.config.fields.fields import Most, Range, fact, is_optional, strip, unusual_values, walk
from skyrl_train.config.schema import Config
from skyrl_train.config.sft import SFTConfig
from skyrl_train.errors import ConfigError
from skyrl_train.runs.cli import load_node


def test_an_empty_config_is_the_defaults() -> None:
    assert load_config({}) == Config()


@pytest.mark.parametrize("text", ["1e-6", "1.0e-6", "0.000001"])
def test_small_numbers_in_yaml_are_numbers_whoever_reads_it(text: str) -> None:
    document = f"trainer: {{policy: {{optimizer: {{lr: {text}}}}}}}"

    assert load_node(OmegaConf.create(document), Config).trainer.policy.optimizer.lr == 1e-6
    assert load_config(yaml.safe_load(document)).trainer.policy.optimizer.lr == 1e-6


def test_interpolations_are_resolved() -> None:
    node = OmegaConf.create({"seed": 7, "run_name": "run_${seed}", "trainer": {"total_steps": "${seed}"}})
    config = load_node(node, Config)
    assert config.run_name == "run_7"
    assert config.trainer.total_steps == 7


def test_one_failing_interpolation_does_not_hide_the_next_problem() -> None:
    node = OmegaConf.create(
        {"run_name": "${nowhere}", "seed": -1, "data": {"train": ["${gone}", "a.jsonl"]}, "model": {"path": "???"}}
    )

    with pytest.raises(ConfigError) as error:
        load_node(node, Config)

    found = {violation.field: violation for violation in error.value.violations}
    assert set(found) == {"run_name", "seed", "data.train", "model.path"}
    assert found["run_name"].value == "${nowhere}"
    assert found["run_name"].remedy == "Interpolation key 'nowhere' not found"
    assert found["model.path"].rule == "must be given"


def test_the_error_counts_and_lists_the_problems() -> None:
    with pytest.raises(ConfigError) as error:
        load_config({"trainer": {"train_batch_size": "abc", "train_batch_sise": 4}})

    assert str(error.value).splitlines() == [
        "2 problems in the configuration:",
        "  - trainer.train_batch_sise: is not a setting; got 4. Did you mean trainer.train_batch_size?",
        "  - trainer.train_batch_size: must be an integer; got 'abc'. Try trainer.train_batch_size=32",
    ]


ABSURD: dict[type, dict[str, object]] = {
    Config: {
        "trainer.policy.optimizer.lr": 5e5,
        "trainer.total_steps": 10**14,
        "environment.num_workers": 10**8,
        "placement.policy_num_workers": 10**8,
        "generator.vllm.num_engines": 10**8,
        "trainer.train_batch_size": 10**12,
        "generator.n_samples_per_prompt": 10**9,
        "generator.sampling.max_generate_length": 10**12,
        "environment.step_timeout_s": 1e12,
        "environment.worker_memory_gb": 1e9,
    },
    SFTConfig: {
        "trainer.optimizer.lr": 5e5,
        "trainer.num_steps": 10**14,
        "trainer.batch_size": 10**12,
        "data.max_length": 10**12,
        "placement.policy_num_workers": 10**8,
    },
}


@pytest.mark.parametrize("root", [Config, SFTConfig])
def test_values_with_which_nothing_could_work_are_refused_all_at_once(root: type) -> None:
    node = OmegaConf.create({})
    for name, value in ABSURD[root].items():
        OmegaConf.update(node, name, value)
    with pytest.raises(ConfigError) as error:
        load_node(node, root)
    found = {violation.field: violation for violation in error.value.violations}
    assert set(found) == set(ABSURD[root])
    for name, value in ABSURD[root].items():
        assert found[name].rule.startswith("must be at most ")
        assert found[name].value == repr(value)
        assert found[name].remedy.startswith(f"try {name}=")


def counted(annotation: Any) -> Any:
    """The annotation of `X` in `X | None`, which may carry a resume class around it."""
    inner = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    return get_args(inner)[0] if is_optional(inner) else annotation


@pytest.mark.parametrize("root", [Config, SFTConfig])
def test_every_number_of_the_schema_that_counts_something_has_a_most(root: type) -> None:
    annotations = {entry.path: counted(entry.annotation) for entry in walk(root)}
    bounded = {path for path, each in annotations.items() if fact(each, Most) is not None}
    bounded |= {path for path, each in annotations.items() if (found := fact(each, Range)) and found.max is not None}
    counts = {entry.path for entry in walk(root) if strip(entry.annotation) is int}
    assert counts - bounded <= {
        "seed",
        "generator.sampling.top_k",
        "generator.eval_sampling.top_k",
        "trainer.eval_sampling.top_k",
    }


def test_large_values_that_somebody_may_mean_are_named() -> None:
    assert list(unusual_values(Config())) == []
    config = load_config(
        {"trainer": {"policy": {"optimizer": {"lr": 5}}}, "generator": {"sampling": {"temperature": 9}}}
    )
    found = {name: value for name, value, _ in unusual_values(config)}
    assert found == {"trainer.policy.optimizer.lr": 5.0, "generator.sampling.temperature": 9.0}
    sft = load_root({"trainer": {"optimizer": {"lr": 5}}}, SFTConfig)
    assert [name for name, _, _ in unusual_values(sft)] == ["trainer.optimizer.lr"]


def test_what_was_refused_carries_its_default() -> None:
    loaded = read_root({"seed": "x", "trainer": {"total_steps": 3}}, Config)
    assert loaded.config.seed == 0
    assert loaded.config.trainer.total_steps == 3
    assert loaded.refused == {"seed"}


def test_an_alias_becomes_what_it_stands_for_unless_another_choice_stands_beside_it() -> None:
    trainer = load_config({"trainer": {"auto_micro_batch_size": True, "micro_batching": "fixed"}}).trainer
    assert trainer.micro_batching == "auto"
    trainer = load_config({"trainer": {"auto_micro_batch_size": True, "micro_batching": "token_budget"}}).trainer
    assert trainer.micro_batching == "token_budget"


def test_the_result_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        load_config({}).seed = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("section", "betas"),
    [("trainer.policy.optimizer", [0.9, 1.0]), ("critic.optimizer", [-0.1, 0.9]), ("trainer.optimizer", [1.0, 0.5])],
)
def test_each_averaging_coefficient_is_at_least_0_and_below_1(section: str, betas: list[float]) -> None:
    root = SFTConfig if section == "trainer.optimizer" else Config
    with pytest.raises(ConfigError) as error:
        load_node(OmegaConf.create(OmegaConf.from_dotlist([f"{section}.betas={betas}"])), root)
    (violation,) = error.value.violations
    assert violation.field == f"{section}.betas"
    assert violation.rule.startswith("must be at least 0 and below 1 (item ")
    assert violation.remedy == f"try {section}.betas=[0.9,0.999]"
