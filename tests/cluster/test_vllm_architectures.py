"""Every architecture that trains, synced to a real vLLM engine on the CPU: it computes as the trainer does, or is refused
before a step is trained. One in CI, with experts; all of them by scripts/nightly.sh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.cluster.architectures import ARCHITECTURES

IN_CI = ("qwen3_moe",)
REFUSED: Mapping[str, str] = {
    "deepseek_v3": "more than 0.001 (generator.weight_sync_tolerance). It does not compute with the trainer's weights",
    "gemma3_multimodal": "vLLM's gemma3 needs torchvision",
    "gpt_oss": "vLLM cannot take new weights of a gpt_oss model",
}
"""Those that vLLM 0.32 cannot take from the trainer, or computes otherwise on a CPU, and what the error names."""
LARGEST = 1e-5


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.cluster if name in IN_CI else pytest.mark.nightly) for name in ARCHITECTURES],
)
def test_an_engine_computes_what_the_trainer_does_after_each_sync_or_refuses(name: str) -> None:
    completed = subprocess.run(
        [sys.executable, "-m", "tests.cluster.architectures", name],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-4000:]
    told = json.loads(completed.stdout.splitlines()[-1])
    if name in REFUSED:
        assert isinstance(told, str)
        assert REFUSED[name] in told
    else:
        assert isinstance(told, dict), told
        assert max(told.values()) <= LARGEST, told
