"""Run folders of served models, as the viewer reads them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from skyrl_train.serve import RunFolders
from skyrl_train.telemetry import read_metrics
from skyrl_train.telemetry.reading import find_runs, rows_of
from tests.support.serve_cases import HAS_SCHEMA, NEEDS_SCHEMA, Caller, datum, play_two_tenants, serving

pytestmark = pytest.mark.skipif(not HAS_SCHEMA, reason=NEEDS_SCHEMA)


def test_each_model_has_a_run_with_a_line_a_step_and_what_was_sampled_since(tmp_path: Path) -> None:
    play_two_tenants(tmp_path)
    ann, bob = find_runs([tmp_path])
    assert [ann.id, bob.id] == ["ann-000000", "bob-000001"]
    lines = read_metrics(ann.folder.metrics_file)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["serve/passes"] for line in lines] == [line["serve/examples"] for line in lines] == [2, 2, 2]
    assert lines[0]["serve/loss_sum"] > lines[2]["serve/loss_sum"] > 0, "it learns the two rows"
    assert [line["serve/samples"] for line in read_metrics(bob.folder.metrics_file)] == [0, 3, 3]
    assert lines[0]["serve/learning_rate"] == 1e-2
    assert [file.step for file in bob.rollout_files()] == [1, 2, 3]
    rows = [row for file in bob.rollout_files() for row in rows_of(file)]
    assert len(rows) == 9
    assert all(row["stop_reason"] in ("length", "stop") and row["text"] for row in rows)


def test_a_server_that_starts_again_goes_on_with_the_steps(tmp_path: Path) -> None:
    for step in (1, 2):
        with serving(tmp_path) as http:
            shown = RunFolders(http.service.records, tmp_path, str)
            http.service.ledger.on_settled = shown.take
            caller = Caller(http)
            model = caller.model() if step == 1 else next(iter(http.service.records.models))
            caller.outcome(caller.train(model, 2 * step - 1, [datum((1, 2, 3))]))
            caller.outcome(caller.step(model, 2 * step))
            shown.close()
    (run,) = find_runs([tmp_path])
    assert [line["step"] for line in read_metrics(run.folder.metrics_file)] == [1, 2]


def test_what_cannot_be_written_fails_no_request_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "runs").write_text("a file stands here")
    with caplog.at_level(logging.WARNING):
        play_two_tenants(tmp_path, steps=1)
    assert [record.message for record in caplog.records if "skyrl-view" in record.message] != []
    assert sum("skyrl-view" in record.message for record in caplog.records) == 1
