"""A supervised run whose micro-batches size themselves, killed and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from skyrl_train.runs import train_sft
from skyrl_train.telemetry import read_metrics
from tests.support.sft_commands import make_config
from tests.support.sft_runs import killed_at


@pytest.mark.nightly
@pytest.mark.slow
def test_a_killed_run_goes_on_with_its_budget_to_the_same_weights(tmp_path: Path) -> None:
    settings = {"micro_batching": "auto", "memory_budget_gb": 0.3, "num_steps": 3, "ckpt_interval": 1}
    train_sft(make_config(tmp_path / "alone", **settings))
    with killed_at(3):
        train_sft(make_config(tmp_path / "run", **settings))
    first = json.loads((tmp_path / "run" / "memory.json").read_text(encoding="utf-8"))["policy"][0]
    train_sft(make_config(tmp_path / "run", **settings))
    again = json.loads((tmp_path / "run" / "memory.json").read_text(encoding="utf-8"))["policy"][0]
    assert not first["is_reused"]
    assert again == {**first, "is_reused": True}
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["memory/policy_redone"] == 0
    alone, run = (load_file(tmp_path / name / "export" / "model.safetensors") for name in ("alone", "run"))
    assert all(bool((alone[name] == run[name]).all()) for name in alone)
