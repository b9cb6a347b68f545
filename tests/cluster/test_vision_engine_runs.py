"""Whole runs with images on vLLM, in this process and on Ray: what is sampled is what the trainer scores, step by step."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import stub_torchvision
from tests.support.command_runs import RAY, records
from tests.support.vision_engines import WIDE_HEADS
from tests.support.vision_runs import command, rl_settings, save_model, write_rows

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("kind", ["inline", "ray"])
def test_rollouts_with_images_are_of_the_weights_that_are_trained(kind: str, tmp_path: Path) -> None:
    settings = rl_settings(save_model(tmp_path / "model", text=WIDE_HEADS), write_rows(tmp_path / "rows")[0])
    settings |= {"generator.backend": "vllm", "trainer.total_steps": 3, "trainer.layout": "packed"}
    if kind == "ray":
        settings |= dict(each.split("=") for each in RAY)
        settings |= {"placement.policy_num_workers": 2, "strategy.name": "fsdp2"}
    places = [str(ROOT)]
    if stub_torchvision.is_needed():
        places.append(str(stub_torchvision.install(tmp_path / "stub")))
    done = command("skyrl_train.main", tmp_path / "run", settings, environment={"PYTHONPATH": os.pathsep.join(places)})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = records(tmp_path / "run")
    differences = [record["policy/rollout_logprob_diff_max"] for record in found]
    syncs = records(tmp_path / "run", "weight_sync.jsonl")
    print(f"\n{kind}: {differences}, probe {syncs[0]['probe_difference']:.1e}, {found[-1]['timing/step']:.1f} s a step")
    assert [record["step"] for record in found] == [1, 2, 3]
    assert [sync["version"] for sync in syncs] == [0, 1, 2, 3]
    assert max(differences) < 1e-5
    assert len(list((tmp_path / "run" / "images").iterdir())) == 8
