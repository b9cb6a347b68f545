"""The benchmark of staleness: which runs it makes, and what it reads of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "scripts" / "bench"))
import staleness as script


def write_run(root: Path, name: str, *, ages: list[float], accuracy: float) -> None:
    """A finished run of as many steps as there are ages, evaluated before and after."""
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "complete.json").write_text("{}")
    records = [{"step": 0, "eval/accuracy_first_turn": 0.25}]
    records += [
        {"step": step, "reward/mean": step / 10, "off_policy/age/mean": age} for step, age in enumerate(ages, start=1)
    ]
    records[-1]["eval/accuracy_first_turn"] = accuracy
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_tokens_of_age_0_have_nothing_to_be_corrected() -> None:
    assert [setting.name for setting in script.settings([0, 2])] == [
        "staleness_0_none",
        "staleness_2_none",
        "staleness_2_token",
    ]


def test_finished_runs_become_a_table_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, accuracy in ((1, 0.75), (2, 0.85)):
        for setting in script.settings([0, 1]):
            ages = [0.0, 1.0, 1.0] if setting.staleness else [0.0, 0.0, 0.0]
            write_run(tmp_path, f"{setting.name}_seed_{seed}", ages=ages, accuracy=accuracy)
    picture = tmp_path / "images" / "staleness.png"
    arguments = [str(tmp_path), "--staleness", "0", "1", "--seeds", "2", "--picture", str(picture)]
    assert script.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "| 0 | none | 0.00 | 0.800 ± 0.071 | 0.800 ± 0.071 | 0.200 ± 0.000 |" in shown
    assert "| 1 | token | 1.00 | 0.800 ± 0.071 |" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_is_the_bundled_experiment_with_its_staleness_and_correction(tmp_path: Path) -> None:
    args = script.parse([str(tmp_path), "--prompts", "4"])
    words = script.command(tmp_path, script.Setting(staleness=2, correction="token"), 7, args)
    assert "+experiment=gsm8k_multiturn" in words
    assert {"seed=7", "trainer.max_staleness=2", "trainer.algorithm.off_policy.weight=token"} <= set(words)
    assert {"trainer.train_batch_size=4", "trainer.policy_mini_batch_size=2"} <= set(words)
