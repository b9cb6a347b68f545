"""A journal that is written anew forgets what is over, and a server that starts from it knows all else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.serve_cases import HAS_SCHEMA, NEEDS_SCHEMA, Caller, datum, serving

pytestmark = pytest.mark.skipif(not HAS_SCHEMA, reason=NEEDS_SCHEMA)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is over goes at once."""
    monkeypatch.setattr("skyrl_train.serve.ledger._LEAST_TO_COMPACT", 0)
    monkeypatch.setattr("skyrl_train.serve.upkeep._KEPT_S", 0.0)


@pytest.mark.slow
def test_a_server_goes_on_from_a_journal_that_was_written_anew(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    with serving(tmp_path, anchor_every=2) as http:
        ann = Caller(http)
        session = ann.session()
        over, stays = ann.model(session), ann.model(session, number=1)
        saved = ann.done("save_weights", {"model_id": over, "seq_id": 1, "path": "kept"})["path"]
        ann.done("unload_model", {"model_id": over, "seq_id": 2})
        lengths = []
        for seq in range(1, 13, 2):
            ann.outcome(ann.train(stays, seq, [datum([1, 2, 3, 4, 5])]))
            ann.outcome(ann.step(stays, seq + 1))
            lengths.append(len(journal.read_bytes().splitlines()))
        assert lengths[-1] < 24, "of 34 and more"
        expected = ann.logprobs(stays, 13)
    with serving(tmp_path, anchor_every=2) as http:
        ann = Caller(http)
        assert ann.logprobs(stays, 14) == expected
        entry = {"data": [datum([1, 2, 3])], "loss_fn": "cross_entropy"}
        ann.send("forward", {"forward_input": entry, "model_id": over, "seq_id": 3}, status=404)
        loaded = {"session_id": session, "model_seq_id": 2, "path": saved, "optimizer": False}
        again = ann.done("load_weights", loaded)["model_id"]
        ann.outcome(ann.train(again, 1, [datum([1, 2, 3])]))
        ann.outcome(ann.step(again, 2))
        assert ann.logprobs(stays, 15) == expected
        assert len({each.number for each in http.service.records.models.values()}) == 3, "no folder is taken twice"
