from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "bench" / "batching.py"


@pytest.mark.slow
def test_the_benchmark_finds_its_promises_kept():
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--sizes", "1024", "10240", "--check"],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(SCRIPT.parents[2]), "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "10,240" in run.stdout
