"""A hundred and more bad environments in real worker processes: each fails with its reason, and the next one works."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator

import pytest

from skyrl_train.rollout.hosts import LocalWorkers
from tests.reliability.hostile_environments import BAD, GOES_ON, HOSTILE
from tests.support.hostile_play import Played
from tests.support.process_trees import descendants

CHEAP = [
    "a catastrophic regular expression",
    "os._exit",
    "a segmentation fault",
    "signal.alarm",
    "sys.exit",
    "ten gigabytes",
    "a fork",
    "a daemon left behind",
    "standard output closed",
    "a loop that keeps the interpreter's lock",
    "garbage to every file",
    "a huge observation",
    "the end of its supervisor",
    "raises a StopIteration",
    "done 0",
    "reward 3",
    "close exits",
]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    before = set(descendants(os.getpid()))
    log = tmp_path_factory.mktemp("hostile") / "environments.log"
    played = Played(LocalWorkers((HOSTILE,), worker_memory_gb=0.5, log=log))
    yield played
    started = time.monotonic()
    played.close()
    assert time.monotonic() - started < 10
    assert set(descendants(os.getpid())) <= before


@pytest.mark.parametrize("deed", [pytest.param(name, marks=() if name in CHEAP else pytest.mark.slow) for name in BAD])
def test_a_bad_environment_fails_with_its_reason_and_harms_nobody_else(played: Played, deed: str) -> None:
    expected = BAD[deed][0]
    told = played.play(deed)
    if expected is GOES_ON:
        assert told == "reward 1.0"
    else:
        assert re.search(expected, told), told
    assert played.play("nothing") == "reward 1.0"


def test_signals_that_a_shell_has_its_background_ignore_end_a_worker() -> None:
    given = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGQUIT, signal.SIGHUP)}
    played = Played(LocalWorkers((HOSTILE,), worker_memory_gb=0.5))
    try:
        assert "was ended by SIGQUIT" in played.play("SIGQUIT to itself")
        assert "was ended by SIGHUP" in played.play("SIGHUP to itself")
    finally:
        played.close()
        for number, handler in given.items():
            signal.signal(number, handler)


def test_there_are_a_hundred() -> None:
    assert len(BAD) >= 100
    assert set(CHEAP) <= set(BAD)
