"""What is settled of a run, or refused, before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.config import Config, SFTConfig
from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.config.models import GeneratorConfig, ModelConfig, PlacementConfig, PlatformConfig, StrategyConfig
from skyrl_train.errors import ConfigError, ModelError
from skyrl_train.runs.resolving import resolve, reward_models, with_reward_weights
from skyrl_train.trainers.checkpoints import changes_since, flat_config, settings_of
from tests.support.reward_model_cases import save_reward_model

JUDGE = {"_target_": "judge", "url": "http://127.0.0.1:9", "model": "m"}


def config_of(*rewards: Any) -> Config:
    return replace(Config(), environment=EnvironmentConfig(env_class="single_turn", rewards=rewards))


def test_a_run_is_placed_and_sized_and_says_what_it_is() -> None:
    config = Config(model=ModelConfig(gradient_checkpointing="auto"))
    resolved = resolve(config)
    assert resolved.config.model.gradient_checkpointing is False  # on a CPU
    assert resolved.promise == "identical"
    assert resolved.lines[1] == "placement   inline, strategy single"
    assert resolve(resolved.config) == resolved


def test_every_broken_rule_is_told_at_once() -> None:
    broken = replace(Config(), generator=replace(GeneratorConfig(), n_samples_per_prompt=3, verify_weight_sync=True))
    with pytest.raises(ConfigError) as raised:
        resolve(broken)
    assert len(raised.value.violations) > 1
    with pytest.raises(ConfigError, match=r"data\.train"):
        resolve(replace(SFTConfig(), data=replace(SFTConfig().data, train=())))


def test_a_plan_has_what_is_wrong_in_it_and_goes_on() -> None:
    broken = replace(Config(), generator=replace(GeneratorConfig(), n_samples_per_prompt=3, verify_weight_sync=True))
    planned = resolve(broken, purpose="plan")
    with pytest.raises(ConfigError) as raised:
        resolve(broken)
    assert planned.violations == raised.value.violations
    assert planned.is_placed
    assert planned.config.model.gradient_checkpointing is False  # on a CPU


def test_a_plan_that_cannot_be_placed_says_so_beside_what_else_is_wrong() -> None:
    platform = PlatformConfig(name="gpu", device="cuda:0")
    stated = PlacementConfig(auto=True, policy_num_nodes=2)
    config = replace(
        Config(), platform=platform, placement=stated, trainer=replace(Config().trainer, train_batch_size=3)
    )
    planned = resolve(config, purpose="plan")
    assert not planned.is_placed
    fields = {each.field for each in planned.violations}
    assert "placement.policy_num_nodes" in fields
    assert any(field.startswith("trainer.") for field in fields)


@pytest.mark.parametrize("config", [Config(), SFTConfig()])
def test_a_recorded_step_is_executed_again_in_this_process(config: Config | SFTConfig) -> None:
    many = PlacementConfig(backend="ray", policy_num_workers=4)
    trainer: Any = replace(config.trainer, profile_steps=(1,))
    platform = PlatformConfig(name="gpu", device="cuda:3")
    changes: dict[str, Any] = {"placement": many, "strategy": StrategyConfig(name="fsdp2"), "platform": platform}
    recorded = replace(config, trainer=trainer, **changes)
    here = resolve(recorded, purpose="again").config
    assert (here.placement, here.strategy, here.trainer.profile_steps) == (PlacementConfig(), StrategyConfig(), ())
    assert here.platform.on_gpu is torch.cuda.is_available()
    assert here.model == recorded.model


COMMAND = """
import sys
from skyrl_train.config import Config
from skyrl_train.config.data import DataConfig
from skyrl_train.errors import SkyrlTrainError
from skyrl_train.runs import train

try:
    train(Config(output_dir=sys.argv[1], data=DataConfig(train=(sys.argv[2],))))
except SkyrlTrainError as error:
    print(type(error).__name__, "torch" in sys.modules)
"""


@pytest.mark.slow
def test_rows_that_cannot_be_used_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{")
    command = [sys.executable, "-c", COMMAND, str(tmp_path / "run"), str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "DataError False"


def test_the_weights_of_a_reward_model_are_part_of_the_run(tmp_path: Path) -> None:
    model = {"_target_": "model", "path": str(save_reward_model(tmp_path))}
    config = with_reward_weights(config_of(JUDGE, {**model, "weight": 0.5}))
    assert config.environment.rewards[0] == JUDGE
    pinned = config.environment.rewards[1]
    assert isinstance(pinned, dict)
    assert {**pinned, "weights": ""} == {**model, "weight": 0.5, "weights": ""}
    assert str(pinned["weights"]).startswith("sha256:")
    assert [reward.weights for _, reward in reward_models(config.environment)] == [pinned["weights"]]
    save_reward_model(tmp_path, seed=1)
    other = with_reward_weights(config_of(JUDGE, {**model, "weight": 0.5}))
    found = changes_since(flat_config(settings_of(config)), flat_config(settings_of(other)), Config)
    assert [each.setting for each in found] == ["environment.rewards"]
    plain = config_of(JUDGE)
    assert with_reward_weights(plain) is plain
    with pytest.raises(ModelError, match="no such folder"):
        with_reward_weights(config_of({**model, "path": str(tmp_path / "nothing")}))
