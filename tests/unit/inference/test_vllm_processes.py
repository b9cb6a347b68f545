"""An engine's processes, over real ones that are not vLLM's. What becomes of them when their owner is killed:
`tests/reliability/test_process_hosts.py`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_train.inference.vllm.processes import EngineProcesses

SLEEP = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"]


def wait_until(holds: Callable[[], bool], *, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


def test_closing_ends_what_was_started_inside_and_nothing_else() -> None:
    processes = EngineProcesses()
    with processes.starting({}):
        inside = subprocess.Popen(SLEEP)
    beside = subprocess.Popen(SLEEP)
    try:
        processes.close()
        assert inside.wait(5) == -signal.SIGKILL
        assert beside.poll() is None
    finally:
        beside.kill()
        beside.wait()


def test_a_stopped_process_is_seen() -> None:
    processes = EngineProcesses()
    try:
        with processes.starting({}):
            child = subprocess.Popen(SLEEP)
            # Until it is another program its environment is this one's, which has no mark.
            assert wait_until(lambda: b"time.sleep" in Path(f"/proc/{child.pid}/cmdline").read_bytes())
        assert not processes.suspended
        os.kill(child.pid, signal.SIGSTOP)
        assert wait_until(lambda: processes.suspended)
        os.kill(child.pid, signal.SIGCONT)
        assert wait_until(lambda: not processes.suspended)
    finally:
        processes.close()
        child.wait(5)


def test_a_death_is_told_with_its_reason() -> None:
    processes, told = EngineProcesses(), list[str]()
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,), name="Core")
    child.start()
    processes.watch([child], told.append)
    child.kill()
    assert wait_until(lambda: bool(told))
    assert told == [f"vLLM's process Core (pid {child.pid}) was killed by signal 9"]
    processes.close()


def test_an_end_that_was_asked_for_is_no_death() -> None:
    processes, told = EngineProcesses(), list[str]()
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    child.start()
    processes.watch([child], told.append)
    processes.expect_end()
    child.kill()
    child.join()
    assert not wait_until(lambda: bool(told), seconds=0.3)
    processes.close()


def test_a_start_that_fails_leaves_no_mark_behind() -> None:
    processes = EngineProcesses()
    with pytest.raises(RuntimeError), processes.starting({}):
        raise RuntimeError
    assert "SKYRL_TRAIN_ENGINE" not in os.environ
    processes.close()


def test_what_was_started_has_no_ear_for_the_signals_of_a_job_and_an_environment_of_its_own() -> None:
    code = "import os, time; print(os.environ['ONLY_THERE'], flush=True); time.sleep(60)"
    processes = EngineProcesses()
    with processes.starting({"ONLY_THERE": "yes"}):
        child = subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert "ONLY_THERE" not in os.environ
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []).isdisjoint({signal.SIGINT, signal.SIGTERM}), (
            "here they count"
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "yes\n"
        for name in (signal.SIGINT, signal.SIGTERM):
            child.send_signal(name)
        time.sleep(0.2)
        assert child.poll() is None
    finally:
        processes.close()
    assert child.wait(5) == -signal.SIGKILL


def test_what_starts_while_the_engine_is_given_up_ends_as_well() -> None:
    processes = EngineProcesses()
    with processes.starting({}):
        processes.close()
        child = subprocess.Popen(SLEEP)
        assert wait_until(lambda: b"time.sleep" in Path(f"/proc/{child.pid}/cmdline").read_bytes())
    assert child.wait(5) == -signal.SIGKILL
