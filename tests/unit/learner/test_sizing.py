"""Probing, budgets and retries after out-of-memory of one process, with a byte budget on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from skyrl_train.batch.planner import MemoryAwareBatchIterator, TokenBudgets
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.models import OptimizerConfig
from skyrl_train.errors import MemoryLimitError
from skyrl_train.learner.memory.meter import CountingMeter
from skyrl_train.learner.memory.probe import Prober, lengths_to_probe
from skyrl_train.learner.memory.sizing import SizingLimits, SizingReport, read_reports, size_all, write_reports
from skyrl_train.learner.optimizer import allocate_state, build_optimizer
from skyrl_train.learner.policy import PolicyLearner
from tests.support.layout_cases import close, flat_gradient
from tests.support.learner_cases import make_batch, make_learner, save_tiny_model
from tests.support.memory_cases import MIB, FailingMeter, size_itself

LIMITS = SizingLimits(longest=32, max_rows=64, limit_bytes=2 * MIB, margin=0.05, retries=3)
LENGTHS = [9, 14, 7, 12, 16, 8, 10, 11, 13, 9, 15, 6]
ALGORITHM = AlgorithmConfig(kl_loss_coef=0.1, entropy_coef=0.02)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def learner_of(folder: Path, *, role: str = "policy", double: bool = False) -> PolicyLearner:
    optimizer = OptimizerConfig(lr=1e-2)
    return make_learner(folder, role=role, algorithm=ALGORITHM, double=double, optimizer=optimizer)


def everything(learner: PolicyLearner) -> list[Tensor]:
    """Weights, optimizer state and torch's randomness, copied."""
    engine = learner.engine
    return [tensor.detach().clone() for tensor in engine.held_tensors()] + [torch.get_rng_state()]


def test_probed_lengths_halve_from_the_longest() -> None:
    assert lengths_to_probe(512) == [512, 256, 128]
    assert lengths_to_probe(5) == [5, 2]
    assert lengths_to_probe(1) == [2]


def test_a_probe_changes_nothing(folder: Path) -> None:
    learner = learner_of(folder)
    learner.forward_backward(close(make_batch(LENGTHS)))
    learner.optim_step()
    before, facts = everything(learner), (learner.engine.num_optimizer_steps, learner.engine.num_documents)
    prober = Prober(learner=learner, meter=CountingMeter(MIB << 10))
    for training in (True, False):
        probe = prober.probe(3, 16, training=training)
        assert probe is not None
        assert (probe.rows, probe.longest, probe.positions, probe.training) == (3, 16, 48, training)
    assert prober.probe(3, 16, training=True) == prober.probe(3, 16, training=True)
    assert Prober(learner=learner, meter=CountingMeter(MIB >> 1)).probe(64, 32, training=True) is None
    after = everything(learner)
    assert len(after) == len(before)
    assert all(torch.equal(mine, other) for mine, other in zip(before, after))
    assert all(parameter.grad is None for parameter in learner.engine.parameters.values())
    assert (learner.engine.num_optimizer_steps, learner.engine.num_documents) == facts


def test_a_step_after_sizing_is_the_step_without(folder: Path) -> None:
    plain, sized = learner_of(folder, double=True), learner_of(folder, double=True)
    size_all([sized], LIMITS, {})
    for learner in (plain, sized):
        for _ in range(2):
            learner.forward_backward(close(make_batch(LENGTHS)))
            learner.optim_step()
    assert plain.engine.num_documents == sized.engine.num_documents
    for name, weight in plain.engine.parameters.items():
        assert torch.allclose(weight, sized.engine.parameters[name], rtol=0, atol=1e-10)


def test_state_that_is_made_early_is_what_the_first_step_would_make() -> None:
    weights = []
    for early in (True, False):
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(3, 4))
        optimizer = build_optimizer({"weight": parameter}, OptimizerConfig(lr=0.1))
        if early:
            allocate_state(optimizer)
        for _ in range(3):
            parameter.grad = torch.randn(3, 4)
            optimizer.step()
        weights.append(parameter.detach())
    assert torch.equal(*weights)


