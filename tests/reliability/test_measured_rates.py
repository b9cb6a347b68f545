"""Rates of a device that were measured anew between two halves of a run: the second half cuts rows as the first did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command_runs import exported, records, relative_difference, run_command

pytestmark = pytest.mark.nightly

SMALL = (
    "+experiment=gsm8k_multiturn",
    "platform=cpu",
    "trainer.layout=auto",
    "trainer.train_batch_size=4",
    "trainer.policy_mini_batch_size=4",
    "trainer.critic_mini_batch_size=4",
    "trainer.eval_before_train=false",
    "trainer.eval_interval=0",
    "trainer.ckpt_interval=1",
)
RATES = {"linear_flops": 1e11, "attention_flops": 1e11, "kernel_s": 1e-7, "read_bytes": 1e10}
SLOW_TREES, FAST_TREES = {**RATES, "flex_flops": 1e5}, {**RATES, "flex_flops": 1e11}
"""With the first no prefix tree pays, with the second all of them do."""


def keep(cache: Path, rates: dict[str, float]) -> None:
    file = cache / "rates" / "cpu.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {"rates": {**rates, "device": "cpu", "measured_on": "2026-01-02"}, "pieces": []}
    file.write_text(json.dumps(content), encoding="utf-8")


def computed(folder: Path) -> list[float]:
    """Positions that the updates of each step computed."""
    return [record["layout/policy_positions"] for record in records(folder) if "layout/policy_positions" in record]


def test_a_resumed_run_cuts_rows_by_the_rates_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYRL_TRAIN_CACHE", str(tmp_path / "cache"))
    keep(tmp_path / "cache", SLOW_TREES)
    run_command(tmp_path / "whole", *SMALL, "trainer.total_steps=2")
    run_command(tmp_path / "halves", *SMALL, "trainer.total_steps=1")
    keep(tmp_path / "cache", FAST_TREES)
    said = run_command(tmp_path / "halves", *SMALL, "trainer.total_steps=2")
    assert "measured on 2026-01-02" in said
    assert computed(tmp_path / "halves") == computed(tmp_path / "whole")
    assert relative_difference(exported(tmp_path / "halves"), exported(tmp_path / "whole")) == 0.0
    run_command(tmp_path / "another", *SMALL, "trainer.total_steps=1")
    assert computed(tmp_path / "another")[0] < computed(tmp_path / "whole")[0], "the rates decide something here"
    forked = ("trainer.resume_mode=fork", f"trainer.resume_path={tmp_path / 'halves'}", "trainer.total_steps=3")
    run_command(tmp_path / "fork", *SMALL, *forked)
    (state,) = (tmp_path / "fork" / "checkpoints").glob("step_*3/trainer_state.json")
    assert json.loads(state.read_text(encoding="utf-8"))["config"]["platform.rates.flex_flops"] == 1e5
