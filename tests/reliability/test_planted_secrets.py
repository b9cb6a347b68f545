"""A real run that is told 200 secrets, by its environment and its command line, and says them wherever code can."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_runs import records
from tests.support.planted_secrets import Planted, planted

ROOT = Path(__file__).parents[2]
LEAKY = """
import base64, os, sys
from urllib.parse import quote

def report(facts):
    for name, value in os.environ.items():
        if any(part.isdigit() for part in name.split("_")):
            print(f"{name} refused {value}", base64.b64encode(value.encode()).decode(), quote(value, safe=""))
    return {}

def score(completion, places, at):
    if hash(completion) % 2:
        raise ValueError(f"401 of {places[hash(completion) % len(places)]}")
    return 1.0
"""


def found(folder: Path, secrets: list[Planted]) -> list[tuple[str, str]]:
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return [(str(path), each.kind) for path, text in files.items() for each in secrets if each.secret.encode() in text]


@pytest.mark.nightly
def test_a_run_that_is_told_two_hundred_secrets_keeps_none_of_them(tmp_path: Path) -> None:
    (tmp_path / "leaky.py").write_text(LEAKY)
    secrets = list(planted())
    by_shape = [each for each in secrets if each.name.startswith("PLACE_")]
    places = ",".join(f'"{each.text}"' for each in by_shape)
    arguments = [
        "platform=cpu",
        f"environment.reward={{_target_: 'leaky.py:score', at: 3, places: [{places}]}}",
        "trainer.metrics=['leaky.py:report']",
        "data.validation=[]",
        "environment.max_failed_fraction=1",
        *("generator.n_samples_per_prompt=4", "trainer.train_batch_size=8", "trainer.policy_mini_batch_size=8"),
        *("trainer.total_steps=2", "hydra.run.dir=run", "trainer.look=off", "tracker=[console,tensorboard]"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "skyrl_train.main", *arguments],
        cwd=tmp_path,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            **{each.name: each.text for each in secrets},
        },
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert found(tmp_path / "run", secrets) == []
    assert [each.kind for each in secrets if each.secret in done.stdout + done.stderr] == []
    failures = [each.get("failure") for each in records(tmp_path / "run", "rollouts/train_step_000001.parquet")]
    said = [each["message"] for each in failures if each]
    assert said
    assert all("401 of" in each and "<redacted>" in each for each in said)
    assert [each.kind for each in secrets for text in said if each.secret in text] == []
    assert (tmp_path / "run" / "run.log").read_text().count("<redacted>") >= 200
