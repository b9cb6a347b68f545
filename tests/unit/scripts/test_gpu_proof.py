"""`scripts/gpu_proof.sh`, rehearsed on a CPU: a piece that fails has its verdict, and the others go on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.process_trees import is_running

ROOT = Path(__file__).resolve().parents[3]


def proof(output: Path, *pieces: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "scripts" / "gpu_proof.sh"), *pieces],
        env={**os.environ, "DEVICE": "cpu", "OUTPUT_DIR": str(output), "PYTHON": sys.executable, **environment},
        cwd=output.parent,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_a_piece_or_a_device_that_there_is_not_is_refused_before_anything_runs(tmp_path: Path) -> None:
    ran = proof(tmp_path / "out", "selftest", "nothing")
    assert ran.returncode == 1
    assert "unknown piece 'nothing': choose from selftest, measure, learn, resume, large" in ran.stderr
    assert ran.stdout == ""
    ran = proof(tmp_path / "out", DEVICE="tpu")
    assert "DEVICE=tpu: choose cuda or cpu" in ran.stderr


@pytest.mark.slow
def test_what_a_piece_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    """In a session of its own, as workers are, which no signal of `timeout` reaches."""
    python, left = tmp_path / "python", tmp_path / "left"
    python.write_text(f"""#!/bin/sh
[ -z "$GPU_PROOF" ] || {{ setsid sleep 600 & echo $! >{left}; }}
exec {sys.executable} "$@"
""")
    python.chmod(0o755)
    ran = proof(tmp_path / "out", "selftest", PYTHON=str(python), SELFTEST_ARGS="--only nothing")
    assert ran.returncode == 1
    assert not is_running(int(left.read_text()))


@pytest.mark.slow
def test_a_piece_that_fails_ends_no_other(tmp_path: Path) -> None:
    page = ROOT / "docs" / "status.md"
    before = page.read_text(encoding="utf-8")
    ran = proof(tmp_path / "out", "selftest", "measure", SELFTEST_ARGS="--only nothing", BUDGET="0")
    assert ran.returncode == 1
    assert ran.stderr.endswith("error: failed: selftest\n")
    first, second = ran.stdout.splitlines()
    assert first.startswith("| selftest | FAILED, exit status 2 |")
    assert "no such case" in first
    assert second.startswith("| measure | passed |")
    copy = (tmp_path / "out" / "docs" / "status.md").read_text(encoding="utf-8")
    assert f"{first}\n{second}\n<!-- end of gpu proof -->" in copy
    assert "A rehearsal on a CPU" in copy
    assert page.read_text(encoding="utf-8") == before, "the pages of a rehearsal are copies"
