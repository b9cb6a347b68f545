"""A run whose disk is full, or whose folder goes away, says so, goes on where it can, and loses no finished step."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_train.errors import SaveError, SkyrlTrainError
from skyrl_train.system.files import FileSums
from skyrl_train.telemetry import MetricsLog, RunFolder, read_metrics
from skyrl_train.trainers.checkpoints.folder import LATEST
from skyrl_train.trainers.checkpoints.store import CheckpointStore
from skyrl_train.trainers.checkpoints.writer import export_whole
from tests.support.fakes_trainer import FakeLearner, FakeRun, fake_run, make_config, records_without_timings
from tests.support.file_limits import file_size_limit

PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing disturbed; a checkpoint after each of its four steps."""
    folder = tmp_path_factory.mktemp("alone")
    run_in(folder).run()
    return folder


def run_in(folder: Path, *, learner: FakeLearner | None = None, **changes: object) -> FakeRun:
    config = make_config(folder, **{"ckpt_interval": 1, **changes})
    return fake_run(folder, config=config, learner=learner or FakeLearner())


def require_same(folder: Path, alone: Path) -> None:
    assert records_without_timings(folder / "metrics.jsonl") == records_without_timings(alone / "metrics.jsonl")
    assert (folder / "export" / "model.json").read_bytes() == (alone / "export" / "model.json").read_bytes()


class Refused:
    """A learner whose saves fail at the calls that `fails` names, from 1, with half a file written."""

    def __init__(self, learner: FakeLearner, fails: Callable[[int], bool]) -> None:
        self.calls, self._write, self._fails = 0, learner.write_state, fails
        learner.write_state = self.write_state  # type: ignore[method-assign]

    def write_state(self, folder: Path, state: Sequence[float]) -> FileSums:
        self.calls += 1
        sums = self._write(folder, state)
        if self._fails(self.calls):
            (folder / "half").write_bytes(b"x")
            raise OSError(28, "No space left on device")
        return sums


def wait_for(condition: Callable[[], object]) -> None:
    ends = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.005)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("in_background", [True, False])
def test_a_save_that_fails_is_warned_about_and_tried_again_after_the_next_step(
    tmp_path: Path, alone: Path, in_background: bool
) -> None:
    learner = FakeLearner()
    run = run_in(tmp_path, learner=learner, ckpt_interval=2, background_checkpoints=in_background)
    refused = Refused(learner, lambda call: call == 1)

    def on_call(step: int, purpose: str) -> None:
        if step == 3:
            wait_for(lambda: refused.calls and not list((tmp_path / "checkpoints").glob(".tmp-*")))
            time.sleep(0.05)

    run = replace(run, on_call=on_call)
    run.run()
    assert refused.calls == 3  # of step 2, which failed, of step 3 in its place, of step 4
    assert names(tmp_path / "checkpoints") == ["latest", "step_000003", "step_000004"]
    said = run.output.getvalue()
    assert (
        "warning: step 2 could not be written in full (1 of at most trainer.max_failed_saves=3 steps in a row)" in said
    )
    assert "No space left on device" in said
    require_same(tmp_path, alone)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_the_run_ends_after_so_many_failures_with_the_last_weights_exported(tmp_path: Path, most: int) -> None:
    learner = FakeLearner()
    run = run_in(tmp_path, learner=learner, max_failed_saves=most, total_steps=6)
    Refused(learner, lambda call: call > 1)
    # The first failure was in the background, and found out behind the step that followed.
    whose = "The weights of step 3" if most == 1 else "Its weights"
    with pytest.raises(SaveError, match=rf"step {1 + most} could not .*No space left.*{whose} are in .*export"):
        run.run()
    assert names(tmp_path / "checkpoints") == ["latest", "step_000001"]
    assert (tmp_path / "export" / "model.json").read_text() == str(learner.weight)
    assert not (tmp_path / "complete.json").exists()


def test_a_failure_in_between_does_not_count_towards_the_end(tmp_path: Path) -> None:
    learner = FakeLearner()
    run = run_in(tmp_path, learner=learner, max_failed_saves=2, total_steps=6)
    Refused(learner, lambda call: call in (1, 3, 5))
    assert run.run() is not None


