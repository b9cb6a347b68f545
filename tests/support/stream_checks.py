"""What must hold of the rollouts of a stream, read from the folder of its run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from skyrl_train.telemetry.records import read_rollouts
from skyrl_train.types import RolloutBatch

BATCH, SAMPLES = 8, 4


def steps_of(folder: Path, kind: str) -> dict[int, RolloutBatch]:
    """The recorded rollouts of `train` or `eval`, by step."""
    files = sorted((folder / "rollouts").glob(f"{kind}_step_*.parquet"))
    return {step: batch for file in files for step, batch in read_rollouts(file).items()}


def versions_of(batch: RolloutBatch) -> set[int]:
    """Of the weights that sampled its tokens."""
    turns = [turn for trajectory in batch.trajectories for turn in trajectory.turns]
    assert turns
    return {run.version for turn in turns for run in turn.weight_versions}


def journal(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of the journal."""
    content = (folder / "journal" / "journal.jsonl").read_bytes()
    return [json.loads(line) for line in content.split(b"\n")[:-1]]


def check_each_prompt_once(folder: Path, *, num_steps: int) -> None:
    """In the journal and in what was trained on: nothing lost, nothing doubled, nothing failed."""
    lines = journal(folder)
    for kind, count in {
        "start": num_steps * BATCH,
        "turn": None,
        "group": num_steps * BATCH,
        "batch": num_steps,
    }.items():
        found = Counter(str(line[kind]) for line in lines if kind in line)
        assert set(found.values()) == {1}, f"a {kind} was made twice"
        assert count is None or len(found) == count
    batches = steps_of(folder, "train").values()
    assert len(batches) == num_steps
    prompts = Counter(prompt.uid for batch in batches for prompt in batch.prompts)
    assert len(prompts) == num_steps * BATCH
    assert set(prompts.values()) == {1}
    assert not any(trajectory.failed for batch in batches for trajectory in batch.trajectories)


def check_versions(folder: Path, *, max_staleness: int) -> None:
    """Trained tokens are young enough, and evaluations are of their step's weights."""
    ages = {step - 1 - version for step, batch in steps_of(folder, "train").items() for version in versions_of(batch)}
    assert ages <= set(range(max_staleness + 1))
    assert max(ages) > 0, "rollouts are made while the learner updates"
    for step, batch in steps_of(folder, "eval").items():
        assert versions_of(batch) == {step}
