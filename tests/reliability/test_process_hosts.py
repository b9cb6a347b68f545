"""Each user of the process host under each attack: nothing is left ten seconds after its end, or after it was killed."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest

from skyrl_train.system.sandbox import violations
from tests.reliability.process_hosts import USERS
from tests.support.process_trees import Family

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 10.0
NAMED = "import ctypes, os, signal, time\nctypes.CDLL(None).prctl(15, b'{mark}', 0, 0, 0)\n"
FORKS = """
if os.fork() == 0:
    try: os.setsid()
    except OSError: pass
    if os.fork() == 0:
        for number in (1, 2, 10, 15):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(600)
    os._exit(0)
time.sleep(0.5)
"""
ATTACKS = {
    "sleeps": (1, "time.sleep(600)"),
    "holds the interpreter": (1, "ctypes.PyDLL(None).sleep(600)"),
    "forks twice": (2, FORKS + "time.sleep(600)"),
    "starts 200 children": (
        20,
        "for _ in range(200):\n    try: child = os.fork()\n    except OSError: break\n"
        "    if child == 0:\n        time.sleep(600)\ntime.sleep(600)",
    ),
    "stops itself and its parent": (
        1,
        "try: os.kill(os.getppid(), signal.SIGSTOP) if {stops_parent} else None\n"
        "except OSError: pass\nos.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(600)",
    ),
    "forks twice and ends well": (1, FORKS),
}
"""How many processes there are of each at least, and its code."""
QUICK = [("forks twice", "killed"), ("starts 200 children", "at its end")]


def named(mark: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            found += [path.name] * ((path / "comm").read_text().strip() == mark)
        except OSError:
            continue
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="processes are adopted on Linux alone")
@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize(
    ("attack", "end"),
    [
        pytest.param(attack, end, marks=() if (attack, end) in QUICK else pytest.mark.slow)
        for attack in ATTACKS
        for end in ("at its end", "killed")
    ],
)
def test_nothing_is_left_of_what_an_owner_started(user: str, attack: str, end: str) -> None:
    if user == "code reward" and (why := violations("required", "a test")) and not os.environ.get("CI"):
        pytest.skip(str(why[0]))
    mark, (least, code) = "m" + secrets.token_hex(6), ATTACKS[attack]
    filled = NAMED.replace("{mark}", mark) + code.replace(
        "{stops_parent}", str(user != "engine")
    )  # whose parent is the owner
    owner = subprocess.Popen([sys.executable, "-m", "tests.reliability.process_hosts", user, filled], cwd=ROOT)
    family = Family(owner.pid)
    try:
        ends = time.monotonic() + 60
        while len(named(mark)) < least and owner.poll() is None and time.monotonic() < ends:
            time.sleep(0.05)
        if end == "killed":
            assert owner.poll() is None
            owner.kill()
        assert owner.wait(60) == (-9 if end == "killed" else 0)
        ended = time.monotonic()
        left = family.left(within_s=WITHIN_S)
        while named(mark) and time.monotonic() < ended + WITHIN_S:
            time.sleep(0.05)
        assert (left, named(mark)) == ([], [])
    finally:
        owner.kill()
        owner.wait(10)
