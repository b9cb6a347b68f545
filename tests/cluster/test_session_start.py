"""A session of this machine: where it is busy, in a process of its own as this one is connected; what it remembers."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray

from skyrl_train.cluster.session import RaySession
from tests.support.process_trees import Family

pytestmark = pytest.mark.cluster

SLOW_AT_FIRST = """
import ray, ray._private.services as services
from skyrl_train.cluster.session import RaySession
from skyrl_train.config.models import PlacementConfig

get_node, calls = services.get_node, []

def slow_at_first(*args, **kwargs):
    calls.append(1)
    if len(calls) == 1:
        raise Exception("The current node timed out during startup. This could happen because ...")
    return get_node(*args, **kwargs)

services.get_node = slow_at_first
session = RaySession(PlacementConfig(start_timeout_s=600.0), num_cpus=1, name="slow")
print(f"nodes: {len(ray.nodes())}, alive: {ray.nodes()[0]['Alive']}")
session.close()
"""


def test_what_ray_did_not_start_in_time_is_started_once_more_and_nothing_is_left() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", SLOW_AT_FIRST],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    family = Family(child.pid)
    said, _ = child.communicate(timeout=800)
    assert child.returncode == 0, said
    assert "nodes: 1, alive: True" in said
    assert "once more" in said
    # Of a start that was given up, an agent of Ray's looks for its node only now and then before it ends by itself.
    assert family.left(within_s=45.0) == []


WITHOUT_A_RAYLET = """
import os, ray, signal, time
from skyrl_train.cluster.calls import RemoteActor, Watch
from skyrl_train.cluster.session import RaySession
from skyrl_train.config.models import PlacementConfig
from skyrl_train.errors import ActorLostError
from tests.support.process_trees import command_line, descendants

class Patient:
    def ping(self):
        return True

session = RaySession(PlacementConfig(start_timeout_s=600.0), num_cpus=1, name="lost")
handle = ray.remote(num_cpus=100)(Patient).remote()  # no machine has room for it: it is waited for
actor = RemoteActor(handle=handle, role="patient", rank=0, log_folder=None)
(raylet,) = [each for each in descendants(os.getpid()) if "/raylet" in command_line(each).partition(" ")[0]]
os.kill(raylet, signal.SIGKILL)
began = time.monotonic()
try:
    Watch(phase="start", what="ping", timeout_s=500.0, silence_timeout_s=400.0).wait([actor], [handle.ping.remote()])
except ActorLostError as error:
    print(error)
print("at once" if time.monotonic() - began < 60 else "late")
session.close()
session = RaySession(PlacementConfig(start_timeout_s=600.0), num_cpus=1, name="next")
print("alive", [each["Alive"] for each in ray.nodes()])
session.close()
"""


def test_whoever_waits_for_actors_of_a_session_whose_raylet_has_ended_is_told_and_another_session_may_begin() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_RAYLET],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "patient rank 0 (not started yet)" in done.stdout
    assert "raylet has ended" in done.stdout
    assert "at once" in done.stdout
    assert "alive [True]" in done.stdout


WITH_A_TOKEN = """
import os, ray, stat, subprocess, sys
from pathlib import Path
from skyrl_train.cluster.session import RaySession
from skyrl_train.config.models import PlacementConfig

before = dict(os.environ)
for attempt in range(2):
    session = RaySession(PlacementConfig(start_timeout_s=600.0), num_cpus=1, name="token")
    file = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    token = file.read_text()
    print("modes", oct(stat.S_IMODE(file.stat().st_mode)), oct(stat.S_IMODE(file.parent.stat().st_mode)))
    see = ray.remote(num_cpus=1)(lambda: os.environ.get("RAY_AUTH_TOKEN_PATH") == str(file))
    print("answer", ray.get(see.remote(), timeout=120))
    assert "RAY_AUTH_TOKEN" not in os.environ
    logs = [path for path in session.folder.rglob("*") if path.is_file() and path != file]
    print("in clear", [path.name for path in logs if token.encode() in path.read_bytes()])
    address = ray.get_runtime_context().gcs_address
    if attempt == 0:
        (file.parent / "other").write_text("0" * 64)
        for given in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN_PATH": str(file.parent / "other")}, {}):
            child = subprocess.run(
                [sys.executable, "-c", f"import ray; ray.init({address!r}, logging_level=50); print('JOINED')"],
                env={**os.environ, **given}, capture_output=True, text=True, timeout=300,
            )
            print("joined", sorted(given), "JOINED" in child.stdout, "Authentication" in child.stderr)
    session.close()
    assert not file.exists()
names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN")
print("as before", [os.environ.get(name) for name in names])
"""


def test_a_session_of_this_machine_has_a_token_of_its_own_without_which_nobody_joins() -> None:
    # A session of another test of this process may be open.
    outside = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_TOKEN_PATH"}
    done = subprocess.run(
        [sys.executable, "-c", WITH_A_TOKEN],
        env={**outside, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "of another cluster"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("modes 0o600 0o700") == 2, "also of a session that follows, as after a restart"
    assert lines.count("answer True") == 2
    assert lines.count("in clear []") == 2
    assert [line for line in lines if line.startswith("joined")] == [
        "joined ['RAY_AUTH_MODE'] False True",
        "joined ['RAY_AUTH_TOKEN_PATH'] False True",
        "joined [] True False",
    ]
    assert lines[-1] == "as before ['disabled', None, 'of another cluster']"


def test_a_session_remembers_no_calls(session: RaySession) -> None:
    class Echo:
        def say(self, number: int) -> int:
            return number

    echo = ray.remote(num_cpus=0)(Echo).remote()
    ray.get(echo.say.remote(0))
    before = _megabytes_of_gcs(session)
    for _ in range(25):
        ray.get([echo.say.remote(number) for number in range(400)])
    time.sleep(2.0)  # Ray's processes report every second
    assert _megabytes_of_gcs(session) - before < 10  # Ray by itself: 66 MB for 20,000 calls


def _megabytes_of_gcs(session: RaySession) -> float:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes()
            if b"gcs_server" in words and str(session.folder).encode() in words:
                held = re.search(r"VmRSS:\s+(\d+) kB", (process / "status").read_text())
                assert held is not None
                return int(held[1]) / 1024
    raise AssertionError("the session has no server")
