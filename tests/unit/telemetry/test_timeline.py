"""What ran when: written a line a step, read back, drawn."""

from __future__ import annotations

import json
from pathlib import Path

from skyrl_train.telemetry.activity import ActivityReport
from skyrl_train.telemetry.records.timeline import (
    Timeline,
    _seconds_by_kind as seconds_by_kind,
    draw_timeline,
    kind_of,
    read_timeline,
)


class Clock:
    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def report(*engine: tuple[float, float], groups: tuple[tuple[float, int], ...] = ()) -> ActivityReport:
    return ActivityReport(metrics={}, engine=engine, groups=groups)


def written(path: Path) -> Timeline:
    """Two steps, of 4 and of 2 seconds, in the year 1970."""
    clock, now = Clock(), Clock(1000.0)
    timeline = Timeline(path, clock, now)
    clock.now_s, now.now_s = 104.0, 1004.0
    phases = [("generate", 100.0, 102.0), ("update", 102.5, 104.0)]
    timeline.write(1, phases, report((100.5, 101.5), groups=((100.0, 0), (100.5, 8), (101.5, 0))))
    clock.now_s, now.now_s = 106.0, 1006.0
    timeline.write(2, [("evaluate", 104.0, 106.0)], None)
    return timeline


def test_lines_are_read_back_in_seconds_since_1970(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    written(path)
    first, second = read_timeline(path)
    assert (first.step, first.began, first.ended) == (1, 1000.0, 1004.0)
    assert first.learner == (("generate", 1000.0, 1002.0), ("update", 1002.5, 1004.0))
    assert first.engine == ((1000.5, 1001.5),)
    assert first.groups == ((1000.0, 0), (1000.5, 8), (1001.5, 0))
    assert (second.began, second.ended, second.engine) == (1004.0, 1006.0, ())
    assert dict(seconds_by_kind([first, second])) == {
        "wait": [2.0, 0.0],
        "update": [1.5, 0.0],
        "sync": [0.0, 0.0],
        "save": [0.0, 0.0],
        "eval": [0.0, 2.0],
        "other": [0.5, 0.0],
    }


def test_a_line_that_a_kill_tore_is_left_out_and_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    written(path)
    path.write_bytes(path.read_bytes()[:-20])
    written(path)
    assert [line.step for line in read_timeline(path)] == [1, 1, 2]
    assert read_timeline(tmp_path / "none.jsonl") == []


def test_a_line_stays_small_however_much_happened(tmp_path: Path) -> None:
    clock = Clock(0.0)
    timeline = Timeline(tmp_path / "timeline.jsonl", clock, Clock())
    clock.now_s = 1000.0
    spans = [(moment / 10, moment / 10 + 0.05) for moment in range(10_000)]
    groups = tuple((moment / 10, moment % 7) for moment in range(10_000))
    timeline.write(1, [], report(*spans, groups=groups))
    (line,) = read_timeline(tmp_path / "timeline.jsonl")
    assert len(line.engine) == 1, "gaps of 0.05 s do not show in 1000 s"
    assert len(line.groups) <= 401
    assert line.groups[-1][1] == 9999 % 7
    content = json.loads((tmp_path / "timeline.jsonl").read_text())
    assert content["engine"] == [[0.0, 999.95]]


def test_the_picture_shows_serial_runs_and_those_that_went_on(tmp_path: Path) -> None:
    path, image = tmp_path / "timeline.jsonl", tmp_path / "timeline.png"
    assert not draw_timeline(path, image, title="run")
    assert not image.exists()
    for _ in range(8):
        written(path)
    assert draw_timeline(path, image, title="run")
    assert image.read_bytes().startswith(b"\x89PNG")
    assert image.stat().st_size > 10_000


def test_each_phase_has_a_kind() -> None:
    found = [kind_of(phase) for phase in ("generate", "score", "sync", "checkpoint", "evaluate", "anything")]
    assert found == ["wait", "update", "sync", "save", "eval", "other"]
