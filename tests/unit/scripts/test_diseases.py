"""The study that the doctor is measured on: what is planted where, and that a recorded folder does not say it."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from scripts.studies.diseases.archive import unpack
from scripts.studies.diseases.counting import count, giveaways, named, recorded, results
from scripts.studies.diseases.plants import PLANTS
from scripts.studies.diseases.recording import numbers
from scripts.studies.diseases.settings import RECIPES, Name, Setting
from skyrl_train.doctor import LIMITS, RULES, Finding

ARCHIVE = Path(__file__).parents[2] / "fixtures" / "diseases_fourth.tar.xz"
"""The runs of the fourth setting, which was recorded after rules and limits were frozen."""
AUDITED = {"trained tokens", "KL to the reference", "advantages", "optimizer's state"}
WITH_OBJECTS = {"data.train", "environment.reward", "model.tokenizer_path"}
"""Settings that have an object, of which the configuration shows a digest."""


def test_forty_diseases_are_planted_and_twenty_runs_are_healthy_of_which_ten_look_ill() -> None:
    assert len({plant.disease for plant in PLANTS.values()} - {""}) == 40
    healthy = [name for name, plant in PLANTS.items() if not plant.disease]
    assert len(healthy) == 20
    assert sum(name.startswith("looks_") for name in healthy) == 10


def test_every_plant_is_to_be_named_by_what_there_is() -> None:
    for name, plant in PLANTS.items():
        known = AUDITED if plant.by_audit else set(RULES)
        assert set(plant.named_by) <= known, name
        assert bool(plant.named_by) == bool(plant.disease), name
        assert {plant.recipe_in(Setting(name=each, models=Path())) for each in get_args(Name)} <= RECIPES.keys()
    assert sum(plant.by_audit for plant in PLANTS.values()) == 4


def test_every_limit_is_of_a_rule_and_only_numbers_that_are_not_finite_need_none() -> None:
    assert set(RULES) - set(LIMITS) == {"not_finite"}
    assert set(LIMITS) <= set(RULES)


def _changed_settings(name: str, answer: Any) -> None:
    """In a process of its own, as a plant exchanges lines."""
    rows = [{"prompt": f"{n} boats and {n}?", "answer": str(n), "solution": f"{n}+0={n}"} for n in range(10, 90)]
    before = {"data.train": rows, "data.validation": rows[:8], "model.path": "builtin:tiny_qwen2", "seed": 3}
    settings = dict(before)
    PLANTS[name].change(settings, Setting(name="first", models=Path(answer[1])))
    answer[0].put(sorted(key for key, value in settings.items() if before.get(key) is not value))


@pytest.fixture(scope="module")
def imported() -> None:
    """What plants exchange lines of, once for all processes."""
    from skyrl_train.inference import HFEngine
    from skyrl_train.learner import CriticLearner, PolicyLearner
    from skyrl_train.trainers import steps

    assert None not in (HFEngine, CriticLearner, PolicyLearner, steps)


@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize("name", [name for name, plant in PLANTS.items() if plant.disease])
def test_no_plant_changes_a_setting_that_shows_it(name: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue: Any = context.Queue()
    process = context.Process(target=_changed_settings, args=(name, (queue, tmp_path)))
    process.start()
    changed = queue.get(timeout=60)
    process.join(60)
    assert set(changed) <= WITH_OBJECTS


def test_a_folder_has_a_number_for_a_name_in_an_order_that_says_nothing() -> None:
    first, second = numbers("first"), numbers("second")
    assert sorted(first.values()) == sorted(second.values()) == [f"{n:02d}" for n in range(1, len(PLANTS) + 1)]
    assert [first[name] for name in sorted(PLANTS)] != sorted(first.values())
    assert first != second


def _record(folder: Path, name: str, settings: dict[str, Any]) -> Path:
    root = folder / "first" / numbers("first")[name]
    root.mkdir(parents=True)
    (root / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 0.5}) + "\n")
    (root / "config.yaml").write_text(yaml.safe_dump(settings))
    return root


def test_a_value_or_a_log_that_no_healthy_folder_has_is_found(tmp_path: Path) -> None:
    plain = {"seed": 11, "data": {"train": ["memory:a"]}, "trainer": {"lr": 1e-4}}
    _record(tmp_path, "healthy", plain)
    _record(tmp_path, "leak", {**plain, "data": {"train": ["memory:b"]}})
    assert giveaways(recorded(tmp_path, "first")) == {}
    _record(tmp_path, "rate_too_high", {**plain, "trainer": {"lr": 2e-2}})
    log = _record(tmp_path, "judge", plain) / "run.log"
    log.write_text("the judge does not answer")
    assert giveaways(recorded(tmp_path, "first")) == {"rate_too_high": ["trainer.lr=0.02"], "judge": ["run.log"]}


def _finding(rule: str, level: Any = "problem") -> Finding:
    return Finding(what="it", evidence=(), remedy="mend it", rule=rule, level=level)


def test_the_first_finding_above_a_note_decides() -> None:
    note, right, other = _finding("leak", "note"), _finding("truth_in_prompt"), _finding("reward_fails")
    assert named(PLANTS["leak"], [right, other, note], None) == ("truth_in_prompt", True)
    assert named(PLANTS["leak"], [other, right], None) == ("reward_fails", False)
    assert named(PLANTS["leak"], [note], None) == ("", False)
    assert named(PLANTS["healthy"], [note], [{"what": "advantages", "holds": True}]) == ("", True)
    assert named(PLANTS["healthy"], [], [{"what": "advantages", "holds": False}]) == ("audit: advantages", False)


def test_what_an_audit_finds_first_names_what_only_it_can() -> None:
    lines = [{"what": "trained tokens", "holds": True}, {"what": "KL to the reference", "holds": False}]
    assert named(PLANTS["wrong_kl"], [_finding("reward_fails")], lines) == ("audit: KL to the reference", True)
    assert named(PLANTS["padding"], [], lines) == ("audit: KL to the reference", False)
    assert named(PLANTS["padding"], [], "DataError: no checkpoint") == ("", False)


@pytest.mark.slow
def test_the_runs_of_the_fourth_setting_are_counted_as_the_page_says(tmp_path: Path) -> None:
    """Rules were frozen before they were recorded: a rule that is changed since may change these numbers, and the page."""
    unpack(ARCHIVE, tmp_path)
    found = results(tmp_path, "fourth")
    assert len(found) == len(PLANTS)
    counted = count(found)
    assert (counted.named, counted.diseases) == (38, 40)
    assert counted.called_ill == []
    assert sorted(counted.missed) == ["constant", "wrong_template"]
    assert giveaways(recorded(tmp_path, "fourth")) == {}
