"""`--help` is answered from its template as Hydra would answer it, and without Hydra."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import DictConfig

from skyrl_train.runs.cli.command_line import start
from skyrl_train.runs.cli.conf_folder import answers_help, conf_dir

ROOT = Path(__file__).resolve().parents[3]


def nothing(node: DictConfig) -> None:
    raise AssertionError(node)


@pytest.mark.parametrize("config_name", ["config", "sft"])
def test_it_is_what_hydra_answers(
    config_name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["skyrl-train", "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        start(nothing, config_name=config_name)
    by_hydra = capsys.readouterr().out
    assert "== Groups" in by_hydra
    assert answers_help(config_name=config_name)
    assert capsys.readouterr().out == by_hydra


@pytest.mark.parametrize("further", ["seed=1", "--config-dir", "--hydra-help", "-m"])
def test_with_other_arguments_hydra_answers(further: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["skyrl-train", "--help", further])
    assert not answers_help(config_name="config")


@pytest.mark.parametrize("entry", ["main", "main_sft", "main_generate"])
def test_the_commands_answer_it_without_hydra(entry: str) -> None:
    code = (
        f"import sys; sys.argv[1:] = ['-h']; from skyrl_train.{entry} import main; main(); "
        "sys.exit('hydra' in sys.modules or 'numpy' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120, check=True
    )
    assert done.stdout.rstrip().endswith("--hydra-help")


def test_every_group_of_the_folder_is_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["skyrl-train", "--help"])
    answers_help(config_name="config")
    listed = {line.partition(":")[0] for line in capsys.readouterr().out.splitlines()}
    assert {file.name for file in conf_dir().iterdir() if file.is_dir() and file.name != "hydra"} <= listed
