"""kill -9 of runs whose rollouts are made while the learner updates: the few that CI tries of those in `suite.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_runs import TIMEOUT_S

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_killed_run_makes_nothing_twice_and_its_replay_gives_its_weights() -> None:
    words = [sys.executable, "-m", "tests.reliability.kill_and_resume", "--kind", "stream"]
    kills = ["--kills", "8", "--kills-a-run", "2"]  # a run of each variant
    done = subprocess.run([*words, *kills], cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert " cases, 0 failures" in done.stdout
