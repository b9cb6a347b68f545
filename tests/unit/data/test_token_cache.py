"""A cache entry is whole or absent, never stale, and any number of runs may make it at once."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from skyrl_train.data.sft.token_store import Examples, cached, default_folder

ROWS = [([1, 2, 3], [False, True, True]), ([4], [False]), ([5, 6], [False, True])]


def never() -> Examples:
    raise AssertionError("the entry was there")


def make_rows() -> Examples:
    return iter(ROWS)


def test_an_entry_is_made_once_and_read_back_as_it_was(tmp_path: Path) -> None:
    made = cached(tmp_path, "key", make_rows)
    read = cached(tmp_path, "key", never)
    for store in (made, read):
        assert store.input_ids.tolist() == [1, 2, 3, 4, 5, 6]
        assert store.loss_mask.tolist() == [False, True, True, False, False, True]
        assert store.offsets.tolist() == [0, 3, 4, 6]
        assert (store.input_ids.dtype, store.offsets.dtype) == (np.int32, np.int64)
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_another_key_is_another_entry(tmp_path: Path) -> None:
    cached(tmp_path, "one", make_rows)
    other = cached(tmp_path, "two", lambda: iter([([9], [True])]))
    assert other.input_ids.tolist() == [9]


def test_no_examples_are_an_entry_too(tmp_path: Path) -> None:
    cached(tmp_path, "key", lambda: iter(()))
    assert len(cached(tmp_path, "key", never).lengths) == 0


@pytest.mark.parametrize("name", ["input_ids.bin", "loss_mask.bin", "offsets.bin", "meta.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_a_damaged_entry_is_made_anew(tmp_path: Path, name: str, damage: str) -> None:
    cached(tmp_path, "key", make_rows)
    path = tmp_path / "key" / name
    content = bytearray(path.read_bytes())
    if damage == "delete":
        path.unlink()
    else:
        content[0] ^= 1
        path.write_bytes(content if damage == "flip" else content[:-1])
    assert cached(tmp_path, "key", make_rows).input_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert cached(tmp_path, "key", never).offsets.tolist() == [0, 3, 4, 6]
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_what_fails_half_way_leaves_nothing_behind(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[list[int], list[bool]]]:
        yield ROWS[0]
        raise ValueError("row 2")

    with pytest.raises(ValueError, match="row 2"):
        cached(tmp_path, "key", broken)
    assert list(tmp_path.iterdir()) == []


def test_an_entry_that_is_deleted_while_it_is_used_stays_readable(tmp_path: Path) -> None:
    store = cached(tmp_path, "key", make_rows)
    shutil.rmtree(tmp_path / "key")
    assert store.input_ids.tolist() == [1, 2, 3, 4, 5, 6]


def test_old_leftovers_of_killed_runs_are_taken_away_and_young_ones_are_not(tmp_path: Path) -> None:
    old, young = tmp_path / ".making-a-1", tmp_path / ".making-b-2"
    for folder in (old, young):
        folder.mkdir()
    long_ago = time.time() - 30 * 24 * 3600
    os.utime(old, (long_ago, long_ago))
    cached(tmp_path, "key", make_rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".making-b-2", "key"]


def _make_many(folder: Path, start: float, results: multiprocessing.Queue[list[int]]) -> None:
    def slow_rows() -> Iterator[tuple[list[int], list[bool]]]:
        for row in ROWS:
            time.sleep(0.01)
            yield row

    time.sleep(max(0.0, start - time.time()))
    for number in range(10):
        results.put(cached(folder, f"key{number}", slow_rows).input_ids.tolist())


def test_a_clock_that_is_set_forward_takes_nothing_from_a_run_that_is_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def rows() -> Examples:
        tries.append(1)
        yield ROWS[0]
        with monkeypatch.context() as patched:
            patched.setattr(time, "time", lambda now=time.time: now() + 30 * 24 * 3600.0)
            cached(tmp_path, "another", make_rows)
        yield from ROWS[1:]

    assert cached(tmp_path, "key", rows).input_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert len(tries) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another", "key"]


def test_what_is_removed_while_it_is_made_is_made_again_and_a_missing_source_is_not(tmp_path: Path) -> None:
    tries = []

    def rows() -> Examples:
        tries.append(1)
        if len(tries) == 1:
            for folder in tmp_path.glob(".making-*"):
                shutil.rmtree(folder)
        yield from ROWS

    def from_nowhere() -> Examples:
        tries.append(1)
        yield ([1], [True])
        (tmp_path / "nowhere.jsonl").open()

    assert cached(tmp_path, "key", rows).input_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert len(tries) == 2
    with pytest.raises(FileNotFoundError, match="nowhere"):
        cached(tmp_path, "other", from_nowhere)
    assert len(tries) == 3


def test_runs_that_make_the_same_entries_at_once_all_get_whole_ones(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[list[int]] = context.Queue()
    start = time.time() + 0.3
    processes = [context.Process(target=_make_many, args=(tmp_path, start, results)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in range(40)]
    for process in processes:
        process.join(60)
    assert found == [[1, 2, 3, 4, 5, 6]] * 40
    assert [process.exitcode for process in processes] == [0] * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"key{number}" for number in range(10)]


def _make_for_ever(folder: Path, started: multiprocessing.synchronize.Event) -> None:
    def endless() -> Iterator[tuple[list[int], list[bool]]]:
        while True:
            yield ROWS[0]
            started.set()
            time.sleep(0.01)

    cached(folder, "key", endless)


def test_a_run_that_is_killed_while_it_writes_leaves_no_entry(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    started = context.Event()
    process = context.Process(target=_make_for_ever, args=(tmp_path, started))
    process.start()
    assert started.wait(30)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)
    assert not (tmp_path / "key").exists()
    assert cached(tmp_path, "key", make_rows).offsets.tolist() == [0, 3, 4, 6]


def test_the_folder_is_the_users_cache_unless_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SKYRL_TRAIN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert default_folder() == Path("/x/skyrl_train/tokens")
    monkeypatch.setenv("SKYRL_TRAIN_CACHE", "/y")
    assert default_folder() == Path("/y/tokens")
