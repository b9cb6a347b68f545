"""The whole command on the real GSM8K: every row arrives, and every reward is the real environment's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from skyrl_gym.envs.gsm8k.utils import compute_score

from tests.support import warm_python
from tests.support.command_runs import records

ROOT = Path(__file__).resolve().parents[2]
GSM8K = Path(os.environ.get("SKYRL_TRAIN_GSM8K_DIR", ROOT.parent / "shared" / "data" / "gsm8k"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (GSM8K / "train.jsonl").is_file(), reason=f"no GSM8K in {GSM8K}; set SKYRL_TRAIN_GSM8K_DIR to its folder"
    ),
]


def run(*arguments: str, folder: Path) -> str:
    finished = warm_python.run(*arguments, folder=ROOT, environment={"SKYRL_TRAIN_DATA": str(folder)})
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


def test_two_steps_lose_no_row_and_carry_the_environments_rewards(tmp_path: Path) -> None:
    run("scripts/prepare_gsm8k.py", "--input", str(GSM8K), "--output", str(tmp_path / "gsm8k"), folder=tmp_path)
    output = run(
        "-m",
        "skyrl_train.main",
        "+experiment=gsm8k_multiturn",
        "platform=cpu",
        "data=gsm8k",
        "environment=gsm8k_multi_turn",
        "data.max_prompt_length=800",
        "data.max_validation_prompts=8",
        "generator.n_samples_per_prompt=4",
        "generator.sampling.max_generate_length=48",
        "trainer.train_batch_size=8",
        "trainer.policy_mini_batch_size=4",
        "trainer.critic_mini_batch_size=4",
        "trainer.micro_train_batch_size_per_gpu=16",
        "trainer.total_steps=2",
        f"hydra.run.dir={tmp_path / 'run'}",
        folder=tmp_path,
    )
    assert "7473 training prompts" in output
    for step in (1, 2):
        trajectories = records(tmp_path / "run", f"rollouts/train_step_{step:06d}.parquet")
        assert len(trajectories) == 8 * 4
        for trajectory in trajectories:
            truth = trajectory["extras"]["reward_spec"]["ground_truth"]
            for turn in trajectory["turns"]:
                expected = compute_score(turn["text"], truth, method="strict", format_score=0.2 / 2, score=1.0)
                assert turn["reward"] == pytest.approx(expected)
