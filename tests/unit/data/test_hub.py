"""Whether the hub is there, asked with a deadline, and what the caches hold."""

from __future__ import annotations

import http.server
import io
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_train.config.data import DataConfig
from skyrl_train.data.prompts import load_prompts
from skyrl_train.data.sources import hub
from skyrl_train.errors import DataError, ModelError
from skyrl_train.model import resolve_model_path


@pytest.fixture(autouse=True)
def _asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for asked_once in (hub.is_reachable, hub.problem_of):
        asked_once.cache_clear()
    yield
    for asked_once in (hub.is_reachable, hub.problem_of):
        asked_once.cache_clear()


def test_a_hub_that_does_not_answer_is_given_up_within_seconds_and_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[float] = []

    def hang(*args: object, timeout: float) -> io.BytesIO:
        asked.append(timeout)
        time.sleep(60)
        return io.BytesIO()

    monkeypatch.setattr(urllib.request, "urlopen", hang)
    began = time.monotonic()
    assert not hub.is_reachable()
    assert not hub.is_reachable()
    assert time.monotonic() - began < 20
    assert len(asked) == 1
    assert os.environ["HF_HUB_OFFLINE"] == "1", "the hub's library would try for minutes"


def test_any_answer_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, timeout: float) -> None:
        raise urllib.error.HTTPError("https://mirror", 403, "forbidden", {}, None)  # type: ignore[arg-type]

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    assert hub.is_reachable()
    assert os.environ["HF_HUB_OFFLINE"] == "0"


@pytest.mark.parametrize(
    ("folder", "dataset"),
    [
        ("hub/datasets--owner--name/snapshots/1", True),
        ("datasets/owner___name/main", True),
        ("hub/models--owner--name/snapshots/1", False),
    ],
)
def test_what_was_fetched_before_is_found_in_the_caches(tmp_path: Path, folder: str, dataset: bool) -> None:
    environ = {"HF_HOME": str(tmp_path)}
    assert not hub.is_cached("owner/name", dataset=dataset, environ=environ)
    (tmp_path / folder).mkdir(parents=True)
    assert hub.is_cached("owner/name", dataset=dataset, environ=environ)
    assert not hub.is_cached("owner/name", dataset=not dataset, environ=environ)


@pytest.fixture
def busy_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """A hub that answers 503, and what it was asked."""
    asked: list[str] = []

    class Busy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        yield asked
        server.shutdown()


def test_a_hub_that_does_not_give_a_data_set_is_asked_three_times_and_each_is_said_once(
    busy_hub: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert sum(hub._PAUSES_S) + (len(hub._PAUSES_S) + 1) * hub._ANSWER_TIMEOUT_S + hub._TIMEOUT_S < 20
    monkeypatch.setattr(hub, "_PAUSES_S", (0.01, 0.01))
    with pytest.raises(DataError, match=r"the hub does not give the data set .*503.*download it and give its folder"):
        load_prompts(["owner/name:train"])
    assert busy_hub.count("/api/datasets/owner/name") == 3
    assert [record.message.count("asked again") for record in caplog.records] == [1, 1]


def test_a_hub_that_does_not_give_a_model_is_asked_no_more_than_for_a_data_set(
    busy_hub: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hub, "_PAUSES_S", (0.01, 0.01))
    began = time.monotonic()
    assert not hub.fetch_config("owner/name")
    with pytest.raises(ModelError, match=r"model path 'owner/name': .* the hub did not give it .*503"):
        resolve_model_path("owner/name")
    assert time.monotonic() - began < 20, "the hub's own client would go on for half a minute"
    assert busy_hub.count("/api/models/owner/name") == 3
    assert {path for path in busy_hub if path != "/"} == {"/api/models/owner/name"}
    assert [record.message.count("asked again") for record in caplog.records] == [1, 1]


def test_a_row_of_another_format_is_named_with_what_it_has(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"question": "2+2?", "solution": "4"}\n')
    with pytest.raises(DataError, match=r"line 1: is no row of data.row_format=gsm8k .*it has question, solution"):
        load_prompts([str(file)], DataConfig(row_format="gsm8k"))


def test_a_custom_format_is_a_function_of_a_row(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"question": "2+2?"}\n')
    (prompt,) = load_prompts([str(file)], DataConfig(row_format="tests.unit.data.test_hub:from_question"))
    assert prompt.messages[0]["content"] == "2+2?"


def from_question(row: object) -> dict[str, str]:
    return {"prompt": row.values["question"]}  # type: ignore[attr-defined]
