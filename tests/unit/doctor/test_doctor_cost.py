"""A run of a thousand steps is examined in seconds: CPU seconds of this process, which other processes do not change."""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skyrl_train.doctor import examine
from skyrl_train.telemetry.reading import find_runs
from skyrl_train.telemetry.records import arrow_schema

STEPS, PROMPTS, SAMPLES, TOKENS, FILES = 1000, 64, 8, 48, 10
MOST_CPU_S = 10.0


def _rows(number: int) -> list[dict[str, object]]:
    rng = random.Random(number)
    rows = []
    for prompt in range(PROMPTS):
        truth = rng.randint(10, 999)
        for sample in range(SAMPLES):
            reward = float(rng.random() < 0.5)
            rows.append(
                {
                    "uid": f"{number}-{prompt}",
                    "sample": sample,
                    "turn": 0,
                    "num_turns": 1,
                    "outcome": "done",
                    "trajectory_reward": reward,
                    "reward": reward,
                    "prompt": json.dumps([{"role": "user", "content": f"Question {number} {prompt} of {truth}?"}]),
                    "extras": json.dumps({"answer": str(truth)}),
                    "metrics": json.dumps({"solved": reward}),
                    "rewards": "{}",
                    "text": f"So it is #### {truth if reward else truth + 1} " + "word " * rng.randint(3, 30),
                    "stop_reason": "stop",
                    "response_token_ids": [rng.randint(3, 30_000) for _ in range(TOKENS)],
                    "logprobs": [-rng.random() for _ in range(TOKENS)],
                    "policy_logprobs": [-rng.random() for _ in range(TOKENS)],
                    "advantages": [reward - 0.5] * TOKENS,
                }
            )
    return rows


def _write_run(root: Path) -> Path:
    """Half a million trajectories: ten files of a step, each a hundred times."""
    (root / "rollouts").mkdir(parents=True)
    rng = random.Random(1)
    names = [f"timing/phase_{n}" for n in range(60)] + [
        "reward/mean",
        "reward/std",
        "policy/entropy",
        "policy/grad_norm",
    ]
    with (root / "metrics.jsonl").open("w") as file:
        for step in range(1, STEPS + 1):
            file.write(json.dumps({"step": step, **{name: rng.random() for name in names}}) + "\n")
    for number in range(FILES):
        table = pa.Table.from_pylist(_rows(number), schema=arrow_schema())
        pq.write_table(table, root / "rollouts" / f"train_step_{number + 1:06d}.parquet")
    for step in range(FILES + 1, STEPS + 1):
        source = root / "rollouts" / f"train_step_{(step - 1) % FILES + 1:06d}.parquet"
        shutil.copyfile(source, root / "rollouts" / f"train_step_{step:06d}.parquet")
    return root


@pytest.mark.slow
def test_a_thousand_steps_are_examined_within_ten_cpu_seconds(tmp_path: Path) -> None:
    (run,) = find_runs([_write_run(tmp_path / "run")])
    began = time.process_time()
    findings, tables = examine(run)
    used = time.process_time() - began
    print(f"{STEPS} steps, {STEPS * PROMPTS * SAMPLES} trajectories: {used:.1f} CPU s, {len(findings)} findings")
    assert tables.problems == []
    assert len(tables.facts.step) == STEPS * PROMPTS * SAMPLES
    assert used < MOST_CPU_S
