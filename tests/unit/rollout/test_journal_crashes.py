"""A stream that is killed anywhere, by prefixes of its journal and torn writes at their ends, and goes on from any
checkpoint that it can have had, with environments that offer their state, can be played again, or neither."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from skyrl_train.errors import DataError
from skyrl_train.rollout.admission import ConsumedPrompts
from skyrl_train.rollout.journal import Journal
from tests.support.fake_environments import FAKE_ENVIRONMENT
from tests.support.journal_cases import BATCH, ENVIRONMENTS, STEPS, Run, check_crash, check_cut, run


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """A run that nothing killed, by its environment."""
    folder = tmp_path_factory.mktemp("whole")
    return {each: run(folder / f"{number}.jsonl", environment=each) for number, each in enumerate(ENVIRONMENTS)}


@pytest.mark.slow
@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_a_run_that_was_killed_anywhere_goes_on_where_it_was(
    wholes: dict[str, Run], tmp_path: Path, environment: str
) -> None:
    draw = random.Random(0)
    for cut in sorted(draw.sample(range(len(wholes[environment].content) + 1), 12)):
        check_cut(cut, wholes[environment], tmp_path, draw, environment)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_500_crash_points(wholes: dict[str, Run], tmp_path: Path, environment: str) -> None:
    draw, content = random.Random(1), wholes[environment].content
    ends = [0, *(index + 1 for index, byte in enumerate(content) if byte == ord("\n"))]
    cuts = [*draw.sample(ends, 60), *(draw.randrange(len(content)) for _ in range(125 - 60))]
    for cut in cuts:
        check_cut(cut, wholes[environment], tmp_path, draw, environment)


def torn(content: bytes, draw: random.Random) -> tuple[bytes, int]:
    """What a loss of power leaves of a journal: blocks of its last write are zeros, whatever is behind them, and its end is
    missing. Also the bytes of the lines before the first that is damaged."""
    writes = [json.loads(line)["write"] for line in content.splitlines()]
    last = draw.choice(sorted(set(writes)))
    lines = [line for line, write in zip(content.splitlines(keepends=True), writes) if write <= last]
    begin = sum(len(line) for line, write in zip(lines, writes) if write < last)
    left = bytearray(b"".join(lines))
    for block in range(begin, len(left), 64):
        if draw.random() < 0.2:
            left[block : block + 64] = bytes(min(64, len(left) - block))
    del left[draw.randint(begin, len(left)) :]
    damaged = left.find(0)
    return bytes(left), left.rfind(b"\n", 0, damaged if damaged >= 0 else len(left)) + 1


@pytest.mark.slow
@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_a_last_write_that_was_torn_or_reordered_is_removed(
    wholes: dict[str, Run], tmp_path: Path, environment: str
) -> None:
    draw = random.Random(2)
    for number in range(8):
        content, num_whole = torn(wholes[environment].content, draw)
        check_crash(wholes[environment], content, num_whole, tmp_path / f"{number}.jsonl", draw, environment)


@pytest.mark.nightly
@pytest.mark.slow
def test_400_torn_writes(wholes: dict[str, Run], tmp_path: Path) -> None:
    draw = random.Random(3)
    for number in range(400):
        environment = ENVIRONMENTS[number % len(ENVIRONMENTS)]
        content, num_whole = torn(wholes[environment].content, draw)
        check_crash(wholes[environment], content, num_whole, tmp_path / f"{number}.jsonl", draw, environment)


def test_damage_that_no_crash_explains_is_refused(wholes: dict[str, Run], tmp_path: Path) -> None:
    content = bytearray(wholes[FAKE_ENVIRONMENT].content)
    second_line = content.index(b"\n") + 1
    content[second_line + 2] = 0
    (tmp_path / "journal.jsonl").write_bytes(content)
    with pytest.raises(
        DataError, match=r"line 2: not a line of a journal .*it is damaged, and line \d+ was written long"
    ):
        Journal(tmp_path / "journal.jsonl", prompts="p")


def compacted(folder: Path, environment: str) -> Run:
    """A run that had a checkpoint after each step and kept the newest two."""
    path = folder / "compacted.jsonl"

    def oldest_checkpoint() -> int | None:
        written = [json.loads(line) for line in path.read_bytes().splitlines()]
        version = max(line["batch"] for line in written if "batch" in line)
        return max(version - 1, 1) if version else None

    return run(path, environment=environment, oldest_checkpoint=oldest_checkpoint)


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_a_compacted_journal_has_what_each_kept_checkpoint_needs(tmp_path: Path, environment: str) -> None:
    before, draw = compacted(tmp_path, environment), random.Random(4)
    lines = [json.loads(line) for line in before.content.splitlines()]
    assert lines[0]["from"] == STEPS - 2
    gone = before.taken[STEPS - 3].settled
    named = [str(line.get("turn") or line.get("call")) for line in lines if "turn" in line or "call" in line]
    of = {line.get("start", line.get("group")) for line in lines} | {int(name.split("-")[1]) for name in named}
    assert not {ordinal for ordinal in of if ordinal is not None and gone.holds(ordinal)}
    assert [line["batch"] for line in lines if "batch" in line] == [STEPS - 2, STEPS - 1]
    leftover = tmp_path / ".journal.jsonl.tmp"
    for number, content in before.contents.items():
        leftover.write_bytes(content[: draw.randrange(len(content))])
        for cut in (len(content), len(content) - draw.randrange(1, 30)):
            if content[:cut].count(b'{"batch"') == content.count(b'{"batch"'):
                num_whole = content.rfind(b"\n", 0, cut) + 1
                check_crash(before, content[:cut], num_whole, tmp_path / "journal.jsonl", draw, environment)
        assert not leftover.exists(), f"what was left at version {number}"


def test_a_journal_is_not_compacted_past_the_checkpoint_that_a_run_goes_on_from(tmp_path: Path) -> None:
    compacted(tmp_path, FAKE_ENVIRONMENT)
    rule = rf"begins at version {STEPS - 2}, and the run goes on from version 1: .*resume_mode=none"
    with pytest.raises(DataError, match=rule):
        run(tmp_path / "compacted.jsonl", version=1, settled=ConsumedPrompts(watermark=BATCH))


def test_a_disk_without_room_for_a_compacted_journal_keeps_it_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def oldest_checkpoint() -> int | None:
        (tmp_path / ".journal.jsonl.tmp").mkdir(exist_ok=True)
        return STEPS

    after = run(tmp_path / "journal.jsonl", oldest_checkpoint=oldest_checkpoint)
    assert after.content.count(b'{"batch"') == STEPS
    assert "could not be compacted" in caplog.text
