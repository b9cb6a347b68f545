"""Checkpoints are written beside the steps: as of their own step, one at a time, and never taken for whole too early."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_train.errors import NonFiniteError, SaveError, StopRequested
from skyrl_train.system.files import FileSums
from skyrl_train.telemetry import read_metrics
from skyrl_train.trainers.checkpoints.folder import (
    LATEST,
    MANIFEST,
    latest_checkpoint,
    oldest_step,
    verify,
    write_checkpoint,
)
from tests.support.fakes_trainer import (
    FakeLearner,
    FakeRun,
    fake_run,
    make_config,
    records_without_timings,
    send_signal_at,
)
from tests.support.stores import empty_bucket

URL = "lab://bucket/run"
WAIT_S = 20.0


def run_in(folder: Path, *, learner: FakeLearner | None = None, **trainer: object) -> FakeRun:
    return fake_run(folder, config=make_config(folder, **trainer), learner=learner or FakeLearner())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose checkpoints the loop waited for, one after each of four steps."""
    folder = tmp_path_factory.mktemp("alone")
    run_in(folder, ckpt_interval=1, max_ckpts_to_keep=9, background_checkpoints=False).run()
    return folder


def require_same(folder: Path, alone: Path) -> None:
    assert records_without_timings(folder / "metrics.jsonl") == records_without_timings(alone / "metrics.jsonl")
    assert (folder / "export" / "model.json").read_bytes() == (alone / "export" / "model.json").read_bytes()
    for checkpoint in (folder / "checkpoints").glob("step_*"):
        verify(checkpoint)
        for name in ("policy/learner.json",):
            expected = alone / "checkpoints" / checkpoint.name / name
            assert (checkpoint / name).read_bytes() == expected.read_bytes()


class Written:
    """Does something on the thread that writes a learner's state, before it is written."""

    def __init__(self, learner: FakeLearner, before: Callable[[int], None]) -> None:
        """`before` is told the number of the write, from 1."""
        self.threads: list[str] = []
        self._write, self._before = learner.write_state, before
        learner.write_state = self.write_state  # type: ignore[method-assign]

    def write_state(self, folder: Path, state: Sequence[float]) -> FileSums:
        self.threads.append(threading.current_thread().name)
        self._before(len(self.threads))
        return self._write(folder, state)


def test_steps_go_on_while_a_checkpoint_is_written_which_is_of_its_own_step(tmp_path: Path, alone: Path) -> None:
    learner, third_step = FakeLearner(), threading.Event()
    in_time: list[bool] = []
    written = Written(learner, lambda number: in_time.append(number > 1 or third_step.wait(WAIT_S)))
    run = replace(
        run_in(tmp_path, learner=learner, ckpt_interval=2),
        on_call=lambda step, purpose: third_step.set() if (step, purpose) == (3, "train") else None,
    )
    run.run()
    assert in_time == [True, True]
    assert written.threads == ["checkpoint", "MainThread"]  # nothing follows the last step
    require_same(tmp_path, alone)


@pytest.mark.parametrize("in_background", [True, False])
def test_the_times_of_a_checkpoint_say_who_waited(tmp_path: Path, alone: Path, in_background: bool) -> None:
    learner = FakeLearner()
    Written(learner, lambda _: time.sleep(0.2))
    run_in(tmp_path, learner=learner, ckpt_interval=1, background_checkpoints=in_background).run()
    require_same(tmp_path, alone)
    second, third, fourth = read_metrics(tmp_path / "metrics.jsonl")[2:]
    if in_background:  # each record has what was learnt behind the step before
        assert second["timing/checkpoint"] < 0.15
        assert fourth["timing/wait/checkpoint"] > 0.05
        assert fourth["timing/checkpoint"] >= fourth["timing/wait/checkpoint"]
        assert third["timing/background/checkpoint"] > 0.2
    else:
        assert second["timing/checkpoint"] > 0.2
        assert not any(name.startswith(("timing/background", "timing/wait/checkpoint")) for name in second | fourth)


def test_of_two_checkpoints_in_a_row_one_is_written_at_a_time(tmp_path: Path, alone: Path) -> None:
    learner, at_work = FakeLearner(), threading.Semaphore(1)
    alone_at_work: list[bool] = []

    def before(_: int) -> None:
        alone_at_work.append(at_work.acquire(blocking=False))
        time.sleep(0.05)
        at_work.release()

    Written(learner, before)
    run_in(tmp_path, learner=learner, ckpt_interval=1, max_ckpts_to_keep=4).run()
    assert alone_at_work == [True] * 4
    assert len(list((tmp_path / "checkpoints").glob("step_*"))) == 4
    require_same(tmp_path, alone)