def test_the_last_checkpoint_is_owed_and_the_same_command_ends_the_run(tmp_path: Path, alone: Path) -> None:
    learner = FakeLearner()
    run = run_in(tmp_path, learner=learner)
    Refused(learner, lambda call: call == 4)
    with pytest.raises(SaveError, match=r"step 4 could not be written in full"):
        run.run()
    assert names(tmp_path / "checkpoints") == ["latest", "step_000002", "step_000003"]
    run_in(tmp_path).run()
    require_same(tmp_path, alone)


def test_a_signal_whose_checkpoint_cannot_be_written_does_not_claim_one(tmp_path: Path) -> None:
    learner = FakeLearner()

    def on_call(step: int, purpose: str) -> None:
        if (step, purpose) == (2, "train"):
            signal.raise_signal(signal.SIGTERM)

    run = replace(run_in(tmp_path, learner=learner), on_call=on_call)
    Refused(learner, lambda call: call == 2)
    with pytest.raises(SaveError, match=r"step 2 could not be written"):
        run.run()


def test_a_bug_in_a_learner_is_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    learner = FakeLearner()
    run = run_in(tmp_path, learner=learner)

    def broken(folder: Path, state: Sequence[float]) -> FileSums:
        raise ZeroDivisionError

    learner.write_state = broken  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        run.run()


def test_an_export_that_fails_before_its_first_file_says_why(tmp_path: Path) -> None:
    learner = FakeLearner()

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    learner.export_hf = full  # type: ignore[method-assign]
    with pytest.raises(SaveError, match=r"could not be exported: .*No space left on device"):
        export_whole(learner, tmp_path / "export")


def test_an_export_whose_place_is_taken_by_a_file_is_refused_as_one_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "export").touch()
    with pytest.raises(SaveError, match=r"export: the model could not be exported: .*Not a directory"):
        export_whole(FakeLearner(), tmp_path / "export")


