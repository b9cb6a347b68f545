"""vLLM with prompts that hold images: in an engine and in a server it computes what the trainer does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import stub_torchvision

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]
LARGEST = 1e-5


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["vllm", "http"])
def test_log_probabilities_with_images_are_the_trainers_after_each_sync_of_the_tower_too(
    kind: str, tmp_path: Path
) -> None:
    places = [str(ROOT)]
    if stub_torchvision.is_needed():
        places.append(str(stub_torchvision.install(tmp_path)))
    completed = subprocess.run(
        [sys.executable, "-m", "tests.support.vision_engines", kind],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert completed.returncode == 0, completed.stdout[-2000:] + completed.stderr[-6000:]
    found: dict[str, float] = json.loads(completed.stdout.splitlines()[-1])
    print(f"\n{kind}: largest differences of a log-probability: {found}")
    assert {"loaded", "sync_1", "sync_2"} <= set(found)
    assert max(found.values()) < LARGEST