def kill_in_write(folder: Path, number: int, half: bool) -> None:
    learner = FakeLearner()

    def before(current: int) -> None:
        if current == number:
            if half:
                (temporary,) = (folder / "checkpoints").glob(".tmp-*")
                (temporary / "policy").mkdir()
                (temporary / "policy" / "learner.json").write_bytes(b"[0.")
            os.kill(os.getpid(), signal.SIGKILL)

    Written(learner, before)
    run_in(folder, learner=learner, ckpt_interval=1).run()


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("number", [1, 3])
def test_a_kill_during_a_write_leaves_the_checkpoint_before(
    tmp_path: Path, alone: Path, number: int, half: bool
) -> None:
    process = multiprocessing.get_context("fork").Process(target=kill_in_write, args=(tmp_path, number, half))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    found = latest_checkpoint(tmp_path / "checkpoints")
    assert (found and found.name) == (None if number == 1 else f"step_00000{number - 1}")
    run_in(tmp_path, ckpt_interval=1).run()
    require_same(tmp_path, alone)


def test_a_signal_ends_the_run_with_both_checkpoints_written(tmp_path: Path, alone: Path) -> None:
    learner = FakeLearner()
    Written(learner, lambda _: time.sleep(0.1))
    run = replace(run_in(tmp_path, learner=learner, ckpt_interval=1), on_call=send_signal_at(2))
    with pytest.raises(StopRequested):
        run.run()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "latest",
        "step_000001",
        "step_000002",
    ]
    run_in(tmp_path, ckpt_interval=1).run()
    require_same(tmp_path, alone)


def test_an_error_of_a_step_waits_for_the_checkpoint_and_names_it(tmp_path: Path) -> None:
    learner = FakeLearner(fail_at=5)  # two optimizer steps a training step
    Written(learner, lambda _: time.sleep(0.3))
    with pytest.raises(NonFiniteError, match=r"The last checkpoint is .*step_000002; it was not touched"):
        run_in(tmp_path, learner=learner, ckpt_interval=2).run()
    verify(tmp_path / "checkpoints" / "step_000002")


def test_an_error_of_a_step_is_told_although_the_checkpoint_before_failed(tmp_path: Path) -> None:
    learner = FakeLearner(fail_at=5)

    def full(_: int) -> None:
        time.sleep(0.3)
        raise OSError(28, "No space left on device")

    Written(learner, full)
    run = run_in(tmp_path, learner=learner, ckpt_interval=2)
    with pytest.raises(NonFiniteError, match=r"There is no checkpoint"):
        run.run()
    assert "warning: the checkpoint of step 2 could not be written: " in run.output.getvalue()


def test_a_store_that_takes_nothing_ends_the_run_behind_the_next_step(tmp_path: Path) -> None:
    learner = FakeLearner()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    Written(learner, full)
    run = run_in(tmp_path, learner=learner, ckpt_interval=1, total_steps=6, max_failed_saves=2)
    with pytest.raises(SaveError, match=r"^step 2 could not be written .*No space left"):
        run.run()
    assert "step 1 could not be written in full (1 of at most trainer.max_failed_saves=2" in run.output.getvalue()


def test_at_a_url_the_record_is_that_of_the_checkpoints_step(tmp_path: Path) -> None:
    learner, third_step = FakeLearner(), threading.Event()
    Written(learner, lambda number: number > 1 or third_step.wait(WAIT_S))
    with empty_bucket():
        run = replace(
            run_in(tmp_path, learner=learner, ckpt_interval=2, checkpoint_url=URL, checkpoint_timeout_s=WAIT_S),
            on_call=lambda step, purpose: third_step.set() if (step, purpose) == (4, "train") else None,
        )
        run.run()
    history = tmp_path / "checkpoints" / "step_000002" / "history" / "metrics.jsonl"
    assert [json.loads(line)["step"] for line in history.read_text().splitlines()][-1] == 2


def test_a_checkpoint_that_is_not_sealed_is_not_the_oldest_one(tmp_path: Path) -> None:
    root, seen = tmp_path / "checkpoints", []

    def write(folder: Path) -> None:
        (folder / "file").write_text("x")
        seen.append(oldest_step(root))

    write_checkpoint(root, 3, write, keep=1)
    seen.append(oldest_step(root))
    write_checkpoint(root, 5, write, keep=1)
    seen.append(oldest_step(root))
    assert seen == [None, 3, 3, 5]
    (root / LATEST).unlink()  # as between the name of the first one and this
    assert oldest_step(root) is None


def test_what_a_writer_has_hashed_is_not_read_again_but_has_its_size(tmp_path: Path) -> None:
    def write(folder: Path) -> FileSums:
        (folder / "file").write_text("abc")
        return {"file": (3, "0" * 64)}

    path = write_checkpoint(tmp_path, 1, write, keep=1)
    assert json.loads((path / MANIFEST).read_text())["files"]["file"]["sha256"] == "0" * 64

    def write_less(folder: Path) -> FileSums:
        (folder / "file").write_text("ab")
        return {"file": (3, "0" * 64)}

    with pytest.raises(
        SaveError, match=r"file has 2 bytes where 3 were written. Is the folder on a file system that all"
    ):
        write_checkpoint(tmp_path, 2, write_less, keep=1)
    with pytest.raises(SaveError, match=r"No such file"):
        write_checkpoint(tmp_path, 2, lambda folder: {"file": (3, "0" * 64)}, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000001"]
