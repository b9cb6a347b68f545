"""A custom planner on a real learner: it is probed and sized as `auto` is, and called again where memory ran out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.batch.planner import Forward, MemoryAwareBatchIterator, RowFacts, TokenBudgets
from skyrl_train.config import Config
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.fields import LayoutChoice
from skyrl_train.config.models import ModelConfig, OptimizerConfig, PolicyConfig
from skyrl_train.errors import BatchError, MemoryLimitError
from skyrl_train.learner.build import build_engine
from skyrl_train.learner.memory.sizing import size_run
from skyrl_train.learner.policy import PolicyLearner
from skyrl_train.model import load_causal_lm
from skyrl_train.registry import PartSpec, reads
from tests.support.layout_cases import close, flat_gradient
from tests.support.learner_cases import make_batch, make_double, save_tiny_model, settings_of
from tests.support.memory_cases import FailingMeter

LENGTHS = [9, 14, 7, 12, 16, 8, 10, 11, 13, 9, 15, 6]
CALLS: list[tuple[bool, int]] = []
"""Phase and budget of each call of a planner of this module."""


@reads("memory_budget")
def sized(rows: RowFacts, *, most: int = 1000) -> list[Forward]:
    """As many rows as fit, in order; under `auto`, packed and padded forwards in turns."""
    CALLS.append((rows.training, rows.budget))
    forwards: list[Forward] = []
    taken: list[int] = []
    for row in rows.order.tolist():
        layout = _layout(rows, len(forwards))
        if len(taken) == most or not rows.fits([*taken, row], layout):
            forwards.append(Forward(taken, layout))
            taken = []
        taken.append(row)
    return [*forwards, Forward(taken, _layout(rows, len(forwards)))]


def _layout(rows: RowFacts, number: int) -> Any:
    return ("packed", "padded", None)[number % 3] if rows.layout == "auto" else None


@reads("memory_budget")
def all_at_once(rows: RowFacts) -> list[Forward]:
    return [Forward(range(rows.num_rows))]


def one_by_one(rows: RowFacts) -> list[Forward]:
    CALLS.append((rows.training, rows.budget))
    return [Forward([row]) for row in range(rows.num_rows)]


def config_of(
    folder: Path, planner: PartSpec, *, layout: LayoutChoice = "padded", gib: float = 0.003, **trainer: Any
) -> Config:
    algorithm = AlgorithmConfig(kl_loss_coef=0.1, entropy_coef=0.02)
    policy = PolicyConfig(optimizer=OptimizerConfig(lr=1e-2))
    settings = {"micro_batching": planner, "layout": layout, "memory_budget_gb": gib, **trainer}
    return Config(
        model=ModelConfig(path=str(folder)),
        trainer=replace(Config().trainer, policy=policy, algorithm=algorithm, **settings),
    )


def learner_of(config: Config) -> PolicyLearner:
    """As a run builds it, in float64."""

    def load(model: ModelConfig, device: str, **settings: Any) -> Any:
        loaded = load_causal_lm(model, device, **settings)
        make_double(loaded)
        return loaded

    settings = settings_of(config, "policy")
    engine = build_engine(settings, load=load, empty=lambda model: load(model, "meta"))
    return PolicyLearner(engine, model=config.model, algorithm=config.trainer.algorithm, temperature=1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def start(config: Config, file: Path) -> tuple[PolicyLearner, TokenBudgets]:
    """A learner whose micro-batches were sized as at the beginning of a run."""
    learner = learner_of(config)
    (line,) = size_run(config.trainer, [learner], file, longest=32, max_rows=64)
    assert "probes" in line
    batches = learner.engine.passes.micro_batching
    assert isinstance(batches, MemoryAwareBatchIterator)
    return learner, batches.budgets


@pytest.mark.parametrize("layout", ["padded", pytest.param("auto", marks=pytest.mark.slow)])
def test_a_planner_that_reads_the_memory_budget_is_given_what_auto_finds(
    folder: Path, tmp_path: Path, layout: LayoutChoice
) -> None:
    spec = {"_target_": "test_custom_planner:sized", "most": 5}
    learner, budgets = start(config_of(folder, spec, layout=layout), tmp_path / "own.json")
    reference, expected = start(config_of(folder, "auto", layout=layout), tmp_path / "auto.json")
    assert budgets == expected
    assert budgets.training < budgets.forward
    closed = close(make_batch(LENGTHS * 4))
    CALLS.clear()
    metrics = learner.forward_backward(closed)
    learner.forward(closed.batch)
    assert [(True, budgets.training), (False, budgets.forward)] == CALLS
    assert metrics["memory/policy_redone"].value == 0
    assert metrics["memory/policy_tokens_per_micro_batch"].value == budgets.training
    if layout == "auto":
        assert {name for name in metrics if "forwards_" in name} == {
            f"layout/policy_forwards_{name}" for name in ("padded", "packed", "prefix_shared")
        }
    reference.forward_backward(closed)
    assert apart(learner, reference) < 1e-12


def apart(mine: PolicyLearner, other: PolicyLearner) -> float:
    expected = flat_gradient(other)
    return float((flat_gradient(mine) - expected).abs().max() / expected.abs().max())


@pytest.mark.slow
def test_where_memory_runs_out_the_planner_is_called_again_with_a_smaller_budget(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder, "test_custom_planner:sized")
    calm, budgets = start(config, tmp_path / "calm.json")
    learner, _ = start(config, tmp_path / "disturbed.json")
    batches, meter = learner.engine.passes.micro_batching, FailingMeter()
    assert isinstance(batches, MemoryAwareBatchIterator)
    batches.lower(64, training=True)
    learner.engine.oom_retry.begin(meter, batches, retries=3, resident=learner.engine.held_tensors)
    closed = close(make_batch(LENGTHS))
    calm.forward_backward(closed)
    meter.refuse(150, 400)
    CALLS.clear()
    metrics = learner.forward_backward(closed)
    assert metrics["memory/policy_redone"].value == 2
    phases, told = zip(*CALLS)
    assert phases == (True, True, True)
    assert told[0] == 64
    assert told[0] > told[1] > told[2] >= 1
    assert apart(learner, calm) < 1e-12
    learner.forward(closed.batch)
    assert CALLS[-1] == (False, budgets.forward), "scoring keeps its own"
    meter.refuse(*range(1, 2000))
    with pytest.raises(MemoryLimitError, match=r"after 3 smaller attempts|cannot be cut further"):
        learner.forward_backward(closed)


def test_a_planner_that_ignores_the_budget_which_it_reads_is_refused_and_not_run_out_of_memory(
    folder: Path, tmp_path: Path
) -> None:
    learner, budgets = start(config_of(folder, "test_custom_planner:all_at_once"), tmp_path / "memory.json")
    rows = 1 + budgets.training // 16
    with pytest.raises(
        BatchError, match=rf"put {rows} rows with {16 * rows} positions .* {budgets.training} were found"
    ):
        learner.forward_backward(close(make_batch([16] * rows, samples=1)))


def test_a_planner_that_reads_no_memory_budget_is_not_probed_and_told_the_stated_caps(
    folder: Path, tmp_path: Path
) -> None:
    stated = {"max_tokens_per_microbatch": 77, "max_tokens_per_forward_microbatch": 99}
    config = config_of(folder, "test_custom_planner:one_by_one", gib=0.0, **stated)
    learner = learner_of(config)
    assert size_run(config.trainer, [learner], tmp_path / "memory.json", longest=32, max_rows=64) == []
    assert not (tmp_path / "memory.json").exists()
    batch = make_batch(LENGTHS)
    CALLS.clear()
    metrics = learner.forward_backward(close(batch))
    assert metrics["layout/policy_forwards_padded"].value == len(LENGTHS)
    assert torch.isfinite(learner.forward(batch)).all()
    assert CALLS == [(True, 77), (False, 99)]
