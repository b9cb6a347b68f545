"""What a journal reads back, and refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.errors import DataError, EngineError, SaveError
from skyrl_train.rollout.admission import Closed, ConsumedPrompts
from skyrl_train.rollout.journal import Journal
from skyrl_train.rollout.loop_thread import LoopThread
from skyrl_train.types import GenerationOutput, GenerationRequest, SamplingParams
from tests.support.fakes import (
    make_output,
    make_prompts,
)
from tests.support.fakes_trainer import make_trajectory
from tests.support.file_limits import file_size_limit
from tests.support.journal_cases import BATCH, SAMPLES, STEPS, VersionedEngine, run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return run(tmp_path_factory.mktemp("whole") / "journal.jsonl").content


def test_everything_is_in_the_journal_before_it_is_used(whole: bytes) -> None:
    lines = [json.loads(line) for line in whole.splitlines()]
    place: dict[str, int] = {}
    for index, line in enumerate(lines):
        kind = next(iter(line))
        place[f"{kind} {line[kind]}"] = index
    assert lines[0] == {"prompts": "p", "from": 0, "write": 1}
    # Of each sample two turns, and five answers of its environment: construction, first messages, two steps, metrics.
    assert len(lines) == 1 + BATCH * STEPS * (2 + (2 + 5) * SAMPLES) + STEPS
    for version in range(STEPS):
        batch = lines[place[f"batch {version}"]]
        for ordinal in batch["groups"]:
            group = place[f"group {ordinal}"]
            turns = [index for name, index in place.items() if name.startswith(f"turn stream-{ordinal}-")]
            assert place[f"start {ordinal}"] < min(turns) <= max(turns) < group < place[f"batch {version}"]


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread("test")
    yield thread
    thread.close()


def request(**changes: Any) -> GenerationRequest:
    first = GenerationRequest(
        request_id="stream-0-000000-0000-000", prompt_token_ids=(1, 2), sampling=SamplingParams(), seed=3
    )
    return replace(first, **changes)


def keep(journal: Journal, loop: LoopThread, output: GenerationOutput) -> None:
    loop.run(journal.keep_turn(request(), output))


def test_an_answer_is_read_back_for_the_same_request_alone(tmp_path: Path, loop: LoopThread) -> None:
    output = make_output([3, 4], logprobs=(-0.1, -1e-9), weight_version=2)
    journal = Journal(tmp_path / "journal.jsonl", prompts="p")
    keep(journal, loop, output)
    journal.close()
    again = Journal(tmp_path / "journal.jsonl", prompts="p")
    assert again.turn(request()) == output
    others: list[dict[str, Any]] = [
        {"prompt_token_ids": (1, 3)},
        {"seed": 4},
        {"request_id": "stream-0-000000-0001-000"},
    ]
    assert [again.turn(request(**changes)) for changes in others] == [None, None, None]
    again.close()


def test_a_group_and_a_batch_are_read_back(tmp_path: Path, loop: LoopThread) -> None:
    journal = Journal(tmp_path / "journal.jsonl", prompts="p")
    prompt, trajectory, closed = make_prompts(1)[0], make_trajectory(), Closed(ordinals=(0, 2), dropped={1: "stale"})
    journal.begin(0, 5)
    loop.run(journal.keep_group(0, prompt, (trajectory,)))
    loop.run(journal.keep_batch(5, closed))
    journal.close()
    journal.close()
    again = Journal(tmp_path / "journal.jsonl", prompts="p")
    assert again.group(0) == (trajectory,)
    assert (again.started, again.batches) == ({0: 5}, {5: closed})
    again.resume(5, ConsumedPrompts(watermark=1))
    assert (again.group(0), again.started) == (None, {})
    again.close()


def without_writes(content: bytes) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in json.loads(line).items() if name != "write"} for line in content.splitlines()
    ]


def test_a_line_that_is_cut_short_is_removed(tmp_path: Path, loop: LoopThread) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, prompts="p")
    journal.begin(0, 0)
    keep(journal, loop, make_output([3]))
    journal.close()
    content = path.read_bytes()
    path.write_bytes(content[:-5])
    again = Journal(path, prompts="p")
    assert again.started == {0: 0}
    assert again.turn(request()) is None
    keep(again, loop, make_output([3]))
    again.close()
    assert without_writes(path.read_bytes()) == without_writes(content)


@pytest.mark.parametrize("line", ["[]", "{}", '{"turn": 3}', '{"turn": "x"}', "nonsense", '{"batch": 0, "groups": 1}'])
def test_a_file_that_is_no_journal_is_refused_by_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(f'{{"start": 0, "version": 0}}\n{line}\n')
    with pytest.raises(DataError, match=r"journal.jsonl, line 2: not a line of a journal"):
        Journal(path, prompts="p")


def test_what_is_no_group_or_no_answer_is_refused_by_its_field(tmp_path: Path, loop: LoopThread) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, prompts="p")
    keep(journal, loop, make_output([3]))
    loop.run(journal.keep_group(0, make_prompts(1)[0], (make_trajectory(),)))
    journal.close()
    content = path.read_bytes().replace(b'"reward": ', b'"reward": "1", "before": ')
    path.write_bytes(content.replace(b'"tokens": [3]', b'"tokens": [3, "4"]'))
    again = Journal(path, prompts="p")
    with pytest.raises(DataError, match=r"group 0 cannot be read \(turn 0: reward must be a finite number; got '1'\)"):
        again.group(0)
    with pytest.raises(DataError, match=r"-000 cannot be read \(tokens\[1\] must be a whole number .*; got '4'\)"):
        again.turn(request())
    again.close()


def test_a_journal_of_other_prompts_is_refused(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(whole)
    with pytest.raises(DataError, match=r"line 1: .* the training prompts were others.*resume_mode=none"):
        Journal(path, prompts="q")


def test_a_disk_that_is_full_is_named(tmp_path: Path, loop: LoopThread) -> None:
    journal = Journal(tmp_path / "journal.jsonl", prompts="p")
    with file_size_limit(64), pytest.raises(SaveError, match=r"journal.jsonl could not be written"):
        keep(journal, loop, make_output([3] * 100))


def test_a_journal_that_lacks_a_batch_is_refused_rather_than_waited_for(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"".join(line for line in whole.splitlines(keepends=True) if not line.startswith(b'{"batch"')))
    with pytest.raises(DataError, match=r"journal.jsonl: the groups in it are none of this run at version 0"):
        run(path)


def test_a_group_that_failed_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(VersionedEngine, "_versioned", lambda *_: EngineError("no memory"))
        with pytest.raises(EngineError, match="no memory"):
            run(path)
    assert b'"batch"' not in path.read_bytes()
    after = run(path)
    assert len(after.requests) == BATCH * STEPS * SAMPLES * 2
