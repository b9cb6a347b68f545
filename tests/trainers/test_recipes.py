"""Two real steps of each recipe of `conf/experiment/`, as small as they come, and the page with their plans."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from skyrl_train.api import load_config, train
from skyrl_train.runs.cli.conf_folder import conf_dir
from tests.support.recipe_cases import SCRIPTED, TWINS
from tests.support.source_calls import REPOSITORY

PAGE = (REPOSITORY / "docs" / "recipes.md").read_text(encoding="utf-8")

NOT_PLANNED = {"sft_gsm8k", "smollm2", "smollm2_steps"}
"""Supervised training, and what is for two CPU cores."""
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


def test_each_recipe_has_a_twin() -> None:
    recipes = {path.stem for path in (conf_dir() / "experiment").glob("*.yaml") if not path.stem.startswith("sft_")}
    assert recipes == {*TWINS, "gsm8k_multiturn"}


def test_the_page_has_each_recipe_and_its_plans() -> None:
    named = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
    assert named == {*TWINS, "gsm8k_multiturn", "sft_gsm8k"}
    planned = set(re.findall(r"^\| (\w+) \| ([18]) \|", PAGE, re.MULTILINE))
    assert planned == {(recipe, gpus) for recipe in named - NOT_PLANNED for gpus in "18"}


@pytest.mark.nightly
def test_the_script_prints_what_the_page_has() -> None:
    command = [sys.executable, "scripts/make_recipe_plans.py", "--print", "gsm8k_multiturn"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000, check=True, cwd=REPOSITORY)
    assert len(done.stdout.splitlines()) == 2
    assert done.stdout in PAGE


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", [pytest.param(each, marks=pytest.mark.nightly if each == "smollm2_steps" else ()) for each in TWINS]
)
def test_two_steps_of_a_recipe(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:
        more = TWINS[recipe](tmp_path, stack)
        config = load_config(f"+experiment={recipe}", "platform=cpu", settings={**SMALL, **more})
        records = train(config).metrics
    assert [record["step"] for record in records] == [1, 2]
    assert all(math.isfinite(record["policy/grad_norm"]) for record in records)
    if recipe in SCRIPTED:
        assert [record["reward/mean"] for record in records] == [0.5, 0.5]
        assert all(record["policy/grad_norm"] > 0 for record in records)
