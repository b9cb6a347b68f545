"""Real runs log nothing that is not declared (`docs/metrics.md`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.runs import train
from skyrl_train.telemetry import read_metrics, undeclared
from tests.reliability.kill_and_resume import KINDS
from tests.support.async_runs import agent_config, make_config
from tests.support.command_runs import RAY, run_command


def logged(folder: Path) -> set[str]:
    return {name for record in read_metrics(folder / "metrics.jsonl") for name in record}


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_run_and_a_stream_log_what_is_declared(max_staleness: int, tmp_path: Path) -> None:
    config = make_config(tmp_path, max_staleness=max_staleness, total_steps=2)
    train(replace(config, trainer=replace(config.trainer, eval_before_train=max_staleness == 0)))
    names = logged(tmp_path)
    assert undeclared(names) == []
    assert {"reward/mean", "policy/grad_norm", "eval/accuracy", "timing/step"} <= names
    assert ("stream/ready" in names) == bool(max_staleness)


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_run_of_agents_logs_what_is_declared(max_staleness: int, tmp_path: Path) -> None:
    train(agent_config(tmp_path, max_staleness=max_staleness, total_steps=2))
    names = logged(tmp_path)
    assert undeclared(names) == []
    assert any(name.startswith("env/agent/") for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic_sampling", ["filter", "replace"])
def test_runs_that_filter_log_what_is_declared(dynamic_sampling: Any, tmp_path: Path) -> None:
    config = make_config(tmp_path, max_staleness=0, total_steps=2)
    filters = replace(
        config.trainer.algorithm.filters,
        dynamic_sampling=dynamic_sampling,
        dynamic_sampling_max_batches=30,
        **({"replace_min_share": 0.1} if dynamic_sampling == "replace" else {}),
        zero_variance=dynamic_sampling == "filter",
        overlong=True,
        overlong_soft_share=0.5,
        overlong_max_length=8,
        non_stop_scale=0.5,
        resample="none" if dynamic_sampling == "filter" else "pow",
    )
    algorithm = replace(config.trainer.algorithm, filters=filters)
    train(replace(config, trainer=replace(config.trainer, algorithm=algorithm)))
    names = logged(tmp_path)
    assert undeclared(names) == []
    assert {"sampling/prompts_differing_fraction"} <= names


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["rl", "sft", "ppo"])
def test_runs_of_every_kind_log_what_is_declared(kind: str, tmp_path: Path) -> None:
    module, *overrides = KINDS[kind]
    run_command(tmp_path, *overrides, module=module)
    assert undeclared(logged(tmp_path)) == []


@pytest.mark.nightly
def test_a_run_on_ray_logs_what_is_declared(tmp_path: Path) -> None:
    module, *overrides = KINDS["rl"]
    run_command(tmp_path, *overrides, *RAY, module=module)
    assert undeclared(logged(tmp_path)) == []
