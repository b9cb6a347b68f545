"""The suite of tests/conformance, in a client's environment: the reference server passes, each planted bug is caught, and
`skyrl-serve` passes, whose process is killed and started again meanwhile.

The repository's own pytest collects none of the suite's checks, whose files are named otherwise: the SDK that they need is
not installed beside the trainer.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.support.serve_cases import HAS_SCHEMA, NEEDS_SCHEMA

ROOT = Path(__file__).parents[2]
SUITE = ROOT / "tests" / "conformance"


@pytest.fixture(scope="module")
def interpreter() -> str:
    """The interpreter that has the SDK: made on the first run, skipped where it cannot be."""
    if given := os.environ.get("CONFORMANCE_PYTHON"):
        return given
    if sys.version_info < (3, 11):
        pytest.skip("the SDK needs Python 3.11")
    script = ROOT / "scripts" / "client_env.sh"
    environment = {**os.environ, "SKYRL_TRAIN_PYTHON": sys.executable}
    made = subprocess.run([str(script)], capture_output=True, text=True, env=environment, timeout=580, check=False)
    if made.returncode != 0:
        pytest.skip(f"scripts/client_env.sh could not make the client's environment: {made.stderr[-300:]}")
    return made.stdout.strip().splitlines()[-1]


def ran(*words: str, timeout_s: float = 580) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=timeout_s, check=False
    )


@pytest.mark.slow
def test_the_reference_passes_every_check(interpreter: str, tmp_path: Path) -> None:
    """At least 150 checks, in every group, each named by a sentence; none fails, and none of `core` is not claimed."""
    done = ran(interpreter, "-m", "pytest", "tests/conformance", "-q", "--report", str(tmp_path / "report"))
    assert done.returncode == 0, done.stdout[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    checks = report["checks"]
    assert report["counts"]["fail"] == 0
    assert len(checks) >= 150
    assert {each["group"] for each in checks} == {path.stem.removeprefix("check_") for path in SUITE.glob("check_*.py")}
    assert all(each["says"].endswith(".") for each in checks)
    assert len({each["check"] for each in checks}) == len(checks)
    assert all(each["profile"] == "full" for each in checks if each["verdict"] == "not claimed")
    assert (tmp_path / "report.md").read_text().count("\n| `") == len(checks)


@pytest.mark.nightly
@pytest.mark.slow
def test_every_planted_bug_is_caught(interpreter: str) -> None:
    """Each of at least 30 bugs fails the check that is named for it, and unrelated ones pass."""
    done = ran(interpreter, str(SUITE / "planted.py"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert sum(line.startswith("| ") for line in done.stdout.splitlines()) - 1 >= 30


_AGAIN = """#!/bin/sh
cd {folder} || exit 1
export PYTHONPATH={root}
if [ -f pid ]; then
    old=$(cat pid)
    kill -9 "$old"
    while kill -0 "$old" 2>/dev/null && ! grep -q "^State:.Z" "/proc/$old/status" 2>/dev/null; do sleep 0.05; done
fi
setsid {python} -m skyrl_train.main_serve --folder served --port {port} --keys keys --name tiny/qwen2 \\
    >>log 2>&1 </dev/null &
echo $! >pid
"""
"""Kills the server, if there is one, and starts it with the same state, in a process group of its own."""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of a server of two tenants, and the command that starts it again."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (tmp_path / "keys").write_text("tml-aaaaaaaa ann\ntml-bbbbbbbb bob\n")
    again = tmp_path / "again"
    again.write_text(_AGAIN.format(folder=tmp_path, root=ROOT, python=sys.executable, port=port))
    again.chmod(0o700)
    subprocess.run([str(again)], check=True, timeout=60)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urlopen(f"http://127.0.0.1:{port}/api/v1/healthz", timeout=10):
            break
        time.sleep(0.2)
    yield f"http://127.0.0.1:{port}", again
    with contextlib.suppress(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


@pytest.mark.nightly
@pytest.mark.skipif(not HAS_SCHEMA, reason=NEEDS_SCHEMA)
def test_our_server_passes_every_check(interpreter: str, served: tuple[str, Path], tmp_path: Path) -> None:
    """With the tiny model in float32; what it does not claim is what its capabilities deny."""
    url, again = served
    options = [f"--server={url}", "--key=tml-aaaaaaaa", "--other-key=tml-bbbbbbbb", f"--restart={again}"]
    options += [f"--tokenizer={ROOT}/skyrl_train/data/assets/tiny_qwen2", f"--report={tmp_path / 'report'}"]
    done = ran(interpreter, "-m", "pytest", "tests/conformance", "-q", *options, timeout_s=1500)
    assert done.returncode == 0, done.stdout[-3000:] + (tmp_path / "log").read_text()[-2000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["counts"]["fail"] == 0
    assert len(report["checks"]) >= 450
    denied = {each["check"] for each in report["checks"] if each["verdict"] == "not claimed"}
    assert denied == {"losses.gspo_sign"}
