"""Checkpoints are whole or absent, whatever happens to the process or to the files."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_train.errors import CheckpointError
from skyrl_train.trainers.checkpoints.folder import (
    LATEST,
    MANIFEST,
    clean_leftovers,
    latest_checkpoint,
    oldest_step,
    verify,
    write_checkpoint,
)


def writing(content: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "policy").mkdir()
        (folder / "policy" / "model.safetensors").write_text(content)
        (folder / "trainer.json").write_text("{}")

    return write


def content_of(folder: Path | None) -> str:
    assert folder is not None
    return (folder / "policy" / "model.safetensors").read_text()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Checkpoints of steps 1, 2 and 3, whose contents are `one`, `two` and `three`."""
    folder = tmp_path / "checkpoints"
    for step, content in enumerate(("one", "two", "three"), start=1):
        write_checkpoint(folder, step, writing(content), keep=3)
    return folder


def names(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir())


def test_a_checkpoint_is_a_folder_with_a_manifest_and_latest_names_it(tmp_path: Path) -> None:
    root = tmp_path / "new" / "checkpoints"
    folder = write_checkpoint(root, 10, writing("abc"), keep=2)
    assert folder == root / "step_000010"
    assert (root / LATEST).read_text() == "step_000010\n"
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["files"]["policy/model.safetensors"] == {
        "bytes": 3,
        "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    }
    assert sorted(manifest["files"]) == ["policy/model.safetensors", "trainer.json"]
    assert names(root) == ["latest", "step_000010"]
    verify(folder)


def test_the_last_k_are_kept(root: Path) -> None:
    write_checkpoint(root, 4, writing("four"), keep=2)
    assert names(root) == ["latest", "step_000003", "step_000004"]


def test_the_oldest_one_is_that_of_the_least_step_whole_or_not(root: Path) -> None:
    (root / "step_000001").rename(root / ".tmp-remove-step_000001")
    assert oldest_step(root) == 2
    (root / "step_000002").rename(root / ".tmp-replaced-step_000002")
    (root / "step_000003" / MANIFEST).unlink()
    assert oldest_step(root) == 2
    assert oldest_step(root / "nowhere") is None


def test_a_damaged_checkpoint_does_not_count_among_those_kept(root: Path) -> None:
    (root / "step_000003" / MANIFEST).unlink()
    write_checkpoint(root, 4, writing("four"), keep=2)
    assert names(root) == ["latest", "step_000002", "step_000003", "step_000004"]


def test_writing_a_step_again_replaces_it(root: Path) -> None:
    write_checkpoint(root, 3, writing("again"), keep=3)
    assert content_of(latest_checkpoint(root)) == "again"
    assert names(root) == ["latest", "step_000001", "step_000002", "step_000003"]


def test_no_checkpoint_at_all_is_none(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "missing") is None
    assert latest_checkpoint(tmp_path) is None


def truncate(folder: Path) -> None:
    (folder / "policy" / "model.safetensors").write_text("th")


def flip_a_byte(folder: Path) -> None:
    (folder / "policy" / "model.safetensors").write_text("thref")


def delete_a_file(folder: Path) -> None:
    (folder / "trainer.json").unlink()


def add_a_file(folder: Path) -> None:
    (folder / "policy" / "extra.bin").write_text("?")


def delete_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def cut_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text((folder / MANIFEST).read_text()[:40])


def list_as_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text("[]")


def escape_the_folder(folder: Path) -> None:
    (folder / MANIFEST).write_text('{"format": 1, "files": {"../../secret": {"bytes": 1, "sha256": ""}}}')


def future_format(folder: Path) -> None:
    (folder / MANIFEST).write_text('{"format": 2, "files": {}}')


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "policy/model.safetensors has 2 bytes; manifest.json states 5"),
        (flip_a_byte, "policy/model.safetensors does not have the SHA-256 sum"),
        (delete_a_file, "'trainer.json', which manifest.json states, is missing"),
        (add_a_file, "policy/extra.bin is not in manifest.json"),
        (delete_the_manifest, "no manifest.json"),
        (cut_the_manifest, "manifest.json cannot be read"),
        (list_as_manifest, "manifest.json cannot be read"),
        (escape_the_folder, "outside the checkpoint"),
        (future_format, "manifest.json is of format 2; this version reads format 1"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_with_its_reason(
    root: Path, damage: Callable[[Path], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage(root / "step_000003")
    with pytest.raises(CheckpointError, match=reason.replace("(", r"\(")):
        verify(root / "step_000003")
    assert content_of(latest_checkpoint(root)) == "two"
    assert "step_000003" in caplog.text
    assert reason in caplog.text


@pytest.mark.parametrize("text", ["step_000099\n", "../elsewhere\n", "", "\x00\xff"])
def test_latest_that_points_nowhere_falls_back_to_the_newest(
    root: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (root / LATEST).write_text(text)
    assert content_of(latest_checkpoint(root)) == "three"
    assert "which is not there" in caplog.text


def test_without_latest_the_newest_is_taken(root: Path) -> None:
    (root / LATEST).unlink()
    assert content_of(latest_checkpoint(root)) == "three"


def test_where_none_is_whole_the_run_does_not_silently_start_anew(root: Path) -> None:
    for folder in root.glob("step_*"):
        truncate(folder)
    with pytest.raises(CheckpointError, match=r"trainer.resume_mode=none") as error:
        latest_checkpoint(root)
    assert all(f"step_00000{step}" in str(error.value) for step in (1, 2, 3))


def test_a_run_that_was_rewound_follows_its_own_branch(root: Path) -> None:
    (root / LATEST).write_text("step_000001\n")
    write_checkpoint(root, 2, writing("new two"), keep=2)
    assert content_of(latest_checkpoint(root)) == "new two"
    assert names(root) == ["latest", "step_000001", "step_000002"]


def test_a_full_disk_leaves_what_was_there(root: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "model").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"No space left on device"):
        write_checkpoint(root, 4, fail, keep=1)
    assert content_of(latest_checkpoint(root)) == "three"
    write_checkpoint(root, 4, writing("four"), keep=3)
    assert names(root) == ["latest", "step_000002", "step_000003", "step_000004"]


def test_a_reader_leaves_a_write_in_progress_alone(root: Path) -> None:
    (root / ".tmp-step_000004").mkdir()
    latest_checkpoint(root)
    assert (root / ".tmp-step_000004").is_dir()
    clean_leftovers(root)
    assert names(root) == ["latest", "step_000001", "step_000002", "step_000003"]


def write_and_die(root: Path, step: int, content: str, kill_at: int) -> None:
    """Runs in a process of its own, which kills itself just before the `kill_at`-th call that changes the disk."""
    moments = itertools.count(1)

    def moment() -> None:
        if next(moments) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def after_a_moment(function: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **kwargs: object) -> object:
            moment()
            return function(*args, **kwargs)

        return wrapped

    for name in ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink"):
        setattr(os, name, after_a_moment(getattr(os, name)))

    def write(folder: Path) -> None:
        (folder / "policy").mkdir()
        with (folder / "policy" / "model.safetensors").open("w") as file:
            file.write(content[:2])
            file.flush()
            moment()
            file.write(content[2:])
        moment()
        (folder / "trainer.json").write_text("{}")

    write_checkpoint(root, step, write, keep=1)


@pytest.mark.parametrize(
    "step", [pytest.param(3, marks=pytest.mark.slow), 4], ids=["the same step again", "the next step"]
)
def test_a_writer_killed_at_any_moment_leaves_the_old_or_the_new(tmp_path: Path, step: int) -> None:
    context = multiprocessing.get_context("fork")
    seen = set()
    for kill_at in range(1, 100):
        root = tmp_path / str(kill_at)
        write_checkpoint(root, 3, writing("old state"), keep=1)
        writer = context.Process(target=write_and_die, args=(root, step, "new state", kill_at))
        writer.start()
        writer.join(timeout=60)
        seen.add(content_of(latest_checkpoint(root)))
        write_checkpoint(root, 5, writing("later"), keep=1)
        assert names(root) == ["latest", "step_000005"]
        if writer.exitcode == 0:
            break
        assert writer.exitcode == -signal.SIGKILL
    assert writer.exitcode == 0
    assert kill_at > 12
    assert seen == {"old state", "new state"}


def test_a_relative_root_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_checkpoint(Path("ckpt"), 1, writing("x"), keep=1)
    assert latest_checkpoint(Path("ckpt")) == Path("ckpt/step_000001")
    assert os.listdir(".") == ["ckpt"]
