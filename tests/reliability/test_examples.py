"""The programs of `examples/`, each with two steps."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm_python

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("SKYRL_TRAIN_ADAPTERS_PYTHON", "")
SMALL = [
    "trainer.total_steps=2",
    "trainer.train_batch_size=4",
    "trainer.policy_mini_batch_size=4",
    "data.validation=[]",
]


def records_of(folder: Path, *arguments: str, run: str = "run") -> list[dict[str, Any]]:
    """The metrics of each step of a program that is told to write to `folder`."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    done = warm_python.run(*arguments, folder=folder, environment={"PYTHONPATH": path})
    assert done.returncode == 0, done.stdout
    return [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "component"),
    [
        ("reward_function.py", "reward/score/mean"),
        pytest.param("curriculum/train.py", "curriculum/tried", marks=pytest.mark.nightly),
        ("guess_number.py", "reward/mean"),
    ],
)
def test_an_example_trains_two_steps(tmp_path: Path, program: str, component: str) -> None:
    records = records_of(tmp_path, str(ROOT / "examples" / program), *SMALL, f"output_dir={tmp_path}/run")
    steps = [record for record in records if component in record]
    assert [record["step"] for record in steps] == [1, 2]
    assert all(record["failures/count"] == 0 for record in steps)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gymnasium") is None, reason="gymnasium is not installed")
def test_the_lake_is_walked_on_for_two_steps(tmp_path: Path) -> None:
    program = str(ROOT / "examples" / "gymnasium_frozenlake" / "train.py")
    records = records_of(tmp_path, program, "--output=.", "--warm-up-steps=15", *SMALL, run="rl")
    steps = [record for record in records if "env/invalid_actions" in record]
    assert [record["step"] for record in steps] == [1, 2]
    assert all(record["failures/count"] == 0 for record in steps)
    # The walks have taught it to name an action.
    assert all(record["env/invalid_actions"] < 1 for record in steps)


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="set SKYRL_TRAIN_ADAPTERS_PYTHON to an interpreter that has verifiers")
@pytest.mark.parametrize("taskset", ["sums_taskset", "retries_taskset"])
def test_a_taskset_of_verifiers_trains_on_the_tokens_of_its_script(tmp_path: Path, taskset: str) -> None:
    arguments = ["-m", "verifiers_env", "--python", PYTHON, "--taskset", taskset, "--steps", "2", "--output", "."]
    records = records_of(tmp_path, *arguments, run="rl")
    (first, second) = (record for record in records if "policy/grad_norm" in record)
    # Half of the samples are right, in one word; what is checked beside that is in the program.
    assert [first["reward/mean"], second["reward/mean"]] == pytest.approx([0.625, 0.625])
    assert first["group/zero_variance"] == 0
