"""Kills of a server while clients train and sample: a few here, two hundred each night."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.serve_cases import HAS_SCHEMA, NEEDS_SCHEMA

pytestmark = pytest.mark.skipif(not HAS_SCHEMA, reason=NEEDS_SCHEMA)


def killed(count: int, timeout_s: float) -> tuple[int, int]:
    """Kill a server so often, in a process that may fork; return how often, and how often inside a verb."""
    command = [sys.executable, "-m", "tests.reliability.serve_kills", "--kills", str(count)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = re.search(r"(\d+) kills, (\d+) inside a verb, .* all answers as undisturbed", done.stdout)
    assert found, done.stdout
    return int(found[1]), int(found[2])


@pytest.mark.slow
def test_clients_of_a_server_that_is_killed_are_told_what_others_are() -> None:
    kills, inside = killed(6, 800.0)
    assert kills == 6
    assert inside >= 1


@pytest.mark.nightly
def test_two_hundred_kills_leave_no_trace_in_any_answer() -> None:
    kills, inside = killed(200, 7200.0)
    assert kills == 200
    assert inside >= 100
