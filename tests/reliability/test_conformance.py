"""The suite of tests/conformance, in a client's environment: the reference server passes, each planted bug is caught.

The repository's own pytest collects none of the suite's checks, whose files are named otherwise: the SDK that they need is
not installed beside the trainer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def ran(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=580, check=False)


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


@pytest.mark.slow
def test_every_planted_bug_is_caught(interpreter: str) -> None:
    """Each of at least 30 bugs fails the check that is named for it, and unrelated ones pass."""
    done = ran(interpreter, str(SUITE / "planted.py"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert sum(line.startswith("| ") for line in done.stdout.splitlines()) - 1 >= 30