@pytest.mark.slow
def test_every_micro_batch_under_the_budget_fits(folder: Path) -> None:
    learner = learner_of(folder)
    report = size_all([learner], LIMITS, {})["policy"]
    assert report.training is not None
    assert report.training.tokens < report.forward.tokens
    generator = torch.Generator().manual_seed(0)
    for round_ in range(5):
        lengths = torch.randint(4, 33, (40,), generator=generator).tolist()
        learner.forward_backward(close(make_batch(lengths, seed=round_)))
        metrics = learner.optim_step() | learner.engine.oom_retry.metrics()
        assert metrics["memory/policy_redone"].value == 0
    prober = Prober(learner=learner, meter=CountingMeter(MIB << 10))
    rows = report.training.tokens // 32
    probe = prober.probe(rows, 32, training=True)
    assert probe is not None
    assert 0.85 * LIMITS.limit_bytes < probe.peak_bytes <= LIMITS.limit_bytes


def test_models_of_one_process_share_its_budget(folder: Path) -> None:
    alone = size_all([learner_of(folder)], LIMITS, {})["policy"]
    learners = [learner_of(folder), learner_of(folder, role="reference")]
    together = size_all(learners, LIMITS, {})
    assert together["reference"].training is None
    assert together["policy"].budgets.training < alone.budgets.training


def through_json(report: SizingReport, folder: Path) -> SizingReport:
    write_reports(folder / "memory.json", {report.name: (report,)})
    return read_reports(folder / "memory.json")[report.name][0]


@pytest.mark.slow
def test_a_report_survives_json_and_is_used_again_for_the_same_model_alone(folder: Path, tmp_path: Path) -> None:
    learner = learner_of(folder)
    report = size_all([learner], LIMITS, {})["policy"]
    restored = through_json(report, tmp_path)
    assert restored == report
    again = size_all([learner_of(folder)], LIMITS, {"policy": restored})["policy"]
    assert again == replace(report, is_reused=True)
    assert "of the run that is resumed" in again.line()
    longer = replace(LIMITS, longest=24)
    assert not size_all([learner_of(folder)], longer, {"policy": restored})["policy"].is_reused


def test_a_budget_of_one_long_row_is_found(folder: Path) -> None:
    limits = replace(LIMITS, limit_bytes=520_000)
    report = size_all([learner_of(folder)], limits, {})["policy"]
    assert 32 <= report.budgets.training < 64


def test_a_row_that_does_not_fit_is_named_with_what_to_change(folder: Path) -> None:
    limits = replace(LIMITS, limit_bytes=400_000)
    with pytest.raises(MemoryLimitError, match=r"one row of 32 tokens.*generator.max_context_length"):
        size_all([learner_of(folder)], limits, {})


def retried(
    folder: Path, *refused: int, tokens: int = 64, retries: int = 3
) -> tuple[PolicyLearner, MemoryAwareBatchIterator]:
    learner = learner_of(folder, double=True)
    meter = FailingMeter()
    batches = size_itself(learner.engine, meter, tokens=tokens, retries=retries)
    meter.refuse(*refused)
    return learner, batches


def test_memory_that_runs_out_leaves_the_gradient_as_it_would_have_been(folder: Path) -> None:
    expected_of, _ = retried(folder)
    expected_metrics = expected_of.forward_backward(close(make_batch(LENGTHS)))
    expected = flat_gradient(expected_of)
    meter = FailingMeter()
    counted = learner_of(folder, double=True)
    size_itself(counted.engine, meter, tokens=64)
    counted.forward_backward(close(make_batch(LENGTHS)))
    last = meter.num_allocations  # by then micro-batches before this one have left gradients, which must go
    for refused in [(1,), (150,), (290,), (last,), (60, 400)]:
        learner, batches = retried(folder, *refused)
        metrics = learner.forward_backward(close(make_batch(LENGTHS)))
        found = flat_gradient(learner)
        assert float((found - expected).abs().max()) < 1e-12 * float(expected.abs().max()) + 1e-15
        assert metrics["memory/policy_redone"].value == len(refused)
        assert metrics["loss/total"].value == pytest.approx(expected_metrics["loss/total"].value, abs=1e-12)
        assert batches.budgets.training < 64
        assert batches.budgets.forward == 64


