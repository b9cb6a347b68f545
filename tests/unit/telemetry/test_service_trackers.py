"""Trackio, MLflow and Prometheus: their real packages, where these are installed, with local folders and addresses."""

from __future__ import annotations

import io
import json
import math
import sqlite3
import sys
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from skyrl_train.config import Config, MlflowConfig, PrometheusConfig, TrackerConfig, TrackioConfig, WandbConfig
from skyrl_train.errors import SkyrlTrainError
from skyrl_train.runs import build_trackers
from skyrl_train.telemetry.logs.console import RunConsole
from skyrl_train.telemetry.metrics_log import MetricsLog
from skyrl_train.telemetry.run_folder import RunFolder
from skyrl_train.telemetry.trackers.base import SAMPLE_COLUMNS, Trackers, sample_rows
from skyrl_train.telemetry.trackers.services import PrometheusTracker
from tests.support.tracker_cases import rollouts

METRICS = {"reward/mean": 0.5, "eval/pass@1": 0.25, "odd": math.nan}


def test_a_table_has_the_first_sample_of_each_prompt_with_what_was_said_to_it() -> None:
    first, second = sample_rows(rollouts(), 5)
    assert tuple(first) == SAMPLE_COLUMNS
    assert first["response"] == "first\n\n[user] no\n\nsecond"
    assert (first["uid"], first["prompt"], first["reward"], first["turns"], first["tokens"]) == (
        "p",
        "[user] p?",
        1.0,
        2,
        4,
    )
    assert second["outcome"] == "environment_error: it broke"
    assert math.isnan(float(second["reward"]))
    assert len(sample_rows(rollouts(), 1)) == 1


class Tables:
    num_samples = 1

    def __init__(self) -> None:
        self.seen: list[object] = []

    def log(self, metrics: object, *, step: int) -> None: ...

    def close(self) -> None: ...

    def log_samples(self, rows: object, *, step: int) -> None:
        self.seen.append((step, rows))

    def alert(self, title: str, text: str) -> None:
        raise ConnectionError("nobody there")


def test_only_views_that_have_tables_and_alerts_are_given_them_and_one_that_fails_costs_itself_alone(
    tmp_path: Path,
) -> None:
    output, tables = io.StringIO(), Tables()
    trackers = Trackers(
        record=MetricsLog(tmp_path / "metrics.jsonl"), views={"t": tables}, console=RunConsole(file=output)
    )
    trackers.log_samples(4, rollouts())
    trackers.alert(4, "stalled", "for an hour")
    assert tables.seen == [(4, sample_rows(rollouts(), 1))]
    assert "tracker t failed at step 4 (ConnectionError: nobody there); training goes on" in output.getvalue()


def logged(tmp_path: Path, tracker: TrackerConfig, *, steps: tuple[int, ...] = (1, 2)) -> str:
    output = io.StringIO()
    config = replace(Config(), run_name="tried", output_dir=str(tmp_path), tracker=tracker)
    console = RunConsole(step_lines=False, file=output)
    trackers = build_trackers(config, RunFolder(tmp_path), console=console, start_step=0, total_steps=2)
    for step in steps:
        trackers.log_samples(step, rollouts())
        trackers.log(METRICS, step=step)
    trackers.alert(steps[-1], "entropy", "it collapsed")
    trackers.close()
    return output.getvalue()


def test_trackio_has_metrics_samples_and_alerts_of_a_run_that_is_continued(
    tmp_path: Path,
) -> None:
    pytest.importorskip("trackio", reason="the extra `trackio` is not installed")
    from trackio import utils

    folder = Path(utils.TRACKIO_DIR)
    project = f"tried-{uuid4().hex}"  # its folder is the user's: other runs of the tests are there
    tracker = TrackerConfig(trackio=TrackioConfig(enabled=True, project=project))
    assert logged(tmp_path, tracker) == ""
    assert logged(tmp_path, tracker, steps=(3,)) == ""
    with sqlite3.connect(folder / f"{project}.db") as database:
        rows = database.execute("select step, metrics, run_name from metrics order by id").fetchall()
    records = [(step, json.loads(metrics)) for step, metrics, _ in rows]
    found = [(step, record["reward/mean"]) for step, record in records if "reward/mean" in record]
    assert found == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert {name for *_, name in rows} == {(tmp_path / "trackio" / "run_name").read_text().strip()}
    assert sum("first" in str(record.get("samples")) for _, record in records) == 3


def test_mlflow_has_metrics_parameters_samples_and_alerts_of_a_run_that_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracker = TrackerConfig(mlflow=MlflowConfig(enabled=True))
    assert logged(tmp_path, tracker) == ""
    assert logged(tmp_path, tracker, steps=(3,)) == ""
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlflow" / "runs").as_uri())
    run_id = (tmp_path / "mlflow" / "run_id").read_text().strip()
    assert [each.step for each in client.get_metric_history(run_id, "reward/mean")] == [1, 2, 3]
    assert [each.value for each in client.get_metric_history(run_id, "eval/pass_1")] == [0.25] * 3
    run = client.get_run(run_id)
    assert (run.info.status, run.data.tags["alert"]) == ("FINISHED", "entropy: it collapsed")
    assert run.data.params["trainer.algorithm.advantage_estimator"] == "grpo"
    tables = [json.loads(path.read_text()) for path in sorted(tmp_path.rglob("step_00000*.json"))]
    assert [table["columns"] for table in tables] == [list(SAMPLE_COLUMNS)] * 3


def test_prometheus_is_answered_on_this_machine_alone_with_the_last_record(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="the extra `prometheus` is not installed")
    output = io.StringIO()
    tracker = PrometheusTracker(PrometheusConfig(port=0), run_name="tried", console=RunConsole(file=output))
    try:
        assert output.getvalue() == f"prometheus: {tracker.url}\n"
        tracker.log({"eval/accuracy": 0.25, "reward/mean": 0.25}, step=1)
        tracker.log({"reward/mean": 0.5, "odd": math.nan}, step=2)
        text = httpx.get(tracker.url, timeout=10).text
        assert 'skyrl_reward_mean{run="tried"} 0.5' in text
        assert 'skyrl_eval_accuracy{run="tried"} 0.25' in text
        assert "# HELP skyrl_reward_mean Total rewards of trajectories, failed ones left out" in text
        assert 'skyrl_step{run="tried"} 2.0' in text
        assert tracker.url.startswith("http://127.0.0.1:")
        with pytest.raises(SkyrlTrainError, match=r"tracker\.prometheus cannot start \(OSError: .*in use"):
            PrometheusTracker(
                PrometheusConfig(port=int(tracker.url.split(":")[2].split("/")[0])),
                run_name="second",
                console=RunConsole(file=output),
            )
    finally:
        tracker.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(tracker.url, timeout=10)


def test_an_extra_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mlflow", None)
    with pytest.raises(SkyrlTrainError, match=r"tracker\.mlflow needs a package: pip install 'mlflow-skinny[<>]"):
        logged(tmp_path, TrackerConfig(mlflow=MlflowConfig(enabled=True)))


def test_a_missing_package_is_told_before_a_server_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setattr(
        "skyrl_train.telemetry.trackers.services.WandbTracker", lambda *_, **__: pytest.fail("too early")
    )
    tracker = TrackerConfig(wandb=WandbConfig(enabled=True), mlflow=MlflowConfig(enabled=True))
    with pytest.raises(SkyrlTrainError, match=r"tracker\.mlflow needs a package"):
        build_trackers(Config(tracker=tracker), RunFolder(tmp_path), console=RunConsole(), start_step=0, total_steps=1)
