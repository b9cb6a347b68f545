"""docs/algorithms.md: its tables are complete, and the examples that it links to run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import algorithm_table
from skyrl_train.algorithms.advantages import ADVANTAGE_ESTIMATORS
from skyrl_train.algorithms.losses.policy import POLICY_LOSSES
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.runs.cli import conf_dir
from tests.support.advantage_oracles import Sample, Step, advantage_inputs_of
from tests.support.loss_oracles import random_loss_inputs

DOCS = Path(__file__).resolve().parents[3] / "docs"
DOCUMENT = (DOCS / "algorithms.md").read_text(encoding="utf-8")
LOSSES = (DOCS / "add_loss.md").read_text(encoding="utf-8")


def test_the_table_has_every_registered_name_and_small_errors() -> None:
    section = DOCUMENT.split("<!-- table: ")[1].split("<!-- end of table -->")[0]
    rows = re.findall(r"^\| `([^`]+)` \| .* \| ([\d.e+-]+) \|$", section, flags=re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted([*ADVANTAGE_ESTIMATORS, *POLICY_LOSSES])
    assert max(float(error) for _, error in rows) < 1e-13


def test_the_script_measures_what_the_table_says() -> None:
    written = algorithm_table.rewrite(DOCUMENT, num_cases=1)
    blank = re.compile(r"\| [\d.e+-]+ \|$", flags=re.MULTILINE)
    assert blank.sub("|", written) == blank.sub("|", DOCUMENT)


def test_every_preset_has_one_gradient_in_all_layouts() -> None:
    """Written by `scripts/preset_layouts.py`, of which `tests/equivalence/test_preset_layouts.py` runs a part."""
    section = DOCUMENT.split("<!-- layouts: ")[1].split("<!-- end of layouts -->")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    assert [name.strip("`") for name, *_ in rows] == sorted(
        path.stem for path in (conf_dir() / "algorithm").glob("*.yaml")
    )
    for _, norm, *differences in rows:
        in_float64, in_float32 = (cell.split(", ")[:2] for cell in differences)  # in float32 flipped tokens may follow
        assert len(in_float64) == len(in_float32) == 2
        assert float(norm) > 0
        assert max(map(float, in_float64)) <= 1e-10
        assert max(map(float, in_float32)) <= 1e-5


def example(name: str) -> Any:
    """The function of that name from the code blocks of the page on losses, to which this one sends."""
    assert "](add_loss.md)" in DOCUMENT
    blocks = re.findall(r"```python\n(.*?)```", LOSSES, flags=re.DOTALL)
    (block,) = [block for block in blocks if f"def {name}(" in block]
    namespace: dict[str, Any] = {}
    exec(block, namespace)
    return namespace[name]


def test_the_documented_estimator_runs() -> None:
    samples = [
        Sample(prompt=0, steps=[Step(context=1, values=[0.0], reward=r, old_logprobs=[0.0], ref_logprobs=[0.0])])
        for r in (1.0, 2.0)
    ]
    inputs = advantage_inputs_of(samples, step_wise=False)
    assert example("centred")(inputs, AlgorithmConfig()).advantages.tolist() == [[0.0, -0.5], [0.0, 0.5]]


@pytest.mark.parametrize("seed", range(3))
def test_the_documented_loss_runs_and_keeps_junk_out(seed: int) -> None:
    inputs = random_loss_inputs(seed)
    inputs = replace(inputs, values=inputs.advantages)
    losses = example("unclipped")(inputs, AlgorithmConfig(), confidence=0.5).token_losses
    (gradient,) = torch.autograd.grad(losses.sum(), inputs.logprobs)
    assert torch.isfinite(gradient).all()
    assert losses[inputs.loss_mask].any()
    assert not losses[~inputs.loss_mask].any()
