"""Law 1 over ranks that share micro-batches: in float64, the scores and the gradient of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import distributed

from skyrl_train.batch.layouts import LAYOUTS as PLAIN, make_layout
from skyrl_train.batch.steps import stage
from skyrl_train.distributed import SequenceGroup
from skyrl_train.model import hidden_states
from tests.support.gloo_ranks import on_ranks
from tests.support.layout_cases import close, distance, tree_batch
from tests.support.memory_cases import DEADLINE_S, FailingMeter, size_itself
from tests.support.model_layouts import EXACT, build, states_and_gradient, tree
from tests.support.sequence_cases import (
    CASES,
    TIMEOUT_S,
    Case,
    Ranks,
    alone,
    make_learner,
    make_strategy,
    run_ranks,
    save_models,
)

TOLERANCE = 1e-10
POINTS = 8
"""Places in a step at which memory runs out."""
SLOW, NIGHTLY = pytest.mark.slow, pytest.mark.nightly


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("models")
    save_models(models)
    return models


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(Ranks(strategy="fsdp2", num_ranks=2, sequence_parallel_size=2), CASES[::2], marks=SLOW),
        pytest.param(Ranks(strategy="fsdp2", num_ranks=4, sequence_parallel_size=2), CASES[1::5], marks=NIGHTLY),
        pytest.param(Ranks(strategy="fsdp2", num_ranks=2, sequence_parallel_size=2), CASES[1::2], marks=NIGHTLY),
        pytest.param(Ranks(strategy="ddp", num_ranks=2, sequence_parallel_size=2), CASES[::3], marks=NIGHTLY),
        pytest.param(Ranks(strategy="fsdp2", num_ranks=4, sequence_parallel_size=2), CASES, marks=NIGHTLY),
        pytest.param(Ranks(strategy="fsdp2", num_ranks=4, sequence_parallel_size=4), CASES[::3], marks=NIGHTLY),
    ],
    ids=lambda value: value.name if isinstance(value, Ranks) else "",
)
def test_ranks_that_share_micro_batches_have_the_gradient_of_one(folder: Path, ranks: Ranks, cases: list[Case]) -> None:
    """Of four ranks in one group, two have the same key and value head."""
    found = run_ranks(folder, ranks, cases)
    for case in cases:
        expected = alone(folder, case)
        torch.testing.assert_close(found[case.name].scores, expected.scores, rtol=0, atol=1e-10)
        assert distance(found[case.name].gradient, expected.gradient) < TOLERANCE, case


def compare_families(rank: int, folder: Path) -> dict[tuple[int, str, str], tuple[float, float]]:
    """The largest differences of this rank's hidden states, and of the summed gradient, to those of one process."""
    group = SequenceGroup(2, timeout_s=TIMEOUT_S)
    found = {}
    for number, (kind, extra) in enumerate(EXACT):
        model, rows = build(kind, extra), tree()
        for name in ("padded", "prefix_shared"):
            expected, expected_gradient = states_and_gradient(model, PLAIN[name](rows))
            model.zero_grad()
            layout = make_layout(rows, name, group=group)
            own = layout.locate(layout.position_of_token)
            states = hidden_states(model, layout)[own[own >= 0]]
            weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
            (states * weights[own >= 0]).sum().backward()
            gradient = torch.cat([p.grad.flatten() for p in model.base_model.parameters() if p.grad is not None])
            distributed.all_reduce(gradient)
            difference = float((states.detach() - expected[own >= 0]).abs().max() / expected.abs().max())
            found[number, kind, name] = difference, distance(gradient, expected_gradient)
    return found


@SLOW
def test_every_supported_family_is_exact(tmp_path: Path) -> None:
    """Sliding windows, capped scores and scaled positions among them."""
    for found in on_ranks(compare_families, tmp_path, deadline_s=DEADLINE_S):
        assert len(found) == 2 * len(EXACT)
        assert {case: pair for case, pair in found.items() if max(pair) > 1e-5} == {}


def run_out_of_memory(rank: int, folder: Path, models: Path, ranks: Ranks) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Gradients of a step, and of the same one with memory running out on rank 1 at one point after another."""
    learner = make_learner(models, Case(layout="prefix_shared"), make_strategy(ranks))
    engine, meter, closed = learner.engine, FailingMeter(), close(tree_batch(12))

    def gradient(*refused: int) -> torch.Tensor:
        size_itself(engine, meter, tokens=40)
        meter.refuse(*refused)
        learner.forward_backward(replace(closed, batch=stage(closed.batch, 1).shards[0]))
        engine.strategy.reduce_gradients(engine.parameters.values())
        found = [engine.strategy.full(p.grad).flatten() for p in engine.parameters.values() if p.grad is not None]
        engine.zero_grad()
        return torch.cat(found)

    calm = gradient()
    total = engine.strategy.agree(meter.num_allocations)
    points = [1 + (total - 1) * index // (POINTS - 1) for index in range(POINTS)]
    return calm, [gradient(*([point] if rank else [])) for point in points]


@NIGHTLY
@pytest.mark.parametrize(
    "ranks",
    [
        Ranks(strategy="fsdp2", num_ranks=2, sequence_parallel_size=2),
        Ranks(strategy="fsdp2", num_ranks=2, tensor_parallel_size=2),
        Ranks(strategy="ddp", num_ranks=2, sequence_parallel_size=2),
    ],
    ids=lambda ranks: ranks.name,
)
def test_memory_that_runs_out_on_one_of_two_ranks_changes_no_gradient(
    folder: Path, tmp_path: Path, ranks: Ranks
) -> None:
    for calm, disturbed in on_ranks(run_out_of_memory, tmp_path, folder, ranks, deadline_s=DEADLINE_S):
        assert len(disturbed) == POINTS
        for found in disturbed:
            assert distance(found, calm) < TOLERANCE
