import json
import math

import pytest

from skyrl_train.errors import DataError
from skyrl_train.telemetry.metrics_log import MetricsLog, cut_metrics_after, read_metrics


def test_a_line_a_step_with_sorted_keys(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.log({"reward/mean": 0.5, "batch/rows": 8.0}, step=1)
    log.log({"reward/mean": 0.1 + 0.2}, step=2)
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"batch/rows": 8.0, "reward/mean": 0.5, "step": 1}\n{"reward/mean": 0.30000000000000004, "step": 2}\n'
    )


def test_what_is_not_finite_becomes_null_and_is_counted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path).log({"a": math.nan, "b": -math.inf, "c": 1.0}, step=1)
    assert json.loads(path.read_text()) == {"a": None, "b": None, "c": 1.0, "metrics/non_finite": 2, "step": 1}


def test_reading_leaves_a_torn_last_line_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    path.write_text('{"a": 1.0, "step": 1}\n{"a": 2.0, "st')
    assert read_metrics(path) == [{"a": 1.0, "step": 1}]


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"step": "one"}', ""])
def test_a_broken_line_elsewhere_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: not a metrics record"):
        read_metrics(path)


@pytest.mark.parametrize("torn", ["", '{"step": 4, "a', '{"step": 1}'])
def test_cutting_drops_later_steps_and_a_torn_line(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    kept = '{"a": 0.10, "step": 0}\n{"step": 1}\n'
    path.write_text(kept + '{"step": 2}\n{"step": 3}\n' + torn)
    assert cut_metrics_after(path, 1) == 2
    assert path.read_text() == kept
    assert cut_metrics_after(path, 1) == 0


def test_cutting_nothing_needs_no_file(tmp_path):
    assert cut_metrics_after(tmp_path / "metrics.jsonl", 3) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_needs_few_metrics_holds_no_others(tmp_path):
    MetricsLog(tmp_path / "metrics.jsonl").log({"reward/mean": 0.5, "policy/lr": 1.0, "timing/step": 2.0}, step=3)
    kept = read_metrics(tmp_path / "metrics.jsonl", keeps=lambda name: name.startswith("reward/"))
    assert kept == [{"reward/mean": 0.5, "step": 3}]
