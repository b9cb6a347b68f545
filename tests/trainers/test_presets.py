"""Every `algorithm=NAME` trains: three real steps of the whole loop, as small as they come."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from skyrl_train.config import Config
from skyrl_train.config.models import ModelConfig
from skyrl_train.model import load_causal_lm, load_tokenizer, quiet_transformers
from skyrl_train.runs import train
from skyrl_train.runs.cli import HYDRA_VERSION_BASE, register_resolvers
from skyrl_train.runs.cli.composition import load_node
from skyrl_train.runs.cli.conf_folder import conf_dir
from skyrl_train.telemetry import read_metrics

pytestmark = pytest.mark.slow

PRESETS = sorted(path.stem for path in (conf_dir() / "algorithm").glob("*.yaml"))
SMALL = (
    "platform=cpu",
    "+experiment=gsm8k_multiturn",
    "tracker=[]",
    "data.validation=[]",
    "data.max_train_prompts=64",
    "generator.n_samples_per_prompt=4",
    "generator.sampling.max_generate_length=24",
    "trainer.total_steps=3",
    "trainer.train_batch_size=4",
    "trainer.policy_mini_batch_size=2",
    "trainer.critic_mini_batch_size=2",
    "trainer.ckpt_interval=0",
    "trainer.export_hf=false",
    "trainer.dump_rollouts=false",
)


def save_teacher(folder: Path) -> Path:
    """The bundled policy with its weights moved a little, for presets whose reference must be another model."""
    config = ModelConfig()
    model = load_causal_lm(config, "cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), quiet_transformers():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
        model.save_pretrained(folder)
    load_tokenizer(config).save_pretrained(folder)
    return folder


def run_steps(folder: Path, overrides: Sequence[str]) -> list[dict[str, float]]:
    """The records of the steps of training."""
    register_resolvers()
    with initialize_config_dir(str(conf_dir()), version_base=HYDRA_VERSION_BASE):
        node = compose("config", [*SMALL, *overrides, f"output_dir={folder}"])
    train(load_node(node, Config))
    return [dict(record) for record in read_metrics(folder / "metrics.jsonl") if record["step"] > 0]


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))


@pytest.mark.parametrize(
    ("preset", "step_wise"),
    [
        pytest.param(name, step_wise, id=f"{name}-{'step_wise' if step_wise else 'rows'}")
        for index, name in enumerate(PRESETS)
        for step_wise in ((False, True) if name == "ppo" else (index % 2 == 1,))
    ],
)
def test_three_steps_of_a_preset(preset: str, step_wise: bool, tmp_path: Path) -> None:
    overrides = [f"algorithm={preset}", f"generator.step_wise_trajectories={str(step_wise).lower()}"]
    if preset == "distillation":
        overrides.append(f"reference.model.path={save_teacher(tmp_path / 'teacher')}")
    records = run_steps(tmp_path, overrides)
    assert [record["step"] for record in records] == [1, 2, 3]
    for record in records:
        assert all(math.isfinite(value) for value in record.values() if isinstance(value, float))
        assert record["policy/lr"] > 0
        if preset not in ("dppo", "rollout_is", "gpg"):  # which need not score the batch before they train on it
            assert record["off_policy/staleness_abs_max"] == record["off_policy/unattributed_abs_max"] == 0
            assert record["off_policy/numerics_abs_max"] < 1e-3
    if preset == "ppo":
        assert all(record["critic/value_loss"] > 0 for record in records)
        assert records[0]["critic/explained_variance"] == 0
    if preset in ("reinforce_pp", "reinforce_pp_baseline"):
        assert records[0]["kl/reference"] == pytest.approx(0, abs=1e-6)
    assert sum(record["policy/grad_norm"] for record in records) > 0


@pytest.mark.nightly
def test_with_ppo_value_loss_falls_and_explained_variance_and_reward_rise(tmp_path: Path) -> None:
    sizes = ["train_batch_size=16", "policy_mini_batch_size=8", "critic_mini_batch_size=8", "total_steps=12"]
    records = run_steps(
        tmp_path,
        [
            "algorithm=ppo",
            "data.max_train_prompts=0",
            "generator.n_samples_per_prompt=8",
            "generator.sampling.max_generate_length=64",
            *(f"trainer.{size}" for size in sizes),
        ],
    )

    def mean(name: str, part: slice) -> float:
        values = [record[name] for record in records[part]]
        return sum(values) / len(values)

    first, last = slice(0, 4), slice(-4, None)
    assert mean("reward/mean", last) > mean("reward/mean", first) + 0.1
    assert mean("critic/explained_variance", last) > max(0.3, mean("critic/explained_variance", first) + 0.1)
    assert mean("critic/value_loss", last) < 0.9 * mean("critic/value_loss", first)
