"""`trainer.profile_steps` in real runs: traces that can be read, and nothing else changed."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_train.runs import train
from skyrl_train.telemetry import read_metrics
from tests.reliability.kill_and_resume import KINDS
from tests.support.async_runs import BATCH, make_config
from tests.support.command_runs import RAY, run_command


def profiled(folder: Path, steps: tuple[int, ...], *, updates: int = 1) -> list[dict[str, object]]:
    """The records of two steps, of so many optimizer steps each, without what depends on the machine."""
    config = make_config(folder, max_staleness=0, total_steps=2, policy_mini_batch_size=BATCH // updates)
    train(replace(config, trainer=replace(config.trainer, profile_steps=steps)))
    records = read_metrics(folder / "metrics.jsonl")
    return [
        {name: value for name, value in each.items() if not name.startswith(("timing/", "memory/"))} for each in records
    ]


@pytest.mark.slow
def test_each_optimizer_step_of_a_profiled_step_leaves_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profiled(tmp_path, (2, 7), updates=2)
    files = sorted(path.name for path in (tmp_path / "profiles").iterdir())
    assert files == [f"step_000002_policy_rank0_update{update}.json.gz" for update in (1, 2)]
    with gzip.open(tmp_path / "profiles" / files[0]) as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"aten::mm", "aten::embedding"} & names
    assert "autograd::engine::evaluate_function: EmbeddingBackward0" in names
    said = " ".join(capsys.readouterr().out.split())
    assert "steps [2, 7] are profiled: traces in" in said
    assert "without snapshots of memory, which CUDA alone takes" in said


@pytest.mark.slow
def test_a_profiled_run_trains_to_the_same_records(tmp_path: Path) -> None:
    assert profiled(tmp_path / "with", (1, 2)) == profiled(tmp_path / "without", ())


@pytest.mark.nightly
@pytest.mark.cluster
def test_each_rank_on_ray_leaves_its_own(tmp_path: Path) -> None:
    module, *overrides = KINDS["rl"]
    ranks = ("placement.policy_num_workers=2", "strategy=fsdp2", "trainer.profile_steps=[2]")
    run_command(tmp_path, *overrides, *RAY, *ranks, module=module)
    found = {path.name for path in (tmp_path / "profiles").iterdir()}
    assert {f"step_000002_policy_rank{rank}_update1.json.gz" for rank in (0, 1)} <= found
