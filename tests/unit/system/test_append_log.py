"""Lines that are on disk before anything follows from them."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from skyrl_train.system.files import AppendLog


def test_a_line_whose_waiter_was_cancelled_is_written_and_those_behind_it_are_told(tmp_path: Path) -> None:
    log, held = AppendLog(tmp_path / "log.jsonl", length=0, num_writes=0), threading.Event()
    log._thread.submit(held.wait, 20)
    first, second, third = (log.append({"line": number}) for number in range(3))
    assert first.cancel()
    held.set()
    assert log.read(second.result(timeout=20)) == {"line": 1, "write": 1}
    assert not second.cancel(), "it is done"
    log.close()
    assert [json.loads(line)["line"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [0, 1, 2]
    assert log.read(third.result(timeout=0))["line"] == 2


def test_what_cannot_be_written_fails_all_that_wait_from_then_on(tmp_path: Path) -> None:
    log = AppendLog(tmp_path / "log.jsonl", length=0, num_writes=0)
    assert log.append({"line": 0}).result(timeout=20) == 0
    log._file.close()
    log._file = (tmp_path / "log.jsonl").open("rb")  # type: ignore[assignment]  # which refuses to be written
    refused, behind = log.append({"line": 1}), log.append({"line": 2})
    for each in (refused, behind):
        with pytest.raises(OSError, match="write"):
            each.result(timeout=20)
    assert log.failed is not None
    log.close()


def test_a_log_that_cannot_be_opened_anew_after_it_was_rewritten_tells_all_that_wait(tmp_path: Path) -> None:
    log = AppendLog(tmp_path / "log.jsonl", length=0, num_writes=0)
    log.append({"line": 0}).result(timeout=20)

    class Unopened(type(log.path)):  # type: ignore[misc]
        def open(self, *_: object, **__: object) -> None:
            raise OSError("too many open files")

    log.path = Unopened(log.path)
    log.rewrite({"head": True}, lambda _: True)
    with pytest.raises(OSError, match="too many open files"):
        log.append({"line": 1}).result(timeout=5)
    log.close()
