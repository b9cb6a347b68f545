"""Typed calls to objects elsewhere: what a type checker refuses, and what an actor does."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_train.cluster.calls import Answer
from skyrl_train.cluster.endpoints import Served
from skyrl_train.endpoints import LocalEndpoint, listening, method_name
from skyrl_train.errors import EngineError

SNIPPET = """
from typing_extensions import assert_type
from skyrl_train.endpoints import Endpoint

class Engine:
    def update(self, bucket: bytes, *, version: int = 0) -> str: ...
    async def generate(self, prompt: str) -> int: ...

class Other:
    def update(self, bucket: bytes) -> str: ...

def right(engines: Endpoint[Engine]) -> None:
    assert_type(engines.call(Engine.update, "sync", b"", version=1), list[str])
    assert_type(engines.begin(Engine.update, "sync", b"").passed_on(), str)
    assert_type(engines.begin_each(Engine.update, "sync", [b"", b""]).wait(), list[str])
    assert_type(engines.ask(Engine.generate, "sync", "hi"), list[int])

def wrong(engines: Endpoint[Engine]) -> None:
    engines.call(Engine.update, "sync", 3)
    engines.call(Engine.update, "sync")
    engines.call(Engine.update, "sync", b"", versoin=1)
    engines.call(Engine.updtae, "sync", b"")
    engines.call("update", "sync", b"")
    engines.call(Other.update, "sync", b"")
    engines.call(Engine.update, "snyc", b"")
    engines.begin_each(Engine.update, "sync", [3])
    engines.ask(Engine.generate, "sync", 3)
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_a_type_checker_sees_methods_arguments_and_results(tmp_path: Path) -> None:
    file = tmp_path / "snippet.py"
    file.write_text(SNIPPET)
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), str(file)]
    said = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout
    refused = {int(number) for number in re.findall(r"snippet\.py:(\d+): error", said)}
    lines = SNIPPET.splitlines()
    first = lines.index("def wrong(engines: Endpoint[Engine]) -> None:") + 2
    stubs = {
        number for number, line in enumerate(lines, start=1) if line.strip().startswith(("def update", "async def"))
    }
    assert refused - stubs == set(range(first, len(lines) + 1)), said


class Engine:
    """An object that others call."""

    def __init__(self) -> None:
        self.buckets: list[str] = []

    def update(self, bucket: str) -> int:
        """Take it."""
        if not bucket:
            raise EngineError("empty")
        self.buckets.append(bucket)
        return len(self.buckets)

    async def generate(self, prompt: str) -> str:
        """Answer it."""
        return prompt * 2

    def _secret(self) -> str:
        return "secret"


def test_an_actor_answers_for_the_public_methods_of_the_classes_that_it_serves_and_no_others() -> None:
    served, engine = Served(), Engine()
    served.add(Engine, engine)
    assert served.answer(method_name(Engine, Engine.update), ("a",), {}).unwrap() == 1
    assert served.answer("Engine.update", (Answer(value="b"),), {}).unwrap() == 2
    assert engine.buckets == ["a", "b"], "what another actor answered is passed on as it is"
    with pytest.raises(EngineError, match="empty"):
        served.answer("Engine.update", ("",), {}).unwrap()
    with pytest.raises(EngineError, match="gone"):
        served.answer("Engine.update", (Answer(error=EngineError("gone")),), {}).unwrap()
    assert asyncio.run(served.answer_of_coroutine("Engine.generate", ("hi",), {})).unwrap() == "hihi"
    for key in ("Engine._secret", "Engine.__init__", "Engine.buckets", "Other.update", "update"):
        with pytest.raises(LookupError, match="is not served here"):
            served.answer(key, (), {})


def test_a_caller_names_a_public_method_of_the_class_itself() -> None:
    class Derived(Engine):
        def update(self, bucket: str) -> int:
            return -1

    for method in (Engine._secret, Derived.update):
        with pytest.raises(TypeError, match="no public method of Engine"):
            method_name(Engine, method)


def test_objects_of_this_process_are_called_by_the_same_words() -> None:
    engines = LocalEndpoint(Engine(), Engine())
    assert engines.call(Engine.update, "sync", "a") == [1, 1]
    pending = engines.begin_each(Engine.update, "sync", ["b", "c"])
    assert (pending.wait(), pending.passed_on(1)) == ([2, 2], 2)
    assert [engine.buckets for engine in engines.members] == [["a", "b"], ["a", "c"]]
    assert engines.ask(Engine.generate, "sync", "x") == ["xx", "xx"]


def test_connections_of_a_listening_socket_send_at_once_what_is_written() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with socket.create_connection(("127.0.0.1", listening(bound)), timeout=10):
            accepted, _ = bound.accept()
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
