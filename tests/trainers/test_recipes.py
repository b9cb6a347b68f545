"""Two real steps of each recipe of `conf/experiment/`, as small as they come."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train import load_config, train
from skyrl_train.cli.resolvers import conf_dir
from skyrl_train.config.models import ModelConfig
from skyrl_train.model.causal_lm import load_causal_lm, load_tokenizer, quiet_transformers

pytestmark = pytest.mark.slow

SMALL = {
    "tracker.console.enabled": False,
    "data.validation": [],
    "data.max_train_prompts": 16,
    "environment.num_workers": 2,
    "generator.n_samples_per_prompt": 4,
    "generator.sampling.max_generate_length": 24,
    "trainer.total_steps": 2,
    "trainer.train_batch_size": 4,
    "trainer.policy_mini_batch_size": 2,
    "trainer.critic_mini_batch_size": 2,
    "trainer.ckpt_interval": 0,
    "trainer.export_hf": False,
    "trainer.dump_rollouts": False,
}
PROGRAMS = [{"prompt": f"Write a function double{n}(x).", "tests": [f"assert double{n}(2) == 4"]} for n in range(8)]
MORE: dict[str, Mapping[str, Any]] = {
    "async": {},
    "code_sandbox": {"data.train": PROGRAMS},
    "distillation": {"reference.model.path": "teacher"},
    "lora": {},
    "math_dapo": {"trainer.algorithm.filters.dynamic_sampling": "none"},
    "ppo_critic": {},
}
"""By recipe, what its twin needs beside its size. gsm8k_multiturn is run by many others."""


def save_teacher(folder: Path) -> None:
    """Write the bundled policy with its weights moved a little."""
    model = load_causal_lm(ModelConfig(), "cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), quiet_transformers():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
        model.save_pretrained(folder)
    load_tokenizer(ModelConfig()).save_pretrained(folder)


def test_each_recipe_has_a_twin() -> None:
    recipes = {path.stem for path in (conf_dir() / "experiment").glob("*.yaml") if not path.stem.startswith("sft_")}
    assert recipes == {*MORE, "gsm8k_multiturn"}


@pytest.mark.parametrize("recipe", MORE)
def test_two_steps_of_a_recipe(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if recipe == "distillation":
        save_teacher(tmp_path / "teacher")
    config = load_config(f"+experiment={recipe}", "platform=cpu", settings={**SMALL, **MORE[recipe]})
    records = train(config).metrics
    assert [record["step"] for record in records] == [1, 2]
    assert all(math.isfinite(record["policy/grad_norm"]) for record in records)
