"""Packed rows of which one is long and many are short: losses pad them, and that is part of the budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_train.batch.planner import MemoryAwareBatchIterator
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.fields import LayoutChoice
from skyrl_train.config.models import OptimizerConfig
from skyrl_train.learner.memory.meter import CountingMeter
from skyrl_train.learner.memory.probe import Prober
from skyrl_train.learner.memory.sizing import SizingLimits, size_micro_batches
from tests.support.layout_cases import close
from tests.support.learner_cases import make_batch, make_learner, save_tiny_model
from tests.support.memory_cases import MIB

LIMITS = SizingLimits(longest=64, max_rows=600, limit_bytes=4 * MIB, margin=0.05, retries=3)
ADVERSARIAL = [64] + [3] * 440


@pytest.mark.parametrize("layout", ["packed", pytest.param("prefix_shared", marks=pytest.mark.slow)])
def test_one_long_row_with_hundreds_of_short_ones_stays_within_the_budget(tmp_path: Path, layout: LayoutChoice) -> None:
    learner = make_learner(
        save_tiny_model(tmp_path),
        role="policy",
        algorithm=AlgorithmConfig(kl_loss_coef=0.1, entropy_coef=0.02),
        double=False,
        optimizer=OptimizerConfig(lr=1e-2),
        layout=layout,
    )
    meter = CountingMeter(LIMITS.limit_bytes)
    report = size_micro_batches(learner, meter, LIMITS)
    assert 0 < report.budgets.cell_shares[0] < 1
    closed = close(make_batch(ADVERSARIAL, prompt_length=1))
    metrics = learner.forward_backward(closed)
    assert metrics["memory/policy_redone"].value == 0
    assert 0.3 * LIMITS.limit_bytes < metrics["memory/policy_peak_gib"].value * (1 << 30) <= LIMITS.limit_bytes
    learner.forward(closed.batch)
    assert learner.engine.oom_retry.metrics()["memory/policy_redone"].value == 0
    if layout == "packed":
        batches = learner.engine.passes.micro_batching
        assert isinstance(batches, MemoryAwareBatchIterator)
        batches.budgets = replace(report.budgets, cell_shares=(0.0, 0.0))
        assert learner.forward_backward(closed)["memory/policy_redone"].value > 0, "which it would have left otherwise"


@pytest.mark.slow
@pytest.mark.parametrize("layout", [pytest.param("prefix_shared", marks=pytest.mark.nightly), "auto"])
@pytest.mark.parametrize("probed", [True, False])
def test_hundreds_of_rows_with_one_prompt_stay_within_the_budget(
    tmp_path: Path, layout: LayoutChoice, probed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """500 rows of 64 tokens of which 63 are common: 32,000 tokens with their columns and losses at some 100 positions."""
    if not probed:
        monkeypatch.setattr(Prober, "grow_trees", lambda *_, **__: [])
    learner = make_learner(
        save_tiny_model(tmp_path), algorithm=AlgorithmConfig(kl_loss_coef=0.1, entropy_coef=0.02), layout=layout
    )
    limits = replace(LIMITS, limit_bytes=6 * MIB)
    size_micro_batches(learner, CountingMeter(limits.limit_bytes), limits)
    batch = make_batch([64] * 500, prompt_length=1, samples=500)
    ids = batch["input_ids"].clone().view(500, 64)
    ids[:, :63] = ids[0, :63].clone()
    metrics = learner.forward_backward(close(batch.with_columns(input_ids=ids.flatten())))
    assert (metrics["memory/policy_redone"].value == 0) is probed, "without such probes memory runs out"
    if probed:
        assert 0.4 * limits.limit_bytes < metrics["memory/policy_peak_gib"].value * (1 << 30) <= limits.limit_bytes
