"""Which runs are opened, what they are called, and what of them is drawn first."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("duckdb")

from skyrl_train.errors import SkyrlTrainError
from skyrl_train.telemetry.reading import find_runs
from skyrl_train.view.answers import Answers
from skyrl_train.view.records import metric_series
from skyrl_train.view.rollouts import RolloutIndex
from skyrl_train.view.tails import log_warnings


def run(folder: Path, settings: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    (folder / "config.yaml").write_text(f"output_dir: {folder}\nrun_name: {folder.name}\n{settings}")
    return folder


def labels(tmp_path: Path, *folders: Path) -> list[str]:
    runs = find_runs(folders)
    (tmp_path / "index").mkdir()
    answers = Answers(runs, RolloutIndex(tmp_path / "index", runs), version="1")
    status, found = answers.answer("api/runs", [])
    assert status == 200
    return [each["label"] for each in found["runs"]]


def test_runs_of_a_sweep_are_called_by_what_differs_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (0, 2, 10):
        run(tmp_path / "sweep" / str(number), f"seed: {number}\ntrainer:\n  policy: {{optimizer: {{lr: 1.0e-06}}}}\n")
    (tmp_path / "sweep" / "multirun.yaml").write_text("hydra: {}\n")
    assert labels(tmp_path, tmp_path / "sweep") == ["seed=0", "seed=2", "seed=10"]
    assert [each.id for each in find_runs([*(tmp_path / "sweep").iterdir()])] != []


def test_runs_that_do_not_differ_keep_their_names_apart(tmp_path: Path) -> None:
    folders = [run(tmp_path / str(number), "seed: 1\n") for number in (0, 1)]
    assert labels(tmp_path, *folders) == ["0", "1"]


def test_two_of_three_that_are_set_alike_have_their_folders_beside_it(tmp_path: Path) -> None:
    folders = [run(tmp_path / str(number), f"seed: {seed}\n") for number, seed in enumerate((1, 1, 2))]
    assert labels(tmp_path, *folders) == ["seed=1 (0)", "seed=1 (1)", "seed=2"]


def test_folders_with_names_keep_them_before_what_differs(tmp_path: Path) -> None:
    folders = [run(tmp_path / name, f"seed: {seed}\n") for seed, name in enumerate(("low", "high"))]
    assert labels(tmp_path, *folders) == ["low: seed=0", "high: seed=1"]


def test_the_folder_of_all_outputs_opens(tmp_path: Path) -> None:
    for name in ("one/2026-01-01_000000", "one/2026-01-02_000000", "two/2026-01-03_000000"):
        run(tmp_path / name)
    (tmp_path / "notes.txt").write_text("mine")
    assert [each.root.name for each in find_runs([tmp_path])] == [
        "2026-01-01_000000",
        "2026-01-02_000000",
        "2026-01-03_000000",
    ]


def test_a_file_alone_is_still_refused(tmp_path: Path) -> None:
    (tmp_path / "multirun.yaml").write_text("")
    with pytest.raises(SkyrlTrainError, match="is no folder"):
        find_runs([tmp_path / "multirun.yaml"])


def shown_first(*records: dict[str, float | None]) -> list[str]:
    return metric_series([{"step": step, **record} for step, record in enumerate(records, 1)], [], 100)["default"]  # type: ignore[no-any-return]


def test_a_supervised_run_begins_with_its_losses() -> None:
    found = shown_first({"train/loss": 2.0, "eval/loss": 2.1, "policy/grad_norm": 1.0}, {"train/loss": 1.5})
    assert found[:2] == ["train/loss", "eval/loss"]


def test_no_curve_repeats_another_or_is_0_throughout() -> None:
    record = {"reward/mean": 0.0, "loss/policy": 0.1, "loss/total": 0.1, "policy/entropy": 0.0, "tools/failed": None}
    assert shown_first(record, record) == ["reward/mean", "loss/policy"]


def test_parts_of_the_held_out_rows_and_metrics_of_environments_are_among_them() -> None:
    record = {
        "reward/mean": 0.5,
        "env/guesses": 2.0,
        "env/solved": 0.3,
        "eval/a=1/accuracy": 0.1,
        "eval/a=2/accuracy": 0.2,
    }
    found = shown_first(record, {**record, "reward/mean": 0.6})
    assert {"env/guesses", "eval/a=1/accuracy", "eval/a=2/accuracy", "env/solved"} <= {*found}
    many = {f"env/m{number}": float(number + 1) for number in range(20)}
    assert sum(name.startswith("env/") for name in shown_first(many, {})) == 3


def test_the_error_that_ended_a_run_is_among_the_warnings_with_its_traceback(tmp_path: Path) -> None:
    lines = [
        "2026-11-22 18:51:52,526 INFO stdout: skyrl_train: one",
        "2026-11-22 18:52:09,125 INFO skyrl_train.runs.result: the run ended",
        "Traceback (most recent call last):",
        '  File "my_code.py", line 7, in score',
        "KeyError: 'answr'",
        "2026-11-22 18:52:10,000 INFO stdout: bye",
    ]
    (tmp_path / "run.log").write_text("\n".join(lines) + "\n")
    found, total = log_warnings(tmp_path / "run.log")
    assert total == 1
    assert found[0]["text"].endswith("KeyError: 'answr'")
    assert 'File "my_code.py", line 7' in found[0]["text"]
