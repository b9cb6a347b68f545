"""Trainer against engine: the figures on distributions that are written here, the command on the bundled model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from skyrl_train.config.models import ModelConfig
from skyrl_train.errors import DataError, EngineError
from skyrl_train.inference.vllm import Ranked
from skyrl_train.main_doctor import main
from skyrl_train.model import load_tokenizer
from skyrl_train.runs.checks.compare import _by_server, _read, compared, draw, table

HALF, QUARTER, EIGHTH = np.log(0.5), np.log(0.25), np.log(0.125)
TRAINER = np.array([[HALF, QUARTER, EIGHTH, EIGHTH], [EIGHTH, HALF, QUARTER, EIGHTH]])
"""Of two positions, four tokens."""


def ranked(logprobs: np.ndarray, k: int = 4) -> Ranked:
    order = np.argsort(-logprobs, axis=1, kind="stable")[:, :k]
    return order, np.take_along_axis(logprobs, order, axis=1)


def test_equal_distributions_have_no_divergence_and_all_in_common() -> None:
    found = compared([[3, 0, 1]], [TRAINER], [ranked(TRAINER)], top_k=2)
    assert found.kl.tolist() == pytest.approx([0.0, 0.0], abs=1e-15)
    assert found.overlap.tolist() == [1.0, 1.0]
    assert found.trainer.tolist() == found.engine.tolist() == [HALF, HALF]
    assert (found.position.tolist(), found.length.tolist(), found.vocabulary) == ([1, 2], [3, 3], 4)


def test_the_divergence_is_that_of_the_trainer_from_the_engine() -> None:
    engine = np.full((2, 4), QUARTER)
    found = compared([[3, 0, 1]], [TRAINER], [ranked(engine)], top_k=1)
    assert found.kl.tolist() == pytest.approx([0.25 * np.log(2)] * 2)  # ln 4 less the entropy, 1.75 ln 2
    assert found.same_first.tolist() == [True, False]
    assert found.engine.tolist() == [QUARTER, QUARTER]


def test_tokens_that_a_server_does_not_name_count_as_one() -> None:
    found = compared([[3, 2, 1]], [TRAINER], [ranked(TRAINER, k=2)], top_k=2)
    assert found.kl.tolist() == pytest.approx([0.0, 0.0], abs=1e-12)
    assert np.isnan(found.engine[0])
    assert found.engine[1] == HALF
    assert (found.named, found.vocabulary) == (2, 4)


@pytest.mark.slow
def test_the_table_has_lengths_positions_and_the_worst_token_and_the_picture_is_drawn(tmp_path: Path) -> None:
    other = TRAINER.copy()
    other[1] = np.log([0.85, 0.05, 0.05, 0.05])
    found = compared([[3, 0, 1], [2, 0, 1]], [TRAINER, TRAINER], [ranked(TRAINER), ranked(other)], top_k=2)
    tokenizer = load_tokenizer(ModelConfig())
    lines = table(found, tokenizer, worst=1).splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["positions", "all", "length", "position"]
    assert "KL(trainer || engine) in nats over the whole vocabulary of 4" in lines[-2]
    assert lines[-1].startswith("  text 1, position 2: KL 1")
    for name, begin in (("kl.png", b"\x89PNG"), ("kl.svg", b"<?xml")):
        draw(found, tmp_path / name, "a model")
        assert (tmp_path / name).read_bytes().startswith(begin)


def test_texts_are_lines_or_objects_and_one_that_is_too_short_is_refused(tmp_path: Path) -> None:
    tokenizer, file = load_tokenizer(ModelConfig()), tmp_path / "texts.jsonl"
    file.write_text('Ana has 3 apples.\n{"text": "Ben has 4 books and {"}\n\n{not json\n')
    found = _read(file, tokenizer, 3, 5)
    assert [len(ids) for ids in found] == [5, 5, 5] or all(2 <= len(ids) <= 5 for ids in found)
    assert tokenizer.decode(found[0]).startswith("Ana has 3")
    file.write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="line 1: must have a text of two tokens"):
        _read(file, tokenizer, 3, 5)
    with pytest.raises(DataError, match="cannot be read"):
        _read(tmp_path / "none", tokenizer, 3, 5)


class Server(BaseHTTPRequestHandler):
    """Scores a prompt as vLLM's server does; a model named `other` gives no likeliest tokens."""

    asked: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append(body)
        named = [{"token_id:0": HALF, "token_id:1": QUARTER}] * len(body["prompt"])
        scored = {"top_logprobs": [None, *named[1:]]} if body["model"] == "mine" else None
        answer = json.dumps({"choices": [{"logprobs": scored}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()


def test_a_server_is_asked_for_its_likeliest_tokens_and_one_that_gives_none_is_named(url: str) -> None:
    ((token_ids, logprobs),) = _by_server(url, "mine", [[3, 0, 1]], 2)
    assert token_ids.tolist() == [[0, 1], [0, 1]]
    assert logprobs[0].tolist() == [HALF, QUARTER]
    assert (Server.asked[-1]["prompt"], Server.asked[-1]["echo"], Server.asked[-1]["logprobs"]) == ([3, 0, 1], True, 2)
    with pytest.raises(EngineError, match="must score a prompt of token ids"):
        _by_server(url, "other", [[3, 0, 1]], 2)


@pytest.mark.slow
def test_trainer_and_engine_agree_on_the_bundled_model_and_rounding_shows(tmp_path: Path, capsys: Any) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("Ana has 3 apples. Ana buys 4 more. How many apples does Ana have now?\nBen does 4 laps a day.\n")
    same = ["compare", "builtin:tiny_qwen2", "--texts", str(texts), "--most", "1e-6"]
    assert main(same) == 0
    said = capsys.readouterr().out
    assert "trainer float32" in said
    assert "100.00%" in said.splitlines()[3]
    assert main([*same, "model.dtype=bfloat16", "--picture", str(tmp_path / "kl.svg")]) == 1
    assert "trainer bfloat16" in capsys.readouterr().out
    assert (tmp_path / "kl.svg").is_file()
