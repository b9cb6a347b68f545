"""The files of supervised training under conf/ against its schema, and its command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from skyrl_train.config import SFT_RULES, SFTConfig
from skyrl_train.config.derived import sft_learner_settings
from skyrl_train.config.door import read_root
from skyrl_train.config.fields import walk
from skyrl_train.config.rules import rule_violations, run_rules
from skyrl_train.runs.cli import machine
from skyrl_train.runs.cli.command_line import preflight
from skyrl_train.runs.cli.composition import load_node, plain_values
from skyrl_train.runs.cli.conf_folder import conf_dir
from tests.support.composing import composed

FILES = sorted([*conf_dir().glob("sft_*/*.yaml"), *conf_dir().glob("experiment/sft_*.yaml")])
PLATFORMS = ("cpu", "gpu")


def sft(*overrides: str) -> SFTConfig:
    return load_node(composed(*overrides, root="sft"), SFTConfig)


def choice(file: Path) -> str:
    prefix = "+" if file.parent.name == "experiment" else ""
    return f"{prefix}{file.parent.name}={file.stem}"


def leaves(node: Any, prefix: str) -> list[str]:
    if not isinstance(node, Mapping):
        return [prefix.rstrip(".")]
    return [leaf for key, value in node.items() for leaf in leaves(value, f"{prefix}{key}.") if key != "defaults"]


def test_without_choices_it_is_the_schema_but_for_data_layout_rate_tracker_and_folder() -> None:
    settings = ["trainer.layout=padded", "trainer.optimizer.lr=1e-5"]
    config = sft("sft_platform=cpu", "tracker=[]", "output_dir=outputs", *settings)
    default = SFTConfig()
    assert (config.trainer, config.model, config.platform) == (default.trainer, default.model, default.platform)
    assert (config.placement, config.strategy, config.tracker) == (default.placement, default.strategy, default.tracker)


@pytest.mark.parametrize("file", FILES, ids=choice)
def test_every_leaf_of_a_file_is_a_setting(file: Path) -> None:
    known = {field.path for field in walk(SFTConfig) if not field.section}
    package = "data." if file.parent.name == "sft_data" else ""
    assert set(leaves(yaml.safe_load(file.read_text(encoding="utf-8")), package)) <= known


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("file", FILES, ids=choice)
def test_every_choice_composes_and_breaks_no_rule(file: Path, platform: str) -> None:
    first = [] if file.parent.name == "sft_platform" else [f"sft_platform={platform}"]
    loaded = read_root(plain_values(composed(*first, choice(file), root="sft")), SFTConfig)
    assert [str(problem) for problem in (*loaded.violations, *rule_violations(loaded.config, SFT_RULES))] == []


def test_the_cpu_platform_trains_the_bundled_model_on_the_bundled_problems() -> None:
    config = sft("+experiment=sft_gsm8k", "sft_platform=cpu")
    assert config.model.path == "builtin:tiny_qwen2"
    assert config.data.train == ("builtin:word_problems/train",)
    assert config.data.completion_column == "extra_info.answer"
    assert list(run_rules(config, machine.MACHINE_RULES)) == []


def test_a_learner_is_configured_for_plain_likelihood_in_one_step_a_batch() -> None:
    settings = sft_learner_settings(sft("+experiment=sft_gsm8k", "sft_platform=cpu"), total_steps=7)
    assert settings.algorithm.policy_loss == "cross_entropy"
    assert settings.algorithm.loss_reduction == "token_mean"
    assert settings.schedule.optimizer_steps == 7
    assert settings.on_policy
    assert settings.optimizer is not None
    assert settings.optimizer.lr == 1e-3
    assert settings.temperature == 1.0


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["trainer.batch_sise=4"], ["trainer.batch_sise: is not a setting", "Did you mean trainer.batch_size?"]),
        (["trainer.batch_size=abc"], ["trainer.batch_size: must be an integer"]),
        (["trainer.policy.optimizer.lr=1"], ["is not a setting", "trainer.optimizer.lr"]),
        (["data.train=[missing.jsonl]"], ["data.train: must be data that can be found"]),
        (["platform.name=gpu"], ["platform.name: is chosen with the group", "sft_platform=gpu"]),
        (["data.weights=[1,2]"], ["data.weights: must be one for each of the 1 entries"]),
        (["data.weights=[-1]"], ["data.weights"]),
        (["trainer.tokens_per_step=9", "trainer.docs_per_step=9"], ["excludes trainer.tokens_per_step=9"]),
        (["trainer.docs_per_step_exact=true"], ["trainer.docs_per_step_exact"]),
        (["data.validation=[]", "trainer.keep_best=true"], ["trainer.keep_best: needs held-out examples"]),
        (["trainer.optimizer.betas=[2,0.9]"], ["trainer.optimizer.betas: must be at least 0 and below 1 (item 0)"]),
        (["strategy=fsdp2"], ["strategy.name: must be single with placement.backend=inline"]),
        (["trainer.resume_mode=from_path"], ["trainer.resume_path: must be given"]),
        (["trainer.micro_batching=tokens"], ["trainer.micro_batching: must be one of"]),
        (
            ["trainer.layout=packed", "trainer.max_tokens_per_microbatch=300", "data.max_length=301"],
            ["trainer.max_tokens_per_microbatch: must hold the longest example", "data.max_length=301"],
        ),
        (
            [
                "trainer.layout=packed",
                "trainer.max_tokens_per_microbatch=300",
                "data.max_length=300",
                "trainer.pad_to_multiple_of=64",
            ],
            ["(320 with trainer.pad_to_multiple_of=64)", "Try trainer.max_tokens_per_microbatch=320"],
        ),
        (["trainer.batch_size=0", "data.over_long=cut"], ["trainer.batch_size", "data.over_long: must be one of"]),
    ],
)
def test_whatever_is_wrong_is_said_before_anything_is_loaded(
    arguments: list[str], messages: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        preflight(["sft_platform=cpu", *arguments], config_name="sft")
    assert exit_.value.code == 2
    printed = capsys.readouterr().err
    for message in messages:
        assert message in printed


def test_a_sound_command_line_passes() -> None:
    preflight(["+experiment=sft_gsm8k", "sft_platform=cpu", "trainer.num_steps=3"], config_name="sft")
