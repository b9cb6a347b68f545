"""The benchmark of the controller runs, and what it compares with is what it says."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts" / "bench"))
import controller

SMALL = ["--prompts", "4", "--samples", "2", "--tokens-per-sequence", "50", "--repeats", "1"]


def test_the_step_is_calculated_from_the_stated_speeds():
    args = controller.parse(
        [*SMALL, "--turns=1", "--parameters=1e9", "--gpus=2", "--generated-tokens-per-s-per-gpu=160"]
    )
    args.peak_tflops, args.mfu = 1.0, 0.5
    rollouts = controller.rollouts_of(args)
    generation_s, update_s = controller.step_seconds(args, rollouts)
    assert generation_s == pytest.approx(8 * 40 / (2 * 160))
    assert update_s == pytest.approx(8 * 1e9 * 8 * 50 / (2 * 1e12 * 0.5))


@pytest.mark.parametrize("layout", [[], ["--step-wise"]])
def test_every_piece_is_in_the_table(capsys, layout):
    assert controller.main([*SMALL, *layout, "--parameters", "1e15"]) == 0
    shown = capsys.readouterr().out
    for piece in ("assemble rows", "estimate advantages", "close mini-batches", "metrics.jsonl", "rollout log"):
        assert piece in shown
    assert "within the target of 3%" in shown
