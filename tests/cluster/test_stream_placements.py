"""Rollouts that are made while the learner updates, by the command line: with vLLM beside the learner, and with learner and
engines apart on Ray, one of which is killed meanwhile."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from skyrl_train.trainers import RunEvent
from tests.support.command_runs import (
    RAY,
    TIMEOUT_S,
    exported,
    records,
    relative_difference,
    run_command,
    start_command,
    wait_for,
)
from tests.support.stream_checks import (
    BATCH,
    SAMPLES,
    check_each_prompt_once,
    check_versions,
    journal,
)

pytestmark = pytest.mark.cluster

SIZES = (
    "+experiment=gsm8k_multiturn",
    "platform=cpu",
    "generator=vllm",
    f"trainer.train_batch_size={BATCH}",
    f"trainer.policy_mini_batch_size={BATCH}",
    f"trainer.critic_mini_batch_size={BATCH}",
    f"generator.n_samples_per_prompt={SAMPLES}",
    "trainer.policy.optimizer.lr=1e-3",
    "trainer.max_staleness=1",
    "trainer.ckpt_interval=0",  # behind a checkpoint the journal would lose lines
)
RESTARTED = ("serves again, with the weights of the last sync", "was started again and waits for the next weights")
_folders: list[Path] = []


def wait_for_the_engine(event: RunEvent) -> None:
    """For `trainer.callbacks`: the learner waits at the end of step 3, while groups go on, until the engine is back."""
    if event.kind == "start" and event.path is not None:
        _folders.append(event.path)
    ends = time.monotonic() + TIMEOUT_S / 2
    while event.kind == "step" and event.step == 3:
        said = (_folders[0] / "run.log").read_text()
        if any(words in said for words in RESTARTED):
            return
        assert time.monotonic() < ends
        time.sleep(0.1)


@pytest.mark.nightly
def test_vllm_beside_the_learner_generates_while_it_updates(tmp_path: Path) -> None:
    folder, steps = tmp_path / "run", 3
    cache = ("generator.vllm.engine_args={block_size: 32}", "trainer.eval_interval=1", "data.max_validation_prompts=8")
    run_command(folder, *SIZES, *cache, "placement=inline", f"trainer.total_steps={steps}")
    check_each_prompt_once(folder, num_steps=steps)
    check_versions(folder, max_staleness=1)
    found = [record for record in records(folder) if record["step"]]
    assert [record["step"] for record in found] == [1, 2, 3]
    assert max(record["off_policy/age/max"] for record in found) == 1.0
    assert found[0]["off_policy/numerics_abs_max"] < 1e-4, "the first batch is all of the trainer's weights"
    for record in found:
        assert {"timing/wait/sync", "timing/wait/rollouts", "engines/cache_hits"} <= record.keys()
    hits = [record["engines/cache_hits"] for record in found]
    print(f"\nshare of prompt tokens in the cache: {hits}", end=" ")
    assert max(hits) > 0.2, "samples of a prompt share it, and later turns their first"
    replayed = tmp_path / "replayed"
    recording = ("generator=replay", f"generator.replay_path={folder / 'rollouts'}", "trainer.max_staleness=0")
    run_command(replayed, *SIZES, *recording, f"trainer.total_steps={steps}", "data.validation=[]")
    assert relative_difference(exported(replayed), exported(folder)) == 0.0


@pytest.mark.nightly
def test_an_engine_that_is_killed_while_the_stream_runs_costs_no_prompt_and_comes_back(tmp_path: Path) -> None:
    folder, steps = tmp_path / "run", 6
    sizes = ("generator.vllm.num_engines=2", f"trainer.total_steps={steps}", "data.validation=[]")
    callback = "trainer.callbacks=[tests.cluster.test_stream_placements:wait_for_the_engine]"
    running = start_command(folder, *SIZES, *RAY, *sizes, callback)
    file, ends = folder / "journal" / "journal.jsonl", time.monotonic() + TIMEOUT_S
    while not (file.exists() and any(line.get("batch") == 1 for line in journal(folder))):
        assert running.process.poll() is None, running.log.read_text()[-4000:]
        assert time.monotonic() < ends
        time.sleep(0.01)
    victim, _ = json.loads((folder / "actors.json").read_text())["engine"]
    os.kill(victim["pid"], signal.SIGKILL)
    status, said = wait_for(running)
    assert status == 0, said[-6000:]
    assert f"inference engine rank 0 (node {victim['node']}, pid {victim['pid']}) died" in said
    assert "step 1/6" in said.partition("died")[0], "it was the first attempt, which ended as planned"
    check_each_prompt_once(folder, num_steps=steps)
    check_versions(folder, max_staleness=1)
    found = records(folder)
    serving = [record["engines/serving"] for record in found]
    moved = [record["engines/requests_moved"] for record in found]
    balance = [round(record["engines/balance"], 2) for record in found if "engines/balance" in record]
    print(f"\nengines that serve: {serving}, requests moved: {moved}, balance: {balance}", end=" ")
    assert serving[0] == serving[-1] == 2.0
    assert [sync["version"] for sync in records(folder, "weight_sync.jsonl")] == list(range(steps + 1))
    assert [sync["num_engines"] for sync in records(folder, "weight_sync.jsonl")][-1] == 2
