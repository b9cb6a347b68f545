"""The benchmark of streams runs, and says what it compares."""

import sys
from pathlib import Path

import pytest

from skyrl_train.telemetry.records import Line

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts" / "bench"))
import asynchronous


@pytest.mark.nightly
def test_both_workloads_are_in_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [
        "--steps=2",
        "--warm-up=1",
        "--prompts=2",
        "--samples=2",
        "--median-s=0.01",
        "--seeds=2",
        "--learning-steps=1",
    ]
    monkeypatch.setattr(sys, "argv", ["asynchronous.py", *arguments])
    assert asynchronous.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "sleeps of median 0.01 s" in shown
    assert "no sleep" in shown
    assert shown.count("stream / serial:") == 2
    assert "stream - serial:" in shown


def test_waiting_is_what_neither_the_learner_nor_the_engine_computes_in() -> None:
    line = Line(
        step=1,
        began=0.0,
        ended=10.0,
        learner=(("generate", 0.0, 6.0), ("update", 6.0, 9.0)),
        engine=((1.0, 2.0), (5.0, 8.0)),
        groups=(),
    )
    assert asynchronous.idle_seconds(line) == 4.0
