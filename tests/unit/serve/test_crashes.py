"""A server that loses power at any moment goes on as if it had not: what the disk had at each write is started from.

Whenever the server has brought a file to disk its folder is copied, which is what a kill at that moment leaves. From some of
the copies a server is started, and the client sends all of its requests again.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.system.files import bring_to_disk
from tests.support.serve_cases import HAS_SCHEMA, NEEDS_SCHEMA, Caller, datum, serving

pytestmark = pytest.mark.skipif(not HAS_SCHEMA, reason=NEEDS_SCHEMA)
TWO = [datum([1, 2, 3, 4]), datum([9, 8, 7])]


def played(ann: Caller, session: str) -> list[Any]:
    """Everything that a client does, and what it is told; the same requests whenever it is called."""
    model, told = ann.model(session), []
    for seq in range(1, 13, 3):
        told.append(ann.outcome(ann.train(model, seq, TWO)))
        told.append(ann.outcome(ann.step(model, seq + 1)))
        sampler = ann.snapshot(model, seq + 2, seq)
        told.append(ann.outcome(ann.sample(sampler, 0, num_samples=2)))
    sent = {"model_id": model, "seq_id": 13, "path": "end", "overwrite": True}
    path = ann.done("save_weights", sent)["path"]
    loaded = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
    other = ann.done("load_weights", loaded)["model_id"]
    return [*told, ann.logprobs(model, 14), ann.logprobs(other, 1)]


@pytest.mark.slow
def test_whatever_was_on_disk_the_client_is_told_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Path] = []
    folder = tmp_path / "server"

    def copying(descriptor: int, path: Path) -> None:
        bring_to_disk(descriptor, path)
        if path.is_relative_to(folder):
            copies.append(shutil.copytree(folder, tmp_path / f"copy-{len(copies)}"))

    monkeypatch.setattr("skyrl_train.system.files.append_log.bring_to_disk", copying)
    with serving(folder, anchor_every=4) as http:
        session = Caller(http).session()
        expected = played(Caller(http), session)
    monkeypatch.undo()
    assert len(copies) > 40
    assert len(list((copies[-1] / "models" / "000000").glob("a*"))) == 1
    step = max(1, len(copies) // 7)
    for copy in copies[3::step]:
        with serving(copy, anchor_every=4) as http:
            assert played(Caller(http), session) == expected, copy.name


@pytest.mark.slow
def test_a_torn_last_line_is_as_if_it_had_not_been_written(tmp_path: Path) -> None:
    with serving(tmp_path) as http:
        session = Caller(http).session()
        expected = played(Caller(http), session)
    journal = tmp_path / "journal.jsonl"
    whole = journal.read_bytes()
    for cut in (len(whole) - 1, len(whole) * 2 // 3):
        journal.write_bytes(whole[:cut])
        with serving(tmp_path) as http:
            assert played(Caller(http), session) == expected


def test_a_damaged_line_in_the_middle_is_refused_by_its_number(tmp_path: Path) -> None:
    from skyrl_train.errors import DataError

    with serving(tmp_path) as http:
        Caller(http).model()
    journal = tmp_path / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([lines[0], b"{" + lines[1], *lines[2:]]))
    with pytest.raises(DataError, match=r"line 2"), serving(tmp_path):
        pass
    journal.write_bytes(b'{"something": "else", "write": 1}\n{"outcome": "of nothing", "write": 2}\n')
    with pytest.raises(DataError, match="not a journal of skyrl-serve"), serving(tmp_path):
        pass
