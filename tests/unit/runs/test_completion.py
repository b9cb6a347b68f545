"""A shell completes groups, choices and settings of the console commands: Hydra's own completion, over our files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = {"skyrl-train": "skyrl_train.main", "skyrl-sft": "skyrl_train.main_sft"}


def program(folder: Path, name: str) -> dict[str, str]:
    """Put a console command into a folder of the search path; the environment in which it is found."""
    path = folder / name
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {COMMANDS[name]} "$@"\n')
    path.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def asked(folder: Path, line: str) -> list[str]:
    name = line.split()[0]
    environment = {**program(folder, name), "COMP_LINE": line, "COMP_POINT": str(len(line))}
    done = subprocess.run(
        [name, "-sc", "query=bash"],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("skyrl-train trainer.policy.optimizer.l", ["trainer.policy.optimizer.lr="]),
        pytest.param("skyrl-train algor", ["algorithm="], marks=pytest.mark.slow),
        pytest.param(
            "skyrl-train algorithm=grp", ["algorithm=grpo", "algorithm=grpo_pass_at_k"], marks=pytest.mark.slow
        ),
        pytest.param("skyrl-train +experiment=smollm2_", ["+experiment=smollm2_steps"], marks=pytest.mark.slow),
        pytest.param("skyrl-sft trainer.num_e", ["trainer.num_epochs="], marks=pytest.mark.slow),
        pytest.param("skyrl-train trainer.no_such", [], marks=pytest.mark.slow),
    ],
)
def test_a_word_is_completed(line: str, completed: list[str], tmp_path: Path) -> None:
    assert asked(tmp_path, line) == completed
    assert {path.name for path in tmp_path.iterdir()} == {line.split()[0]}, "no run folder"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_after_one_line_of_set_up(tmp_path: Path) -> None:
    """What docs/installing.md tells a person to write."""
    script = """
eval "$(skyrl-train -sc install=bash)"
COMP_LINE="skyrl-train trainer.total_st" COMP_POINT=28 COMP_CWORD=1
hydra_bash_completion
printf '%s\\n' "${COMPREPLY[@]}"
"""
    done = subprocess.run(
        ["bash", "-c", script],
        env=program(tmp_path, "skyrl-train"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.split() == ["trainer.total_steps="]