def test_a_scoring_is_retried_too(folder: Path) -> None:
    calm, _ = retried(folder)
    learner, batches = retried(folder, 40)
    batch = make_batch(LENGTHS)
    assert torch.allclose(learner.forward(batch), calm.forward(batch), atol=1e-12)
    assert batches.budgets == TokenBudgets(training=64, forward=batches.budgets.forward)
    assert batches.budgets.forward < 64


def test_it_gives_up_after_so_many_times_and_on_a_row_alone(folder: Path) -> None:
    learner, _ = retried(folder, *range(1, 400), retries=1)
    with pytest.raises(MemoryLimitError, match=r"after 1 smaller attempts.*trainer.memory_budget_gb"):
        learner.forward_backward(close(make_batch(LENGTHS)))
    learner, _ = retried(folder, 3)
    with pytest.raises(MemoryLimitError, match=r"1 row of at most 16 tokens.*cannot be cut further"):
        learner.forward_backward(close(make_batch([16])))


def test_other_errors_are_not_taken_for_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner, batches = retried(folder)

    def broken(*arguments: object, **settings: object) -> None:
        raise ValueError("a fault of its own")

    monkeypatch.setattr(learner, "_terms", broken)
    with pytest.raises(ValueError, match="a fault of its own"):
        learner.forward_backward(close(make_batch(LENGTHS)))
    assert batches.budgets.training == 64


def test_the_report_is_of_plain_values(folder: Path) -> None:
    report: SizingReport = size_all([learner_of(folder)], LIMITS, {})["policy"]
    assert report.line().startswith("policy")
    assert "GiB" in report.line()


ROOMY = SizingLimits(longest=32, max_rows=64, limit_bytes=4 * MIB, margin=0.05, retries=3)


@pytest.mark.parametrize("role", ["reference", pytest.param("policy", marks=pytest.mark.nightly)])
def test_both_measures_from_the_prediction_on_and_tells_the_difference(folder: Path, tmp_path: Path, role: str) -> None:
    measured = size_all([learner_of(folder, role=role)], ROOMY, {})[role]
    both = size_all([learner_of(folder, role=role)], replace(ROOMY, source="both"), {})[role]
    for mine, other in ((both.training, measured.training), (both.forward, measured.forward)):
        if mine is not None and other is not None:
            assert len(mine.probes) <= len(other.probes)
            assert mine.tokens == pytest.approx(other.tokens, rel=0.02)
            assert mine.predicted_tokens == pytest.approx(other.tokens, rel=0.02)
            assert mine.probes[0].positions > other.probes[0].positions
    assert f"forward {both.forward.predicted_tokens} (" in both.line()
    assert through_json(both, tmp_path) == both


@pytest.mark.slow
def test_a_trace_runs_nothing_and_names_a_row_that_does_not_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: object, **settings: object) -> int:
        raise AssertionError("a probe was run")

    monkeypatch.setattr(Prober, "_measured_peak", run)
    learner = learner_of(folder, role="reference")
    traced = size_all([learner], replace(ROOMY, source="trace", limit_bytes=MIB), {})["reference"]
    assert traced.forward.tokens == traced.forward.predicted_tokens > 32
    assert traced.forward.probes == ()
    assert "traced, nothing was run" in traced.line()
    small = replace(ROOMY, source="trace", limit_bytes=80_000)
    with pytest.raises(
        MemoryLimitError, match=r"scoring one row of 32 tokens.*by prediction.*generator.max_context_length"
    ):
        size_all([learner_of(folder, role="reference")], small, {})
