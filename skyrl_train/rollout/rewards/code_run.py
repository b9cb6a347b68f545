"""Runs a row's tests on code that a model wrote, each in a sandbox of its own (`sandbox.py`, `sandbox_child.py`).

The program never holds the tests, their answers or the verdict. Tests ask it by the names that they do not define
themselves; what passes between the two is plain data.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_train.system.sandbox import START_WITHIN_S, Level, Limits, made, readable

_STARTED = b"started\n"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of the tests."""

    passed: int = 0
    """0 to the number of tests."""
    undecided: tuple[str, ...] = ()
    """Why tests could not be decided in this way; none of them passed."""


def run_tests(code: str, tests: Sequence[str], *, timeout_s: float, memory_mb: int, sandbox: Level) -> Verdict:
    """Return how many of the tests pass after `code` has run; none where it raises, exceeds a limit or takes too long.

    Raises OSError, SandboxUnavailable among them, where a sandbox cannot be started, which says nothing about the code.
    """
    clean = [text.encode("utf-8", "replace").decode() for text in (code, *tests)]
    with made(sandbox, Limits(timeout_s=timeout_s, memory_mb=memory_mb)) as box:
        reading, writing = os.pipe()
        pipe = box.opened(reading)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            try:
                box.start("program", {"code": clean[0], "link": theirs.fileno()}, fds=[theirs.fileno()])
                given = {"tests": clean[1:], "link": ours.fileno(), "verdict": writing}
                box.start("tests", given, fds=[ours.fileno(), writing])
            finally:
                os.close(writing)
        if _read(pipe, len(_STARTED), START_WITHIN_S) != _STARTED:
            raise OSError(f"the code and its tests did not start, or not within {START_WITHIN_S:g} s")
        said = _read(pipe, None, timeout_s)
    if said is None or not said.endswith(b"\n"):
        return Verdict()
    passed, undecided = json.loads(said)
    if len(passed) != len(tests) or not all(type(each) is bool for each in passed):
        raise OSError("the verdict is none of these tests")
    return Verdict(passed=sum(passed), undecided=tuple(undecided))


def _read(pipe: int, size: int | None, within_s: float) -> bytes | None:
    """Return so many bytes, or all to the end; None where they do not come in time."""
    data, ends = b"", time.monotonic() + within_s
    while size is None or len(data) < size:
        if not readable([pipe], ends - time.monotonic()):
            return None
        more = os.read(pipe, 1 << 16 if size is None else size - len(data))
        if not more:
            break
        data += more
    return data
