"""The machine's clock is set back and forward while a run goes on: nothing that the run decides depends on it."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_train.telemetry.records import draw_timeline, read_timeline
from tests.support.fakes_trainer import fake_run, make_config, records_without_timings
from tests.support.kills import Killed, killed_in

DAY_S = 86400.0


@pytest.fixture
def restless_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock finds it set back by 20 days, forward by 20, or right."""
    now, offsets = time.time, itertools.cycle((-20 * DAY_S, 20 * DAY_S, 0.0))
    monkeypatch.setattr(time, "time", lambda: now() + next(offsets))
    monkeypatch.setattr(time, "time_ns", lambda: int(time.time() * 1e9))


@pytest.mark.slow
def test_a_killed_run_goes_on_identically_and_its_timeline_is_drawn(tmp_path: Path, restless_clock: None) -> None:
    def run_in(folder: Path, step: int = 0) -> None:
        config = make_config(folder, ckpt_interval=1, max_ckpts_to_keep=2)
        run = fake_run(folder, config=config)
        replace(run, on_call=killed_in(step, "train")).run()
        assert "could not be" not in run.output.getvalue()

    run_in(tmp_path / "alone")
    with pytest.raises(Killed):
        run_in(tmp_path / "killed", 3)
    run_in(tmp_path / "killed")
    names = ("killed", "alone")
    found, expected = (records_without_timings(tmp_path / name / "metrics.jsonl") for name in names)
    assert found == expected
    found, expected = ((tmp_path / name / "export" / "model.json").read_bytes() for name in names)
    assert found == expected
    kept = sorted(path.name for path in (tmp_path / "killed" / "checkpoints").glob("step_*"))
    assert kept == ["step_000003", "step_000004"]
    lines = read_timeline(tmp_path / "killed" / "timeline.jsonl")
    assert all(line.ended >= line.began for line in lines)
    draw_timeline(tmp_path / "killed" / "timeline.jsonl", tmp_path / "timeline.png", title="a run")
