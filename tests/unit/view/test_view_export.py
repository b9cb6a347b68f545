"""The report of a run in one file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("duckdb")

from skyrl_train.telemetry.reading import find_runs
from skyrl_train.view.answers import Answers
from skyrl_train.view.export import write_report
from skyrl_train.view.rollouts import RolloutIndex
from tests.support.view_runs import write_run

PAGE = """<!doctype html>
<html><head>
<link rel="stylesheet" href="static/a.css">
<script src="static/lib/b.js" defer></script>
<script src="static/c.js" defer></script>
</head><body><main></main></body></html>
"""


@pytest.fixture
def static(tmp_path: Path) -> Path:
    folder = tmp_path / "static"
    (folder / "lib").mkdir(parents=True)
    (folder / "index.html").write_text(PAGE)
    (folder / "a.css").write_text("main { color: red }")
    (folder / "lib/b.js").write_text("const end = '</script>'; const $ = '\\\\1';")
    (folder / "c.js").write_text("start();")
    return folder


def answers_of(tmp_path: Path, *names: str) -> Answers:
    (tmp_path / "scratch").mkdir()
    runs = find_runs([write_run(tmp_path / name, steps=1, prompts=2, samples=1, turns=1) for name in names])
    return Answers(runs, RolloutIndex(tmp_path / "scratch", runs), version="1")


def data_of(report: str) -> Any:
    found = re.search(r'<script type="application/json" id="skyrl-view-data">(.*?)</script>', report, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_a_report_holds_page_and_answers_and_no_address(tmp_path: Path, static: Path) -> None:
    answers = answers_of(tmp_path, "a b")
    report = write_report(answers, [("limit", "3")], static)
    assert re.search(r'(src|href)="', report) is None
    assert "<style>\nmain { color: red }\n</style>" in report
    assert (
        report.index("const end = '<\\/script>'; const $ = '\\\\1';")
        < report.index("start();")
        < report.index("</body>")
    )
    data = data_of(report)
    rows = data["answers"]["api/trajectories?run=a-b"]["rows"]
    assert len(rows) == 3
    for row in rows:
        key = f"run=a-b&purpose={row['purpose']}&step={row['step']}&uid={row['uid']}"
        assert data["answers"][f"api/trajectory?{key}&sample={row['sample']}"]["turns"] is not None
        assert f"api/group?{key}" in data["answers"]
        assert f"api/prompt?run=a-b&uid={row['uid']}" in data["answers"]


def test_what_a_model_wrote_ends_no_script(tmp_path: Path, static: Path) -> None:
    report = write_report(answers_of(tmp_path, "run"), [], static)
    assert "window.pwned=1" in report
    assert re.search(r"<script[^>]*>\s*window\.pwned", report) is None
    assert len(re.findall(r"<script", report)) == len(re.findall(r"</script>", report)) == 3
    texts = json.dumps(data_of(report)["answers"])
    assert "<script>window.pwned=1</script>" in texts


def test_filters_choose_what_is_in_a_report(tmp_path: Path, static: Path) -> None:
    data = data_of(write_report(answers_of(tmp_path, "run"), [("run", "run"), ("purpose", "eval")], static))
    assert {row["purpose"] for row in data["answers"]["api/trajectories?run=run"]["rows"]} == {"eval"}
    assert data["chosen"] == "the last steps first, filtered by purpose=eval"


def test_several_runs_are_in_one_report_with_their_difference(tmp_path: Path, static: Path) -> None:
    data = data_of(write_report(answers_of(tmp_path, "a", "b"), [("limit", "1")], static))
    assert data["answers"]["api/diff?runs=a%2Cb"]["runs"] == ["a", "b"]
    assert "api/overview?run=b" in data["answers"]


@pytest.mark.parametrize("limit", ["0", "x", "2001"])
def test_a_limit_is_checked(tmp_path: Path, static: Path, limit: str) -> None:
    with pytest.raises(ValueError, match=f"limit={limit} must be a whole number from 1 to 2000"):
        write_report(answers_of(tmp_path, "run"), [("limit", limit)], static)
