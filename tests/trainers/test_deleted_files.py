"""Files that somebody deletes while their run goes on: it says what is lost, or ends with one line, and can be resumed."""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.errors import SaveError, SkyrlTrainError
from skyrl_train.trainers.checkpoints.folder import read_manifest, write_checkpoint
from tests.support.fakes_trainer import FakeRun, fake_run, make_config, records_without_timings

STEPS = 6
CHANGES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.listdir", "os.scandir")
"""File operations as Python's audit hooks name them."""


def run_in(folder: Path, **changes: Any) -> FakeRun:
    return fake_run(folder, config=make_config(folder, **{"ckpt_interval": 2, "total_steps": STEPS, **changes}))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    run_in(folder).run()
    return folder


def exported(folder: Path) -> bytes:
    return (folder / "export" / "model.json").read_bytes()


def delete(folder: Path, pattern: str) -> None:
    for path in [folder] if pattern == "." else sorted(folder.glob(pattern)):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("metrics.jsonl", "metrics.jsonl was deleted or cut"),
        ("evaluation.json", "evaluation.json was deleted or cut"),
        ("rollouts", "rollouts was deleted or cut"),
        ("run.log", "run.log was deleted or cut"),
        ("checkpoints", "step_000002, the last checkpoint, was deleted: another is written now"),
        ("checkpoints/step_000002", "step_000002, the last checkpoint, was deleted: another is written now"),
        ("rollouts/train_step_000001.parquet", ""),
        ("plan.json", ""),
    ],
)
def test_a_run_says_what_of_it_was_deleted_and_goes_on(tmp_path: Path, alone: Path, pattern: str, told: str) -> None:
    (tmp_path / "run.log").write_text("what was shown\n")

    def on_call(step: int, purpose: str) -> None:
        if (step, purpose) == (3, "train"):
            delete(tmp_path, pattern)

    run = replace(run_in(tmp_path, background_checkpoints=False, max_ckpts_to_keep=9), on_call=on_call)
    run.run()
    said = [line for line in run.output.getvalue().splitlines() if "deleted" in line]
    assert len(said) == bool(told), said
    assert all(told in line for line in said)
    assert (tmp_path / "checkpoints" / "step_000003").exists() == pattern.startswith("checkpoints")
    records = records_without_timings(tmp_path / "metrics.jsonl")
    expected = records_without_timings(alone / "metrics.jsonl")
    assert records == (expected[3:] if pattern == "metrics.jsonl" else expected)
    assert exported(tmp_path) == exported(alone)


class Deleting:
    """Deletes something of a folder just before an operation on it, whichever thread does that."""

    def __init__(self) -> None:
        self._waits: Callable[[], None] | None = None
        sys.addaudithook(self._hear)  # which stays as long as the process

    def before(self, folder: Path, number: int, patterns: tuple[str, ...]) -> None:
        """From now on: before the operation of this number, from 1."""
        left = iter(range(number - 1, -1, -1))

        def count() -> None:
            if next(left, 1) == 0:
                for pattern in patterns:
                    delete(folder, pattern)

        self._folder, self._waits = os.fsencode(folder), count

    def stop(self) -> None:
        self._waits = None

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        waits = self._waits
        if waits is None or event not in CHANGES or not isinstance(arguments[0], (str, bytes, os.PathLike)):
            return
        if os.fsencode(arguments[0]).startswith(self._folder):
            self._waits = None  # what is deleted here is not counted
            waits()
            self._waits = waits


@pytest.fixture(scope="module")
def deleting() -> Iterator[Deleting]:
    found = Deleting()
    yield found
    found.stop()


PATTERNS = (
    *("metrics.jsonl", "rollouts", "rollouts/*", "checkpoints", "checkpoints/*", "checkpoints/*/policy"),
    *("config.yaml", "evaluation.json", "timeline.jsonl", ".lock", "*", "."),
)
MOST = 260
"""File operations of a run, about."""


@pytest.mark.parametrize("pattern", [".", "step_000002"])
def test_whatever_is_deleted_while_a_checkpoint_is_written_it_is_there_or_could_not_be_written(
    tmp_path: Path, deleting: Deleting, pattern: str
) -> None:
    def write(folder: Path) -> None:
        (folder / "weights").write_text("1")

    for number in range(8, 32):
        root = tmp_path / f"{number}"
        write_checkpoint(root, 1, write, keep=1)
        deleting.before(root, number, (pattern,))
        with suppress(SaveError):
            write_checkpoint(root, 2, write, keep=1)
        deleting.stop()
        assert read_manifest(write_checkpoint(root, 3, write, keep=1))


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, 400, 50))
def test_whatever_is_deleted_before_any_file_operation_the_same_command_ends_the_run_as_it_should(
    tmp_path: Path, alone: Path, deleting: Deleting, first: int
) -> None:
    """An error on the way is one of the project's; nothing else is raised."""
    for number in range(first, first + 50):
        draw = random.Random(number)
        folder, patterns, moment = tmp_path / f"{number}" / "run", draw.sample(PATTERNS, 1), draw.randint(1, MOST)
        deleting.before(folder, moment, tuple(patterns))
        for _ in range(3):
            try:
                run_in(folder, background_checkpoints=draw.random() < 0.5).run()
                break
            except SkyrlTrainError:
                continue
            finally:
                deleting.stop()
        case = f"case {number}: {patterns} before operation {moment}"
        assert exported(folder) == exported(alone), case
        shutil.rmtree(folder.parent)
