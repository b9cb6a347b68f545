"""Signals sent to real commands: while they start, in their steps, in the last step, twice, and on Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command_runs import RAY, Running, records, start_command, wait_for

BLOCKING = """
import time
from pathlib import Path

from skyrl_train.rollout.envs.word_problems import WordProblemsEnv


class Blocking(WordProblemsEnv):
    def step(self, action):
        while Path({block!r}).exists():
            time.sleep(0.1)
        return super().step(action)
"""
WAITING = """
import time
from pathlib import Path


def wait(facts):
    Path({reached!r}).touch()
    while not Path({go_on!r}).exists():
        time.sleep(0.05)
    return {{}}
"""
RL = (
    "trainer.train_batch_size=2",
    "trainer.policy_mini_batch_size=2",
    "generator.n_samples_per_prompt=2",
    "data.validation=[]",
    "trainer.ckpt_interval=0",
)
SFT = ("trainer.batch_size=2", "trainer.optimizer.schedule=constant", "data.validation=[]", "trainer.ckpt_interval=0")


def steps_of(folder: Path) -> list[int]:
    return [record["step"] for record in records(folder)] if (folder / "metrics.jsonl").exists() else []


def wait_until(condition: Callable[[], bool], running: Running) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert running.process.poll() is None, running.log.read_text(encoding="utf-8")
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_command_that_is_interrupted_while_it_starts_says_so_in_a_line() -> None:
    for module in ("main", "main_sft", "main_generate"):
        for signum, delay_s in ((signal.SIGINT, 0.3), (signal.SIGHUP, 0.9)):
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    f"import skyrl_train.{module} as m; print(flush=True); m.main()",
                    "--cfg",
                    "job",
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(delay_s / 3)
            process.send_signal(signum)
            _, said = process.communicate(timeout=60)
            assert process.returncode in (128 + signum, 0), said
            assert "Traceback" not in said
            assert process.returncode == 0 or said == f"{signum.name}: ended at once\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "overrides", "signum", "steps"),
    [
        ("skyrl_train.main", RL, signal.SIGHUP, "trainer.total_steps"),
        pytest.param("skyrl_train.main", RL, signal.SIGUSR1, "trainer.total_steps", marks=pytest.mark.nightly),
        pytest.param("skyrl_train.main_sft", SFT, signal.SIGUSR1, "trainer.num_steps", marks=pytest.mark.nightly),
        pytest.param("skyrl_train.main", (*RL, *RAY), signal.SIGHUP, "trainer.total_steps", marks=pytest.mark.nightly),
    ],
)
def test_a_signal_in_a_step_leaves_its_checkpoint_and_the_command_goes_on_from_there(
    module: str, overrides: tuple[str, ...], signum: signal.Signals, steps: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    running = start_command(folder, *overrides, f"{steps}=500", module=module)
    wait_until(lambda: bool(steps_of(folder)), running)
    # as a terminal that closes does, to all processes of the command
    os.killpg(running.process.pid, signum)
    status, said = wait_for(running)
    step = steps_of(folder)[-1]
    assert status == 128 + signum, said
    assert f"stopped by {signum.name} after step {step}. To go on:" in said
    assert f"{signum.name}: finishing the running step" in (folder / "run.log").read_text(encoding="utf-8")
    assert (folder / "checkpoints" / "latest").read_text() == f"step_{step:06d}\n"
    last = start_command(folder, *overrides, f"{steps}={step + 1}", module=module)
    status, said = wait_for(last)
    assert status == 0, said
    assert steps_of(folder) == list(range(1, step + 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "overrides"),
    [
        pytest.param("skyrl_train.main", (*RL, "trainer.total_steps=1"), marks=pytest.mark.nightly),
        ("skyrl_train.main_sft", (*SFT, "trainer.num_steps=1")),
    ],
)
def test_a_signal_in_the_last_step_finishes_the_run(
    module: str, overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, reached, go_on = tmp_path / "run", tmp_path / "reached", tmp_path / "go_on"
    (tmp_path / "waiting.py").write_text(WAITING.format(reached=str(reached), go_on=str(go_on)), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    running = start_command(folder, *overrides, "trainer.metrics=[waiting:wait]", module=module)
    wait_until(reached.exists, running)
    running.process.send_signal(signal.SIGTERM)
    go_on.touch()
    status, said = wait_for(running)
    assert "SIGTERM: finishing the running step" in said
    assert status == 0, said
    assert (folder / "complete.json").exists()
    assert (folder / "export" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["by a second signal", pytest.param("by the grace time", marks=pytest.mark.nightly)])
def test_a_step_that_only_generates_is_given_up(ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, block = tmp_path / "run", tmp_path / "block"
    (tmp_path / "blocking.py").write_text(BLOCKING.format(block=str(block)), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    grace = ["trainer.stop_grace_s=1"] if ends == "by the grace time" else []
    overrides = (*RL, "environment.env_class=blocking:Blocking", "environment.step_timeout_s=250", *grace)
    running = start_command(folder, *overrides, "trainer.total_steps=500")
    wait_until(lambda: bool(steps_of(folder)), running)
    block.touch()
    time.sleep(4)  # the step that runs comes to its environments
    running.process.send_signal(signal.SIGTERM)
    if not grace:
        time.sleep(1)
        running.process.send_signal(signal.SIGINT)
    status, said = wait_for(running)
    step = steps_of(folder)[-1]
    assert status == 143, said
    assert "giving up the running step" in said
    assert (folder / "checkpoints" / "latest").read_text() == f"step_{step:06d}\n"


@pytest.mark.slow
def test_an_evaluation_ends_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    running = start_command(folder, "generator.sampling.max_generate_length=64", module="skyrl_train.main_generate")
    wait_until(lambda: (folder / "run.log").exists() and "skyrl_train: evaluation" in running.log.read_text(), running)
    running.process.send_signal(signal.SIGHUP)
    status, said = wait_for(running)
    assert status == 129, said
    assert "Traceback" not in said


def test_a_main_thread_that_does_not_answer_is_ended_by_the_second_signal() -> None:
    program = (
        "import ctypes, time\n"
        "from skyrl_train.trainers import stop\n"
        "stop.ANSWER_TIMEOUT_S = 0.2\n"
        "with stop.stop_on_signals():\n"
        "    print('ready', flush=True)\n"
        "    ctypes.CDLL(None).sem_wait(ctypes.create_string_buffer(64))\n"  # starts anew after a signal
        "    while True: ctypes.CDLL(None).sem_wait(ctypes.create_string_buffer(64))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "Traceback" not in said
