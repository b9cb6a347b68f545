"""What the comparison of recorded runs takes for equal, and how it names what differs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
from safetensors.numpy import save_file

from tests.recorded.__main__ import contents, first_difference
from tests.recorded.runs import RUNS


def left_by_a_run(folder: Path, *, reward: float = 0.5, weight: float = 1.0, seconds: float = 1.0) -> Path:
    (folder / "rollouts").mkdir(parents=True)
    (folder / "export").mkdir()
    record = {"step": 1, "reward/mean": reward, "timing/step": seconds, "loss": float("nan")}
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    parquet.write_table(pa.table({"tokens": [[1, 2], [3]]}), folder / "rollouts" / "train_step_000001.parquet")
    save_file({"head": np.float32([weight, 2.0])}, folder / "export" / "model.safetensors")
    return folder


def difference(tmp_path: Path, **changes: float) -> str:
    sides = [left_by_a_run(tmp_path / "here"), left_by_a_run(tmp_path / "there", **changes)]
    return first_difference(*(contents(side) for side in sides))


def test_what_is_measured_may_differ(tmp_path: Path) -> None:
    assert difference(tmp_path, seconds=2.0) == ""


def test_the_step_and_the_metric_are_named(tmp_path: Path) -> None:
    assert difference(tmp_path, reward=0.25, weight=3.0) == "metrics.jsonl: step 1: reward/mean: 0.5 here, 0.25 there"


def test_one_bit_of_a_weight_is_a_difference(tmp_path: Path) -> None:
    found = difference(tmp_path, weight=float(np.nextafter(np.float32(1), np.float32(2))))
    assert re.fullmatch(r"export/model\.safetensors: head: float32\[2\] \[1\.0, 2\.0\] here, .*\[1\.0000001.*", found)


def test_what_only_one_side_has_is_a_difference(tmp_path: Path) -> None:
    one, other = left_by_a_run(tmp_path / "here"), left_by_a_run(tmp_path / "there")
    (other / "export" / "model.safetensors").unlink()
    assert first_difference(contents(one), contents(other)) == "export/model.safetensors: only here"
    assert first_difference(contents(other), contents(one)) == "export/model.safetensors: only there"


def test_every_place_that_a_command_names_is_there_before_it() -> None:
    names = list(RUNS)
    for number, run in enumerate(RUNS.values()):
        places = {place for word in run.command for place in re.findall(r"{(\w+)}", word)}
        assert places <= {"shared", *names[:number]}
        assert run.command[0].startswith("skyrl_train.main")
