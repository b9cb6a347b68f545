"""The code of docs/extending.md, run by the real command as it stands there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORDS = ("cat", "horse", "ox", "otter")

pytestmark = pytest.mark.slow


def blocks(language: str) -> list[str]:
    text = (ROOT / "docs" / "extending.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_code.py").write_text("\n\n".join(blocks("python")))
    [row] = (json.loads(block) for block in blocks("json"))
    rows = []
    for word in WORDS:
        message = {"role": "user", "content": row["prompt"][0]["content"].replace("cat", word)}
        rows.append({"prompt": [message], "reward_spec": {"method": "rule", "ground_truth": str(len(word))}})
    (tmp_path / "letters.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def run(folder: Path, *overrides: str) -> list[dict[str, float]]:
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "OMP_NUM_THREADS": "1"}
    sizes = ("trainer.train_batch_size=4", "trainer.policy_mini_batch_size=2", "trainer.critic_mini_batch_size=2")
    few = ("generator.n_samples_per_prompt=4", "trainer.micro_train_batch_size_per_gpu=8", "trainer.total_steps=2")
    arguments = ("+experiment=gsm8k_multiturn", "platform=cpu", "data.validation=[]", "output_dir=run")
    finished = subprocess.run(
        [sys.executable, "-m", "skyrl_train.main", *arguments, *sizes, *few, *overrides],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_environment_estimator_loss_and_strategy_of_the_guide(folder: Path) -> None:
    metrics = run(
        folder,
        "environment.env_class=my_code:CountLetters",
        "data.train=[letters.jsonl]",
        "trainer.algorithm.advantage_estimator=my_code:centred",
        "trainer.algorithm.policy_loss=my_code:unclipped",
        "trainer.micro_batching=my_code:OneByOne",
    )
    assert len(metrics) == 2
    assert all(step["failures/count"] == 0 for step in metrics)
    records = [json.loads(line) for line in (folder / "run/rollouts/train_step_000001.jsonl").read_text().splitlines()]
    for word in WORDS:
        group = [record for record in records if word in record["prompt"][0]["content"]]
        assert len(group) == 4
        mean = sum(record["reward"] for record in group) / 4
        for record in group:
            for turn in record["turns"]:
                assert turn["advantages"] == pytest.approx([record["reward"] - mean] * len(turn["advantages"]))


def test_reward_of_the_guide(folder: Path) -> None:
    run(folder, "environment.env_class=my_code:ShortAnswers")
    records = [json.loads(line) for line in (folder / "run/rollouts/train_step_000001.jsonl").read_text().splitlines()]
    lengths = [sum(len(turn["text"]) for turn in record["turns"]) for record in records]
    unshaped = [record["reward"] + 0.001 * length for record, length in zip(records, lengths)]
    assert all(min(abs(reward - level) for level in (0.0, 0.5, 1.0)) < 0.02 for reward in unshaped)
