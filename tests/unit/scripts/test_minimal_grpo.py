"""The one-file trainer of the examples."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FILE = Path(__file__).resolve().parents[3] / "examples" / "minimal_grpo.py"


@pytest.fixture(scope="module")
def minimal() -> Any:
    spec = importlib.util.spec_from_file_location("minimal_grpo", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


def test_it_is_short() -> None:
    assert len(FILE.read_text().splitlines()) <= 300


def test_advantages_compare_the_samples_of_a_prompt(minimal: Any) -> None:
    samples = minimal.Samples(
        ids=torch.tensor([[5, 6, 7, 0], [5, 6, 7, 8], [5, 9, 0, 0], [5, 9, 3, 0]]),
        mask=torch.tensor([[0, 1, 1, 0], [0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0]]).bool(),
        rewards=torch.tensor([1.0, 0.0, 1.0, 1.0]),
        prompt_index=torch.tensor([0, 0, 1, 1]),
    )
    half = 0.5**0.5
    expected = [[0, half, half, 0], [0, -half, -half, -half], [0, 0, 0, 0], [0, 0, 0, 0]]
    torch.testing.assert_close(minimal.advantages_of(samples), torch.tensor(expected))


@pytest.mark.nightly
@pytest.mark.slow
def test_it_learns(minimal: Any) -> None:
    curve = minimal.train(minimal.parse(["--steps", "8"]))
    assert len(curve) == 8
    assert curve[-1] > curve[0] + 0.2
