"""Whole runs by the command line that lose a rank or a node in the middle of an update end as a resume by hand does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_runs import RAY, TIMEOUT_S, exported, records, run_command

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
SIZES = (
    "+experiment=gsm8k_multiturn",
    "platform=cpu",
    "generator=hf",
    "strategy=fsdp2",
    "data.validation=[]",
    "generator.n_samples_per_prompt=4",
    "trainer.train_batch_size=4",
    "trainer.policy_mini_batch_size=4",
    "trainer.critic_mini_batch_size=4",
    "trainer.ckpt_interval=1",
    "trainer.max_ckpts_to_keep=5",
    "trainer.total_steps=3",
    *RAY,
)
TWO = ("placement.policy_num_workers=2",)


def struck(folder: Path, blows: str, *overrides: str) -> str:
    """Runs the trainer to its end whatever strikes it; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster.struck_run", blows, *SIZES, *overrides, f"hydra.run.dir={folder}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-5000:]}"
    return done.stdout + done.stderr


def resumed(folder: Path, checkpoint: Path, *overrides: str) -> Path:
    """The folder of a run that was told to go on from that checkpoint by hand."""
    by_hand = ("trainer.resume_mode=from_path", f"trainer.resume_path={checkpoint}")
    run_command(folder, *SIZES, *overrides, *by_hand)
    return folder


def require_the_same(found: Path, expected: Path) -> None:
    """Weights to the bit, and every figure but seconds and the number of restarts."""
    mine, other = exported(found), exported(expected)
    assert {name: tensor.tolist() for name, tensor in mine.items()} == {
        name: tensor.tolist() for name, tensor in other.items()
    }
    assert figures(found) == figures(expected)


def figures(folder: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in record.items() if not name.startswith(("timing/", "memory/", "run/restarts"))}
        for record in records(folder)
    ]


@pytest.mark.nightly
def test_ranks_that_are_killed_and_stopped_lead_to_restarts_that_equal_a_resume_by_hand(tmp_path: Path) -> None:
    said = struck(tmp_path / "struck", "SIGKILL@2,SIGSTOP@4", *TWO, "placement.silence_timeout_s=5")

    assert "restart 1 of 3 (trainer.max_restarts)" in said
    assert "restart 2 of 3 (trainer.max_restarts)" in said
    history = records(tmp_path / "struck", "restarts.jsonl")
    assert [(line["restart"], line["after_step"]) for line in history] == [(1, 1), (2, 2)]
    assert all("policy worker rank 1" in line["reason"] for line in history)
    assert "died in phase update (forward_backward)" in history[0]["reason"]
    assert "asked for a sign of life" in history[1]["reason"]
    assert [record.get("run/restarts") for record in records(tmp_path / "struck")] == [None, 1.0, 2.0]
    log = (tmp_path / "struck" / "run.log").read_text(encoding="utf-8")
    assert "is stopped by a signal (state T)" in log
    told = log.partition("What every process is doing")[2]
    assert "learner_worker.py" in told.partition("policy worker, pid")[2], "the stack of the rank that is well"

    by_hand = resumed(tmp_path / "by_hand", tmp_path / "struck" / "checkpoints" / "step_000001", *TWO)
    require_the_same(tmp_path / "struck", by_hand)


@pytest.mark.nightly
def test_a_node_that_dies_leaves_the_run_to_the_others_as_a_resume_on_fewer_ranks_would(tmp_path: Path) -> None:
    nodes = ("placement.policy_num_nodes=2", "placement.allow_fewer_workers=true", "placement.silence_timeout_s=20")
    said = struck(tmp_path / "struck", "NODE@3", *TWO, *nodes)

    assert "what is left, 1 node, holds 1 rank of the policy in place of 2" in said
    (line,) = records(tmp_path / "struck", "restarts.jsonl")
    assert (line["after_step"], line["policy_num_workers"]) == (2, 1)

    by_hand = resumed(tmp_path / "by_hand", tmp_path / "struck" / "checkpoints" / "step_000002")
    require_the_same(tmp_path / "struck", by_hand)
