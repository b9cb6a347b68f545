"""Real runs of the bundled model that go on, or fork, with another setting: one step each."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from skyrl_train.config import Config
from skyrl_train.errors import ConfigError
from skyrl_train.runs import train
from skyrl_train.telemetry import read_metrics


def make_config(root: Path, **trainer: Any) -> Config:
    """Steps of 4 prompts, 2 samples each, and a checkpoint after each."""
    config = Config(output_dir=str(root))
    sizes = {
        "total_steps": 1,
        "train_batch_size": 4,
        "policy_mini_batch_size": 4,
        "critic_mini_batch_size": 4,
        "ckpt_interval": 1,
        "max_ckpts_to_keep": 9,
        "dump_rollouts": False,
        **trainer,
    }
    sampling = replace(config.generator.sampling, max_generate_length=8)
    return replace(
        config,
        data=replace(config.data, validation=(), max_train_prompts=16),
        generator=replace(config.generator, n_samples_per_prompt=2, sampling=sampling),
        trainer=replace(config.trainer, **sizes),
    )


def with_optimizer(config: Config, **changes: Any) -> Config:
    optimizer = replace(config.trainer.policy.optimizer, **changes)
    return replace(config, trainer=replace(config.trainer, policy=replace(config.trainer.policy, optimizer=optimizer)))


def weights(root: Path) -> dict[str, Tensor]:
    return load_file(root / "export" / "model.safetensors")


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("parent")
    train(make_config(root))
    return root


def forked(root: Path, parent: Path, **trainer: Any) -> Config:
    return make_config(root, total_steps=2, resume_mode="fork", resume_path=str(parent), **trainer)


@pytest.mark.slow
def test_a_fork_trains_at_its_own_rate(tmp_path: Path, parent: Path) -> None:
    before = weights(parent)
    moved = {}
    for lr in (1e-6, 1e-3):
        root = tmp_path / str(lr)
        train(with_optimizer(forked(root, parent), lr=lr))
        (record,) = read_metrics(root / "metrics.jsonl")
        assert (record["step"], record["policy/lr"]) == (2, lr)
        assert record["policy/grad_norm"] > 0
        moved[lr] = largest_difference(weights(root), before)
    assert moved[1e-3] == pytest.approx(1000 * moved[1e-6], rel=0.05)
    changed = json.loads((tmp_path / "0.001" / "fork.json").read_text())["changed"]
    assert {"setting": "trainer.policy.optimizer.lr", "was": 1e-6, "is": 1e-3} in changed


@pytest.mark.slow
def test_a_fork_takes_another_loss_another_batch_and_another_optimizer(tmp_path: Path, parent: Path) -> None:
    config = forked(tmp_path, parent, train_batch_size=2, policy_mini_batch_size=2, critic_mini_batch_size=2)
    algorithm = replace(config.trainer.algorithm, policy_loss="dual_clip", kl_loss_coef=0.1)
    config = with_optimizer(replace(config, trainer=replace(config.trainer, algorithm=algorithm)), name="sgd", lr=0.1)
    train(config)
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert record["loss/kl"] >= 0
    assert json.loads((tmp_path / "fork.json").read_text())["data_position"] == 2


@pytest.mark.slow
def test_another_layout_goes_on_in_the_same_folder_up_to_rounding(tmp_path: Path) -> None:
    train(make_config(tmp_path / "alone", total_steps=2))
    train(make_config(tmp_path / "run"))
    layout = make_config(tmp_path / "run", total_steps=2, layout="packed", micro_train_batch_size_per_gpu=4)
    train(replace(layout, generator=replace(layout.generator, merge_stepwise="off", request_timeout_s=99.0)))
    assert largest_difference(weights(tmp_path / "run"), weights(tmp_path / "alone")) < 1e-6


@pytest.mark.slow
def test_another_rank_of_an_adapter_has_no_place_in_the_checkpoint(tmp_path: Path, parent: Path) -> None:
    config = forked(tmp_path, parent)
    config = replace(config, model=replace(config.model, lora=replace(config.model.lora, rank=4)))
    with pytest.raises(ConfigError, match=r"model\.lora\.rank.*shapes of its tensors"):
        train(config)
