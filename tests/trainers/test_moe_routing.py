"""Runs of a tiny mixture of experts whose trainer sends tokens where the engine sent them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl_train.config import Config
from skyrl_train.errors import ModelError
from skyrl_train.runs import train
from skyrl_train.telemetry import read_metrics
from skyrl_train.telemetry.records import read_rollouts

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts" / "bench"))
import moe_routing as bench

ARGUMENTS = ["--rollouts=8", "--length=24", "--layers=2"]


def make_config(root: Path, **trainer: Any) -> Config:
    """Two steps of the script's model, with an export."""
    args = bench.parse([*ARGUMENTS, "--dtype=float32"])
    if not (root / "model").exists():
        bench.save_mixture(root / "model", args)
    folder = root / ("_".join(map(str, trainer.values())) or "plain")
    config = bench.make_config(root / "model", folder, args, replays=True, recording=None)
    settings = {"total_steps": 2, "export_hf": True, **trainer}
    return replace(config, trainer=replace(config.trainer, **settings))


def weights_of(config: Config) -> bytes:
    return (Path(config.output_dir) / "export" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_recorded_experts_bring_the_trainer_nearer_to_the_engine() -> None:
    """In bfloat16 a token in a few goes elsewhere by rounding alone; the rollouts are the same ones."""
    found = bench.measure(bench.parse(ARGUMENTS))
    for metric in bench.SHOWN:
        assert 0 < found["recorded"][metric] < found["chosen"][metric]


@pytest.mark.slow
def test_a_dense_model_is_refused_before_a_step(tmp_path: Path) -> None:
    config = Config(output_dir=str(tmp_path))
    config = replace(config, trainer=replace(config.trainer, moe_routing_replay=True, total_steps=1))
    with pytest.raises(ModelError, match=r"Qwen2ForCausalLM has no router .*Set trainer.moe_routing_replay=false"):
        train(config)


@pytest.mark.slow
def test_a_run_is_replayed_with_its_experts_byte_for_byte(tmp_path: Path) -> None:
    run = make_config(tmp_path)
    train(run)
    rollouts = Path(run.output_dir) / "rollouts"
    batches = [batch for file in sorted(rollouts.glob("*.parquet")) for batch in read_rollouts(file).values()]
    for turn in (turn for batch in batches for each in batch.trajectories for turn in each.turns):
        assert turn.routed_experts.shape[1:] == (2, 4)
        assert len(np.unique(turn.routed_experts)) > 4
    again = replace(
        run,
        output_dir=str(tmp_path / "again"),
        generator=replace(run.generator, backend="replay", replay_path=str(rollouts)),
    )
    train(again)
    assert weights_of(again) == weights_of(run)


@pytest.mark.slow
@pytest.mark.parametrize("step_wise", [False, True])
def test_a_stream_records_them_too(tmp_path: Path, step_wise: bool) -> None:
    run = make_config(tmp_path, max_staleness=1)
    run = replace(run, generator=replace(run.generator, step_wise_trajectories=step_wise))
    train(run)
    records = read_metrics(Path(run.output_dir) / "metrics.jsonl")
    assert [record["step"] for record in records if "timing/step" in record] == [1, 2]
    assert '"experts"' in (Path(run.output_dir) / "journal" / "journal.jsonl").read_text()
