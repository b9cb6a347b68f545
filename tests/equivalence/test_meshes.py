"""Ranks of a sharded model in a grid: groups that hold the same shards, ranks with parts of each matrix. The gradient is
that of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from skyrl_train.distributed import SingleProcess
from tests.support.layout_cases import distance
from tests.support.sequence_cases import CASES, Case, Ranks, alone, make_learner, outcome, run_ranks, save_models

SLOW, NIGHTLY = pytest.mark.slow, pytest.mark.nightly
TOLERANCE = 1e-10
WHOLE = [case for case in CASES if not case.adapter]


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
        pytest.param(
            Ranks(strategy="fsdp2", num_ranks=4, fsdp_size=2, sequence_parallel_size=2, layers_ahead=1),
            CASES[::6],
            marks=NIGHTLY,
        ),
        pytest.param(Ranks(strategy="fsdp2", num_ranks=2, tensor_parallel_size=2), WHOLE[::3], marks=SLOW),
        pytest.param(
            Ranks(strategy="fsdp2", num_ranks=4, tensor_parallel_size=2, cpu_offload=True), WHOLE[1::4], marks=NIGHTLY
        ),
        pytest.param(Ranks(strategy="fsdp2", num_ranks=4, fsdp_size=2), CASES[::3], marks=NIGHTLY),
        pytest.param(
            Ranks(strategy="fsdp2", num_ranks=4, fsdp_size=2, cpu_offload=True, layers_ahead=1),
            CASES[1::8],
            marks=NIGHTLY,
        ),
        pytest.param(Ranks(strategy="fsdp2", num_ranks=4, tensor_parallel_size=2), WHOLE[1::4], marks=NIGHTLY),
        pytest.param(
            Ranks(strategy="fsdp2", num_ranks=4, fsdp_size=1, tensor_parallel_size=2), WHOLE[2::6], marks=NIGHTLY
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Ranks) else "",
)
def test_a_grid_of_ranks_has_the_gradient_of_one(folder: Path, ranks: Ranks, cases: list[Case]) -> None:
    found = run_ranks(folder, ranks, cases)
    for case in cases:
        expected = alone(folder, case)
        torch.testing.assert_close(found[case.name].scores, expected.scores, rtol=0, atol=1e-10)
        assert distance(found[case.name].gradient, expected.gradient) < TOLERANCE, case


OTHER_FAMILIES = {
    "mistral": {"sliding_window": 4},
    "gemma": {},
    "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "granite": {"logits_scaling": 2.0},
}
OF_FLOAT32 = ("gemma3_text",)
"""Whose norms of heads are computed in float32, whatever the model's type: a last bit before is one of float32 behind."""


@pytest.mark.nightly
@SLOW
def test_other_families_with_a_plan_are_exact(tmp_path: Path) -> None:
    """Windows, capped scores and logits, embeddings with a factor."""
    save_models(tmp_path, OTHER_FAMILIES)
    cases = [Case(family=family, layout=layout) for family in OTHER_FAMILIES for layout in ("padded", "prefix_shared")]  # type: ignore[arg-type]
    found = run_ranks(tmp_path, Ranks(strategy="fsdp2", num_ranks=2, tensor_parallel_size=2), cases)
    for case in cases:
        # of the same layout: windows and capped scores are not computed in float64 throughout
        expected = outcome(make_learner(tmp_path, case, SingleProcess()))
        tolerance = 1e-7 if case.family in OF_FLOAT32 else TOLERANCE
        torch.testing.assert_close(found[case.name].scores, expected.scores, rtol=0, atol=tolerance)
        assert distance(found[case.name].gradient, expected.gradient) < tolerance, case