def test_a_line_of_the_record_that_did_not_fit_is_written_later_and_whole(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.log({"a": 1.0}, step=1)
    with file_size_limit(30), pytest.raises(OSError, match="File too large"):
        log.log({"a": 2.0}, step=2)
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1]
    assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"}\n")
    log.log({"a": 3.0}, step=3)
    assert [record["a"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1.0, 2.0, 3.0]
    log.flush()


@contextmanager
def disk_of(folder: Path, num_pages: int) -> Iterator[Callable[[int], None]]:
    """A real file system of so many pages in `folder`; yields what changes its size."""

    def mount(*options: str) -> None:
        command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "skyrl-test", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode:
            pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")

    folder.mkdir()
    mount(f"size={num_pages * PAGE}")
    try:
        yield lambda pages: mount("remount", f"size={pages * PAGE}")
    finally:
        subprocess.run(["umount", "-l", str(folder)], timeout=30, check=True)


@pytest.mark.parametrize("num_pages", [1, 2, 3, 5, 7, 9, 11, 13, 16, 20, 24, 40])
def test_a_disk_of_any_size_loses_nothing_that_was_finished(tmp_path: Path, alone: Path, num_pages: int) -> None:
    with disk_of(tmp_path / "disk", num_pages) as resize:
        folder = tmp_path / "disk" / "run"
        said = ""
        try:
            run_in(folder).run()
        except SkyrlTrainError as error:
            said = str(error)
        assert not said or "No space left on device" in said
        if (folder / "checkpoints").is_dir():
            assert not list((folder / "checkpoints").glob(".tmp-*"))
        resize(4096)
        run_in(folder).run()
        require_same(folder, alone)
        assert not [path.name for path in folder.iterdir() if path.name.endswith(".tmp")]


def lose(folder: Path) -> None:
    shutil.rmtree(folder)


def lose_and_make_anew(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def move_away(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("disturb", [lose, lose_and_make_anew, move_away, empty])
@pytest.mark.parametrize("step", [1, 3, 4])
def test_a_folder_that_goes_away_ends_the_run_which_can_be_continued(
    tmp_path: Path, alone: Path, disturb: Callable[[Path], None], step: int
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()

    def is_saved() -> bool:
        latest = folder / "checkpoints" / LATEST
        return step == 1 or (latest.is_file() and latest.read_text() == f"step_00000{step - 1}\n")

    def on_call(current: int, purpose: str) -> None:
        if (current, purpose) == (step, "train"):
            wait_for(is_saved)
            time.sleep(0.05)
            disturb(folder)

    learner = FakeLearner()
    run = replace(run_in(folder, learner=learner), on_call=on_call)
    with pytest.raises(SaveError) as error:
        run.run()
    saved = tmp_path / "run-rescued-1" / "checkpoints" / f"step_00000{step}"
    assert f"output_dir={folder} was deleted or replaced" in str(error.value)
    assert f"trainer.resume_mode=from_path trainer.resume_path={saved}" in str(error.value)
    assert (tmp_path / "run-rescued-1" / "export" / "model.json").read_text() == str(learner.weight)
    shutil.rmtree(folder, ignore_errors=True)
    run_in(folder, resume_mode="from_path", resume_path=str(saved)).run()
    assert (folder / "export" / "model.json").read_bytes() == (alone / "export" / "model.json").read_bytes()


def test_a_folder_of_that_name_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run-rescued-1").mkdir()
    folder = tmp_path / "run"
    folder.mkdir()
    run = replace(run_in(folder), on_call=lambda step, purpose: lose(folder) if purpose == "train" else None)
    with pytest.raises(SaveError, match=r"run-rescued-2"):
        run.run()
    assert names(tmp_path / "run-rescued-1") == []


def checkpoints_of_steps(root: Path, *steps: int) -> CheckpointStore:
    store = CheckpointStore(root, keep=len(steps))
    source = run_in(root.parent / "source", total_steps=max(steps), max_ckpts_to_keep=9)
    source.run()
    root.mkdir()
    for step in steps:
        shutil.copytree(source.folder.checkpoints / f"step_00000{step}", root / f"step_00000{step}")
    (root / LATEST).write_text(f"step_00000{max(steps)}\n")
    return store


def test_what_a_killed_run_had_no_time_to_remove_is_removed_by_the_next(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    checkpoints_of_steps(root, 1, 2, 3, 4)
    (root / "step_000001").rename(root / ".tmp-remove-step_000001")
    CheckpointStore(root, keep=2).tidy()
    assert names(root) == ["latest", "step_000003", "step_000004"]


def test_the_checkpoint_that_a_run_goes_on_from_stays_where_newer_ones_are_damaged(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    checkpoints_of_steps(root, 1, 2, 3)
    damaged = root / "step_000003" / "policy" / "learner.json"
    damaged.write_text(damaged.read_text()[::-1])
    store = CheckpointStore(root, keep=1)
    newest = store.latest()
    assert newest == root / "step_000002"
    store.tidy(newest)
    assert names(root) == ["latest", "step_000002", "step_000003"]


class Killed(BaseException):
    """Stands for kill -9: nothing of ours may catch it."""


def killed_in(step: int) -> Callable[[int, str], None]:
    def on_call(current: int, purpose: str) -> None:
        if (current, purpose) == (step, "train"):
            raise Killed

    return on_call


def test_restarts_before_the_first_checkpoint_leave_no_folders_behind(tmp_path: Path, alone: Path) -> None:
    for _ in range(3):
        with pytest.raises(Killed):
            replace(run_in(tmp_path, ckpt_interval=0), on_call=killed_in(3)).run()
        assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3
    run_in(tmp_path, ckpt_interval=0).run()
    assert not list(tmp_path.glob("previous-*"))
    require_same(tmp_path, alone)


def test_another_run_that_left_no_checkpoint_is_set_aside(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        replace(run_in(tmp_path), on_call=killed_in(1)).run()
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    run_in(tmp_path).run()
    assert [record["step"] for record in read_metrics(tmp_path / "previous-1" / "metrics.jsonl")] == [0]
    assert RunFolder(tmp_path / "previous-1").config_file.read_text() == "seed: 1\n"
