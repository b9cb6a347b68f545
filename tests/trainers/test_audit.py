"""`skyrl-doctor audit`: what a run recorded is computed again, and what was changed since is found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skyrl_train.api import load_config, train
from skyrl_train.data.tasks import Split, generate_problems
from skyrl_train.main_doctor import main

pytestmark = pytest.mark.slow
PROBLEMS = generate_problems(Split.TRAIN, 16, seed=4)


def right(completion: str, answer: int) -> float:
    """The reward of the run."""
    return float(completion.rpartition("#### ")[2].strip() == str(answer)) + 0.125 * len(completion) / 64


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audit") / "run"
    settings = {
        "environment.reward": right,
        "data.train": [{"prompt": each.question, "answer": each.answer} for each in PROBLEMS],
        "data.validation": [],
        "generator.n_samples_per_prompt": 4,
        "generator.max_turns": 1,
        "trainer.total_steps": 2,
        "trainer.train_batch_size": 8,
        "trainer.policy_mini_batch_size": 4,
        "trainer.micro_train_batch_size_per_gpu": 16,
        "trainer.micro_forward_batch_size_per_gpu": 32,
        "trainer.ckpt_interval": 1,
        "output_dir": str(folder),
    }
    train(load_config("+experiment=gsm8k_multiturn", settings=settings))
    return folder


def changed(run: Path, tmp_path: Path, column: str, change: Callable[[Any], Any]) -> Path:
    """A copy of the run, one column of whose last rollouts is another."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    path = copy / "rollouts" / "train_step_000002.parquet"
    table = pq.read_table(path)
    index = table.schema.get_field_index(column)
    values = pa.array([change(each) for each in table.column(column).to_pylist()], table.schema.field(column).type)
    pq.write_table(table.set_column(index, table.schema.field(column), values), path)
    return copy


def differing(capsys: pytest.CaptureFixture[str]) -> list[str]:
    lines = capsys.readouterr().out.splitlines()
    return [line.split(": ")[1] for line in lines if line.startswith("DIFF")]


def test_a_run_is_what_its_checkpoints_make_of_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    compared = {line.split(": ")[1]: line for line in lines if "not compared" not in line}
    assert set(compared) == {
        *("engine's log-probabilities", "trainer's log-probabilities", "weight versions", "advantages"),
        *("trained tokens", "optimizer's state", "reward right"),
    }
    assert "32 compared" in compared["reward right"]


@pytest.mark.parametrize(
    ("column", "change", "named"),
    [
        ("logprobs", lambda each: [value - 0.01 for value in each], "engine's log-probabilities"),
        ("advantages", lambda each: [value * 1.1 for value in each], "advantages"),
        ("rewards", lambda each: each and json.dumps({"right": json.loads(each)["right"] + 0.5}), "reward right"),
        ("versions", lambda each: [{**run, "version": run["version"] - 1} for run in each], "weight versions"),
    ],
)
def test_what_is_not_so_is_named(
    column: str, change: Any, named: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(changed(run, tmp_path, column, change))]) == 1
    assert named in differing(capsys)


def test_a_run_that_cannot_be_audited_says_why(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints")
    assert main(["audit", str(copy)]) == 2
    assert "trainer.ckpt_interval=1" in capsys.readouterr().err
    assert main(["audit", str(tmp_path)]) == 2
    assert "has no config.yaml" in capsys.readouterr().err
