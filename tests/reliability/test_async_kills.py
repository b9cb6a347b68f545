"""kill -9 of a run whose rollouts are made while the learner updates, at moments that its journal names."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.telemetry.rollout_log import read_rollouts
from tests.command_runs import TIMEOUT_S, run_command, start_command

STEPS, BATCH, SAMPLES = 4, 8, 4
COMMAND = (
    "+experiment=gsm8k_multiturn",
    "platform=cpu",
    f"trainer.total_steps={STEPS}",
    f"trainer.train_batch_size={BATCH}",
    f"trainer.policy_mini_batch_size={BATCH}",
    f"trainer.critic_mini_batch_size={BATCH}",
    f"generator.n_samples_per_prompt={SAMPLES}",
    "trainer.ckpt_interval=2",
    "data.validation=[]",
)
NUM_RUNS = int(os.environ.get("SKYRL_TRAIN_ASYNC_KILLS", "2"))


def journal(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of the journal."""
    content = (folder / "journal" / "journal.jsonl").read_bytes()
    return [json.loads(line) for line in content.split(b"\n")[:-1]]


def kill_when_the_journal_has(folder: Path, num_bytes: int) -> bool:
    """Starts the run and kills its process group; False where it ended before."""
    file = folder / "journal" / "journal.jsonl"
    running = start_command(folder, *COMMAND, "trainer.max_staleness=1")
    ends = time.monotonic() + TIMEOUT_S
    while running.process.poll() is None and not (file.exists() and file.stat().st_size >= num_bytes):
        assert time.monotonic() < ends
        time.sleep(0.005)
    is_killed = running.process.poll() is None
    if is_killed:
        os.killpg(running.process.pid, signal.SIGKILL)
    running.process.wait(TIMEOUT_S)
    assert is_killed or running.process.returncode == 0, running.log.read_text()[-4000:]
    return is_killed


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_RUNS))
def test_a_killed_run_makes_nothing_twice_and_its_replay_gives_its_weights(tmp_path: Path, seed: int) -> None:
    draw, folder = random.Random(seed), tmp_path / "run"
    size = 0
    for _ in range(2):
        size += draw.randrange(1, 100_000)
        assert kill_when_the_journal_has(folder, size), "the run ended before it could be killed"
        size = (folder / "journal" / "journal.jsonl").stat().st_size
    run_command(folder, *COMMAND, "trainer.max_staleness=1")

    lines = journal(folder)
    for kind, count in {"start": STEPS * BATCH, "turn": None, "group": STEPS * BATCH, "batch": STEPS}.items():
        found = Counter(str(line[kind]) for line in lines if kind in line)
        assert set(found.values()) == {1}, f"a {kind} was made twice"
        assert count is None or len(found) == count
    files = sorted((folder / "rollouts").glob("train_step_*.jsonl"))
    prompts = Counter(
        prompt.uid for file in files for batch in read_rollouts(file).values() for prompt in batch.prompts
    )
    assert len(prompts) == STEPS * BATCH
    assert set(prompts.values()) == {1}

    replayed = tmp_path / "replayed"
    run_command(replayed, *COMMAND, "generator=replay", f"generator.replay_path={folder / 'rollouts'}")
    weights = "export/model.safetensors"
    assert (replayed / weights).read_bytes() == (folder / weights).read_bytes()
