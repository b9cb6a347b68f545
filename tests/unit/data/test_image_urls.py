"""Images at addresses: what a user allows is fetched, and nothing else; what does not come in time, or whole, or is none, is
refused by its row."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config.data import DataConfig, ImagesConfig
from skyrl_train.data.prompts import load_prompts
from skyrl_train.data.rows import Row
from skyrl_train.data.sources import images
from skyrl_train.data.sources.images import ImageStore, references_in, with_references
from skyrl_train.errors import DataError
from tests.support.pictured_runs import HTML, SVG, encoded

PICTURE = encoded("PNG")


class Server(BaseHTTPRequestHandler):
    """Pictures at `/pictures/`, and what is wrong with the others."""

    asked: list[str]

    def do_GET(self) -> None:
        type(self).asked.append(self.path)
        name = self.path.rsplit("/", 1)[-1]
        self.send_response({"away.png": 302, "gone.png": 404}.get(name, 200))
        if name == "away.png":
            self.send_header("Location", "/secret/x.png")
        self.send_header("Content-Type", "image/png")
        self.end_headers()
        with contextlib.suppress(OSError):
            if name == "slow.png":
                for byte in PICTURE:
                    self.wfile.write(bytes([byte]))
                    self.wfile.flush()
                    time.sleep(0.05)
            elif name == "endless.png":
                for _ in range(1000):
                    self.wfile.write(b"x" * 10_000)
            elif name != "silent.png":
                self.wfile.write({"page.png": HTML, "drawing.png": SVG, "cut.png": PICTURE[:-30]}.get(name, PICTURE))
            else:
                time.sleep(2.0)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    Server.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join(5.0)


def row(url: str) -> Row:
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    return Row(source="train", index=6, place="train.jsonl, line 7", values={"prompt": [message]})


def fetched(url: str, *allowed: str, **settings: Any) -> bytes:
    store = ImageStore()
    found = with_references(row(url), ImagesConfig(urls=allowed, **settings), store)
    return store.read(references_in(found.values["prompt"])[0])


@pytest.mark.parametrize("allowed", ["/pictures/", "/pictures", "", "/"])
def test_an_address_below_an_allowed_one_is_fetched(address: str, allowed: str) -> None:
    assert fetched(f"{address}/pictures/a.png", "https://elsewhere/", f"{address}{allowed}") == PICTURE


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("{}/pictures/a.png", ()),
        ("{}/secret/a.png", ("{}/pictures/",)),
        ("{}/pictures/../secret/a.png", ("{}/pictures/",)),
        ("{}/pictures/%2e%2e/secret/a.png", ("{}/pictures/",)),
        ("{}.elsewhere/pictures/a.png", ("{}",)),
        ("{}@elsewhere/a.png", ("{}",)),
        ("file:///etc/passwd", ("file:///",)),
    ],
)
def test_other_addresses_are_not_asked(address: str, url: str, allowed: tuple[str, ...]) -> None:
    Server.asked.clear()
    with pytest.raises(DataError, match=r"train\.jsonl, line 7: an image cannot be read"):
        fetched(url.format(address), *(each.format(address) for each in allowed))
    assert Server.asked == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("away.png", "leads to /secret/x.png, and redirects are not followed"),
        ("gone.png", "HTTP Error 404"),
        ("page.png", "not an image that Pillow reads"),
        ("drawing.png", "not an image that Pillow reads"),
        ("cut.png", "a damaged image"),
        ("endless.png", r"bytes; data\.images\.max_bytes=50000"),
        ("slow.png", r"did not send it within 0\.4 s"),
        ("silent.png", "timed out"),
    ],
)
def test_what_comes_late_or_is_no_image_is_refused_by_its_row(
    address: str, monkeypatch: pytest.MonkeyPatch, name: str, reason: str
) -> None:
    monkeypatch.setattr(images, "_TIMEOUT_S", 0.4)
    Server.asked.clear()
    began = time.monotonic()
    with pytest.raises(DataError, match=rf"train\.jsonl, line 7: an image cannot be read: .*{reason}"):
        fetched(f"{address}/pictures/{name}", address, max_bytes=50_000)
    assert time.monotonic() - began < 10.0
    assert Server.asked == [f"/pictures/{name}"]


def test_rows_of_a_file_name_addresses_in_a_column(address: str, tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text(f'{{"prompt": "what?", "images": ["{address}/pictures/a.png"], "answer": "red"}}\n')
    settings = ImagesConfig(urls=(f"{address}/pictures/",), column="images")
    (prompt,) = load_prompts([str(file)], DataConfig(images=settings))
    assert len(references_in(prompt.messages)) == 1
    with pytest.raises(
        DataError, match=r"train\.jsonl, line 1: image 0 of 'images' cannot be read: .*data\.images\.urls"
    ):
        load_prompts([str(file)], DataConfig(images=ImagesConfig(column="images")))
