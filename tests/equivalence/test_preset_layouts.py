"""The command behind the table of layouts in docs/algorithms.md, on presets with a critic, a teacher or selected tokens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "preset_layouts.py"
PRESETS = ["kl_cov", "ppo", "distillation", "high_entropy", "rejection"]


@pytest.mark.nightly
def test_layouts_and_ranks_agree_on_the_gradient_norm_of_a_real_step() -> None:
    result = subprocess.run(
        [sys.executable, str(SCRIPT), *PRESETS], capture_output=True, text=True, timeout=900, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.findall(r"^\| `(\w+)` \| \d*\.?\d*[1-9]", result.stdout, flags=re.MULTILINE) == PRESETS
