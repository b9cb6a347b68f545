"""Small runs with one thing planted that only an audit names, and one with nothing planted."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.studies.diseases.counting import named, recorded
from scripts.studies.diseases.plants import PLANTS
from scripts.studies.diseases.recording import audited, make, numbers
from scripts.studies.diseases.settings import RECIPES, Setting
from skyrl_train.doctor import examine

pytestmark = pytest.mark.slow
SMALLER = {
    "generator.sampling.max_generate_length": 24,
    "generator.n_samples_per_prompt": 2,
    "trainer.total_steps": 4,
    "trainer.train_batch_size": 6,
    "trainer.policy_mini_batch_size": 3,
    "trainer.critic_mini_batch_size": 3,
    "trainer.eval_interval": 4,
    "trainer.ckpt_interval": 1,
    "trainer.policy.optimizer.lr": 1e-3,
}


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """The first, in runs of four steps."""
    preset, whole = RECIPES["held_near"]
    monkeypatch.setitem(RECIPES, "held_near", (preset, lambda setting: {**whole(setting), **SMALLER}))
    monkeypatch.setitem(PLANTS, "forgotten", replace(PLANTS["forgotten"], resumes_at=2))
    monkeypatch.setitem(PLANTS, "healthy_resumed", replace(PLANTS["healthy_resumed"], resumes_at=2))
    return Setting(name="first", models=tmp_path / "models")


def _audit(name: str, setting: Setting, folder: Path) -> Any:
    """Make the run and audit it, each in a process of its own, as the study does."""
    for work in (make, audited):
        process = multiprocessing.get_context("fork").Process(target=work, args=(name, setting, folder))
        process.start()
        process.join(300)
        assert process.exitcode == 0
    return json.loads((folder / "first_audits" / f"{numbers('first')[name]}.json").read_text())


@pytest.mark.parametrize("name", [name for name, plant in PLANTS.items() if plant.by_audit])
def test_the_first_difference_that_an_audit_prints_is_what_was_planted(
    name: str, setting: Setting, tmp_path: Path
) -> None:
    lines = _audit(name, setting, tmp_path)
    assert named(PLANTS[name], [], lines) == (f"audit: {PLANTS[name].named_by[0]}", True), lines


SHORTEST = {**SMALLER, "trainer.total_steps": 2, "trainer.eval_interval": 2}
SUPERVISED = {"trainer.num_steps": 2, "trainer.batch_size": 4, "trainer.eval_interval": 2, "trainer.eval_samples": 4}
RECORDED = [
    name
    for name, plant in PLANTS.items()
    if plant.disease and not plant.by_audit and plant.recipe not in ("calls", "real_model")
]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.nightly if place % 12 else ()) for place, name in enumerate(RECORDED)],
)
def test_a_plant_leaves_a_folder_that_the_doctor_reads(
    name: str, setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = PLANTS[name].recipe
    preset, whole = RECIPES[recipe]
    shorter = SUPERVISED if recipe == "supervised" else SHORTEST
    monkeypatch.setitem(RECIPES, recipe, (preset, lambda setting: {**whole(setting), **shorter}))
    monkeypatch.setitem(PLANTS, name, replace(PLANTS[name], resumes_at=int(PLANTS[name].resumes_at > 0)))
    process = multiprocessing.get_context("fork").Process(target=make, args=(name, setting, tmp_path))
    process.start()
    process.join(300)
    assert process.exitcode == 0
    _, tables = examine(recorded(tmp_path, "first")[name])
    assert tables.problems == []
    assert tables.last_step >= 1


def test_a_healthy_run_that_was_resumed_differs_in_nothing(setting: Setting, tmp_path: Path) -> None:
    lines = _audit("healthy_resumed", setting, tmp_path)
    told = {line["what"] for line in lines}
    assert {"trained tokens", "KL to the reference", "advantages", "optimizer's state"} <= told
    assert [line for line in lines if not line["holds"]] == []
