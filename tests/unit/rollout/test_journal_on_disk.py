"""Nothing follows from a line of the journal before it is on disk: with a disk that does not answer until it is told to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.rollout.admission import Closed
from skyrl_train.rollout.checked_engine import CheckedEngine
from skyrl_train.rollout.journal import Journal
from skyrl_train.types import GenerationRequest, SamplingParams
from tests.support.fakes import FakeEngine, make_prompts
from tests.support.fakes_trainer import make_trajectory

REQUEST = GenerationRequest(
    request_id="stream-0-000000-0000-000", prompt_token_ids=(1, 2), sampling=SamplingParams(), seed=3
)


def answered(journal: Journal) -> Coroutine[Any, Any, object]:
    return CheckedEngine(FakeEngine(lambda _: [3, 4]), vocabulary_size=9, journal=journal).generate(REQUEST)


def finished(journal: Journal) -> Coroutine[Any, Any, object]:
    return journal.keep_group(0, make_prompts(1)[0], (make_trajectory(),))


def closed(journal: Journal) -> Coroutine[Any, Any, object]:
    return journal.keep_batch(0, Closed(ordinals=(0,), dropped={}))


@pytest.mark.parametrize("follows", [answered, finished, closed])
def test_what_follows_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, follows: Any) -> None:
    disk, written = threading.Event(), []

    def slow_disk(*_: Any) -> None:
        assert disk.wait(5.0)
        written.append(path.read_bytes().count(b"\n"))

    path = tmp_path / "journal.jsonl"
    journal = Journal(path, prompts="p")
    monkeypatch.setattr("skyrl_train.system.files.append_log.bring_to_disk", slow_disk)

    async def run() -> bool:
        task = asyncio.ensure_future(follows(journal))
        await asyncio.wait([task], timeout=0.1)
        is_early = task.done()
        disk.set()
        await task
        return is_early

    assert not asyncio.run(run())
    assert written[-1] == 2, "the line is in the file that is brought to disk, behind the first"
    journal.close()
