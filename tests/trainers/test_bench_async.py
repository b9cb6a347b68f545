"""The benchmark of streams runs, and says what it compares."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import bench_async


@pytest.mark.slow
def test_both_workloads_are_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--steps=2", "--warm-up=1", "--prompts=2", "--samples=2", "--median-s=0.01"]
    assert bench_async.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "sleeps of median 0.01 s" in shown
    assert "no sleep" in shown
    assert shown.count("stream / serial:") == 2
