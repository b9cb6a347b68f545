"""Threads with deadlines: results in order, errors as they are, a hang by its name."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from skyrl_train.errors import DeadlineError
from skyrl_train.system import in_time, map_in_time
from skyrl_train.system.files import files


def test_results_are_in_order_and_items_run_side_by_side() -> None:
    both_run = threading.Barrier(2)

    def double(value: int) -> int:
        both_run.wait(10.0)
        return 2 * value

    assert map_in_time(double, [1, 2, 3, 4], num_threads=2, what="doubling", timeout_s=10.0) == [2, 4, 6, 8]


def test_an_error_is_raised_as_it_is() -> None:
    with pytest.raises(TimeoutError, match="of the function") as raised:
        in_time(lambda: _raise(TimeoutError("of the function")), what="this", timeout_s=10.0)
    assert not isinstance(raised.value, DeadlineError)


def test_what_hangs_is_named_and_left() -> None:
    ended = threading.Event()
    with pytest.raises(DeadlineError, match=r"the disk of /data did not answer within 0\.1 s\. Is it reachable\?"):
        in_time(lambda: ended.wait(30.0), what="the disk of /data", timeout_s=0.1, remedy="Is it reachable?")
    ended.set()


def test_a_disk_that_does_not_answer_is_an_error_of_the_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.os, "fsync", lambda descriptor: time.sleep(2.0))
    monkeypatch.setattr(files, "DISK_TIMEOUT_S", 0.1)
    with pytest.raises(OSError, match=r"the disk of .*state\.json did not answer within 0\.1 s"):
        files.write_atomically(tmp_path / "state.json", b"{}")


def _raise(error: BaseException) -> None:
    raise error
