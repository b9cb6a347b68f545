"""The real thing, small: the bundled model on a few bundled problems, from a config to an export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from skyrl_train.runs import train_sft
from skyrl_train.telemetry import read_metrics
from tests.support.sft_commands import make_config
from tests.support.sft_runs import killed_at, records_without_timings


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_run_lowers_the_loss_and_leaves_everything_behind(tmp_path: Path, layout: str) -> None:
    root = tmp_path / "run"
    result = train_sft(make_config(root, layout=layout, eval_samples=1, keep_best=True))
    assert result is not None
    records = read_metrics(root / "metrics.jsonl")
    assert records[-1]["eval/loss"] < records[0]["eval/loss"]
    assert records[-1]["train/loss"] < records[1]["train/loss"]
    for name in ("config.yaml", "plan.json", "learning_curve.png", "complete.json", "export/model.safetensors"):
        assert (root / name).is_file()
    assert json.loads((root / "plan.json").read_text())["total_steps"] == 4
    assert (root / "samples" / "step_000004.jsonl").is_file()
    assert list((root / "best").glob("step_*"))


@pytest.mark.slow
def test_packed_and_padded_runs_learn_the_same(tmp_path: Path) -> None:
    losses = {}
    for layout in ("padded", "packed"):
        train_sft(make_config(tmp_path / layout, layout=layout, export="none"))
        losses[layout] = [record["train/loss"] for record in read_metrics(tmp_path / layout / "metrics.jsonl")[1:]]
    assert losses["packed"] == pytest.approx(losses["padded"], rel=1e-4)


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    train_sft(make_config(tmp_path / "alone"))
    with killed_at(3):
        train_sft(make_config(tmp_path / "run"))
    train_sft(make_config(tmp_path / "run"))
    assert records_without_timings(tmp_path / "run" / "metrics.jsonl") == records_without_timings(
        tmp_path / "alone" / "metrics.jsonl"
    )
    alone, run = (load_file(tmp_path / name / "export" / "model.safetensors") for name in ("alone", "run"))
    assert all(bool((alone[name] == run[name]).all()) for name in alone)
