"""Rollouts whose arrays lie on two nodes are written by the workers of both, and read as those of one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_train.telemetry.records import KINDS, read_columns, read_rollouts

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
NAME = "train_step_000001.parquet"


def test_each_node_writes_the_part_whose_arrays_lie_on_it(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.cluster.two_nodes", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert len(set(found["nodes"])) == 2
    assert found["put"] == found["nodes"] * 2
    assert found["answered"] == found["nodes"]
    index = json.loads((tmp_path / "there" / NAME / "_index.json").read_text())
    assert [part["ranges"] for part in index["parts"]] == [[[0, 2], [4, 6]], [[2, 4], [6, 8]]]
    expected = tmp_path / "here" / NAME
    # After the process that had put some arrays was gone, and with arrays of a node that has no worker.
    for folder in ("there", "after"):
        path = tmp_path / folder / NAME
        assert sorted(each.name for each in path.iterdir()) == [
            "_index.json",
            "part-00000.parquet",
            "part-00001.parquet",
        ]
        assert read_rollouts(path) == read_rollouts(expected)
        assert read_columns(path, tuple(KINDS)).equals(read_columns(expected, tuple(KINDS)))
    assert "No space left on device" in found["refused"]
    assert list((tmp_path / "refused").glob("[!.]*")) == []
    assert len(found["answered_for_one"]) == 1
    assert (tmp_path / "one" / NAME).read_bytes() == expected.read_bytes()
