"""A server that stands for a judge: OpenAI's chat completions on this machine, by the standard library, without a model.

    python examples/judge/stub_judge.py --port 8901

It grades an answer by its different digits: each is worth two points of ten. What it is asked for is the text between
`Answer:` and the next empty line of the last message, which is where the default template has the completion.
"""

from __future__ import annotations

import argparse
import json
import re
import zlib
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any

MODEL = "stub-judge"


def points(answer: str) -> int:
    """Return the grade of an answer, 0 to 10."""
    return min(10, 2 * len(set(re.findall(r"\d", answer))))


def answer_in(message: str) -> str:
    """Return the completion in a message that the default template made."""
    return message.split("Answer:\n", 1)[-1].split("\n\nGrade the answer", 1)[0]


class StubJudge(ThreadingHTTPServer):
    """Listens on the loopback address alone. `failing` of 100 answers get no reply, always the same ones."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int = 0, *, failing: int = 0, key: str = "") -> None:
        """`port` 0 is a free one; `key` is what a caller must have, where it is given."""
        super().__init__(("127.0.0.1", port), _Handler)
        self.failing, self.key = failing, key
        self.asked: list[Mapping[str, Any]] = []
        """Requests, in the order in which they came."""
        self.lock = Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def reply(self, request: Mapping[str, Any]) -> tuple[int, str]:
        """Return the status and the text of a reply to one request."""
        answer = answer_in(request["messages"][-1]["content"])
        if zlib.crc32(answer.encode()) % 100 < self.failing:
            return 400, "this judge does not like the answer"
        return 200, f"The answer has {points(answer) // 2} different digits.\nscore: {points(answer)}"


class _Handler(BaseHTTPRequestHandler):
    server: StubJudge
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": MODEL}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.server.key and self.headers.get("authorization") != f"Bearer {self.server.key}":
            return self._send(401, {"error": f"wrong key {self.headers.get('authorization')}"})
        with self.server.lock:
            self.server.asked.append(body)
        status, text = self.server.reply(body)
        if status != 200:
            return self._send(status, {"error": text})
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return self._send(200, {"choices": [choice], "usage": {"prompt_tokens": 100, "completion_tokens": 10}})

    def _send(self, status: int, body: Mapping[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8901)
    StubJudge(parser.parse_args().port).serve_forever()
