"""`generator=vllm placement=inline`, by the command line: vLLM and the models on this machine, without Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.command_runs import TIMEOUT_S, exported, records, relative_difference, run_command
from tests.support.process_trees import command_line, descendants, is_running

pytestmark = pytest.mark.cluster

SIZES = (
    "+experiment=gsm8k_multiturn",
    "platform=cpu",
    "data.validation=[]",
    "generator.n_samples_per_prompt=4",
    "trainer.train_batch_size=16",
    "trainer.policy_mini_batch_size=8",
    "trainer.critic_mini_batch_size=8",
)
INLINE = ("generator=vllm", "placement=inline")


def test_two_steps_in_turns_are_those_that_their_rollouts_make(tmp_path: Path) -> None:
    """Models leave their memory for the engine and come back. The rollouts replayed, with neither, give the same weights to
    the bit; and they are rollouts of the trainer's weights, of each step anew."""
    steps = ("trainer.total_steps=2", "trainer.algorithm.kl_loss_coef=0.01", "trainer.policy.optimizer.lr=1e-3")
    said = run_command(tmp_path / "vllm", *SIZES, *steps, *INLINE, "placement.colocate_all=true")
    recording = ("generator=replay", f"generator.replay_path={tmp_path / 'vllm' / 'rollouts'}")
    run_command(tmp_path / "replayed", *SIZES, *steps, *recording)
    assert relative_difference(exported(tmp_path / "vllm"), exported(tmp_path / "replayed")) == 0.0
    assert "WARNING" not in said, "vLLM's own words do not stand between the steps"
    found = records(tmp_path / "vllm")
    assert [record["step"] for record in found] == [1, 2]
    difference = max(record["mismatch/logprob_diff_max"] for record in found)
    syncs = records(tmp_path / "vllm", "weight_sync.jsonl")
    print(f"\nprobe {syncs[0]['probe_difference']:.1e}, rollouts {difference:.1e}", end=" ")
    assert difference < 1e-4
    assert [sync["version"] for sync in syncs] == [0, 1, 2]
    assert [sync["probe_difference"] is not None for sync in syncs] == [True, True, True]
    assert syncs[0]["probe_difference"] < 1e-4
    moves = [json.loads(line)["move"] for line in (tmp_path / "vllm" / "device_turns.jsonl").read_text().splitlines()]
    assert moves[:3] == ["engines sleep", "policy off", "reference off"]
    assert {"policy on, with optimizer", "reference on", "engines wake: weights", "engines wake: kv_cache"} <= set(
        moves
    )


@contextmanager
def running(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that is at its second step, in a process group of its own; killed where it does not end."""
    folder.mkdir()
    command = [sys.executable, "-m", "skyrl_train.main", *SIZES, *INLINE, "trainer.total_steps=500"]
    process = subprocess.Popen(
        [*command, "trainer.ckpt_interval=100", f"hydra.run.dir={folder}"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        metrics, ends = folder / "metrics.jsonl", time.monotonic() + TIMEOUT_S
        while not (metrics.exists() and metrics.read_text()):
            assert process.poll() is None, process.communicate()[0][-4000:]
            assert time.monotonic() < ends
            time.sleep(0.1)
        yield process
    finally:
        process.kill()
        process.wait()


def cores_of(process: subprocess.Popen[str]) -> list[int]:
    return [pid for pid in descendants(process.pid) if "VLLM::EngineCore" in command_line(pid)]


def nothing_left(family: list[int]) -> bool:
    ends = time.monotonic() + 10.0
    while any(map(is_running, family)) and time.monotonic() < ends:
        time.sleep(0.05)
    return not any(map(is_running, family))


@pytest.mark.nightly
def test_ctrl_c_lets_the_step_end_and_leaves_a_checkpoint_and_no_process(tmp_path: Path) -> None:
    """The terminal sends it to all processes; vLLM's would end at once, and the step could not."""
    with running(tmp_path / "run") as process:
        family = descendants(process.pid)
        assert cores_of(process)
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate(timeout=TIMEOUT_S)[0]
    assert process.returncode == 128 + signal.SIGINT, said[-4000:]
    assert "SIGINT: finishing the running step" in said
    assert "leaked" not in said
    last = records(tmp_path / "run")[-1]["step"]
    assert (tmp_path / "run" / "checkpoints" / f"step_{last:06d}").is_dir()
    assert nothing_left(family)


@pytest.mark.nightly
def test_a_core_that_dies_ends_the_run_and_is_named(tmp_path: Path) -> None:
    with running(tmp_path / "run") as process:
        family, (core,) = descendants(process.pid), cores_of(process)
        os.kill(core, signal.SIGKILL)
        said = process.communicate(timeout=TIMEOUT_S)[0]
    assert process.returncode == 2, said[-4000:]
    assert "EngineDeadError" in said or "EngineError" in said
    assert f"EngineCore (pid {core}) was killed by signal 9" in said
    assert nothing_left(family)
