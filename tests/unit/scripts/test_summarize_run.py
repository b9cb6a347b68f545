"""A run's summary: rates over training alone, scores of the first and last evaluation, and what a folder must hold."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from skyrl_train.telemetry import MetricsLog
from skyrl_train.trainers.evaluation import EvaluationFigures, EvaluationResult, write_evaluation

ROOT = Path(__file__).resolve().parents[3]


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("summarize_run", ROOT / "scripts" / "summarize_run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_script()


def write_run(folder: Path) -> Path:
    """An evaluation before the first step, a slow first step, two more, and an evaluation in the last."""
    log = MetricsLog(folder / "metrics.jsonl")
    log.log({"eval/accuracy": 0.25, "timing/evaluate": 7.0, "timing/step": 7.0}, step=0)
    for step, (seconds, evaluate_s, reward) in enumerate([(90.0, 0.0, 0.1), (10.0, 0.0, 0.2), (14.0, 4.0, 0.6)], 1):
        timings = {"timing/generate": 6.0, "timing/evaluate": evaluate_s, "timing/tokens_per_s": 1.0}
        log.log(
            {"timing/step": seconds, "batch/tokens": 1000.0, "batch/trained_tokens": 400.0, "reward/mean": reward}
            | timings,
            step=step,
        )
    for step, accuracy in ((0, 0.25), (3, 0.75)):
        figures: dict[str, Any] = dict.fromkeys(("accuracy_first_turn", "reward_mean", "turns_mean"), 0.5)
        overall = EvaluationFigures(
            num_prompts=4,
            num_trajectories=4,
            num_failed=0,
            failures={},
            accuracy=accuracy,
            pass_at={},
            response_length_mean=3.0,
            **figures,
        )
        result = EvaluationResult(global_step=step, n_samples_per_prompt=1, overall=overall, parts={})
        write_evaluation(folder / "evaluation.json", result)
    return folder


def test_rates_leave_out_the_first_step_and_evaluations(tmp_path: Path) -> None:
    summary = script.summarize(write_run(tmp_path), num_gpus=2, wall_s=150.0)
    assert (summary["steps"], summary["tokens"], summary["steps_s"], summary["wall_s"]) == (3, 3000, 114.0, 150.0)
    assert summary["train_s"] == 20.0
    assert summary["tokens_per_s"] == 100.0
    assert summary["tokens_per_s_per_gpu"] == 50.0
    assert summary["generated_tokens_per_s_per_gpu"] == 20.0
    assert (summary["accuracy_before"], summary["accuracy_after"], summary["accuracy_step"]) == (0.25, 0.75, 3)
    assert (summary["reward_first_steps"], summary["median_step_s"]) == (0.3, 12.0)
    assert summary["phase_shares"] == {"generate": 0.5, "evaluate": 0.1667}


def test_a_run_on_a_cpu_has_no_rate_per_gpu(tmp_path: Path) -> None:
    assert script.main([str(write_run(tmp_path)), "--num-gpus", "0"]) == 0
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["tokens_per_s_per_gpu"] is None
    table = (tmp_path / "summary.md").read_text()
    assert "| tokens_per_s | 100.0 |" in table
    assert "| share of generate | 50.0% |" in table
    assert "per_gpu" not in table


def test_a_folder_without_a_step_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([str(tmp_path), "--num-gpus", "1"]) == 2
    assert "holds no training step" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.slow
def test_the_gpu_script_works_without_a_gpu_on_the_tiny_model(tmp_path: Path) -> None:
    sizes = [f"trainer.{name}=8" for name in ("train_batch_size", "policy_mini_batch_size", "critic_mini_batch_size")]
    command = [str(ROOT / "scripts/gsm8k_gpu.sh"), "trainer.total_steps=2", "data.max_validation_prompts=8", *sizes]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OUTPUT_DIR": str(tmp_path / "run")}
    subprocess.run([*command, "platform=cpu"], env=environment, check=True, timeout=600)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["num_gpus"], summary["accuracy_step"]) == (2, 0, 2)
    assert summary["tokens_per_s"] > 0
    assert summary["wall_s"] >= summary["steps_s"] > 0
