"""A folder of the user's own, `--config-dir`, whose files choose parts with `_target_`: alike for every entry point."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_train.runs import planning
from skyrl_train.runs.cli.command_line import preflight

RL = """# @package _global_
trainer:
  policy:
    optimizer:
      schedule: {{_target_: own_schedules.halving, {argument}: 3}}
"""
SFT = """# @package _global_
trainer:
  optimizer:
    schedule: {{_target_: own_schedules.halving, {argument}: 3}}
"""
SETTING = {"config": "trainer.policy.optimizer.schedule", "sft": "trainer.optimizer.schedule"}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    (tmp_path / "own_schedules.py").write_text("def halving(progress, floor, *, times):\n    return 0.5 ** times\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def write(argument: str) -> str:
        folder = tmp_path / "own_conf" / "experiment"
        folder.mkdir(parents=True)
        (folder / "mine.yaml").write_text(RL.format(argument=argument))
        (folder / "mine_sft.yaml").write_text(SFT.format(argument=argument))
        return str(folder.parent)

    return write


ROOTS = pytest.mark.parametrize(
    ("root", "trains", "experiment"), [("config", True, "mine"), ("config", False, "mine"), ("sft", True, "mine_sft")]
)


@ROOTS
def test_its_parts_are_taken(root: str, trains: bool, experiment: str, own: Callable[[str], str]) -> None:
    preflight(["--config-dir", own("times"), f"+experiment={experiment}"], config_name=root, trains=trains)


@ROOTS
def test_their_arguments_are_checked_beside_all_else(
    root: str, trains: bool, experiment: str, own: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        preflight(["--config-dir", own("time"), f"+experiment={experiment}", "seed=x"], config_name=root, trains=trains)
    told = capsys.readouterr().err
    assert told.startswith("3 problems")
    assert f"{SETTING[root]}.time: is no argument of own_schedules:halving" in told
    assert "Did you mean 'times'?" in told
    assert f"{SETTING[root]}.times: must be given" in told
    assert "seed: must be an integer" in told


@pytest.mark.slow
def test_a_plan_takes_them_too(own: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config-dir", own("times"), "+experiment=mine", "platform=cpu", "plan.rates=none"]
    assert planning.main(arguments) == 0
    assert "policy     step        0  6.25e-06" in capsys.readouterr().out


def test_a_folder_that_is_not_there_is_told_beside_all_else(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        planning.main(["--config-dir", "/nowhere/conf", "seed=x"])
    told = capsys.readouterr().err
    assert "--config-dir: must be an existing folder; got '/nowhere/conf'" in told
    assert "seed: must be an integer" in told
