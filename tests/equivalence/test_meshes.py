"""Ranks of a sharded model in a grid: groups that hold the same shards. The gradient is that of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.layout_cases import distance
from tests.sequence_cases import CASES, Case, Ranks, alone, run_ranks, save_models

pytestmark = pytest.mark.slow
TOLERANCE = 1e-10


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
        (Ranks(strategy="fsdp2", num_ranks=4, fsdp_size=2), CASES[::2]),
        (Ranks(strategy="fsdp2", num_ranks=4, fsdp_size=2, sequence_parallel_size=2), CASES[::3]),
    ],
    ids=lambda value: value.name if isinstance(value, Ranks) else "",
)
def test_a_grid_of_ranks_has_the_gradient_of_one(folder: Path, ranks: Ranks, cases: list[Case]) -> None:
    found = run_ranks(folder, ranks, cases)
    for case in cases:
        expected = alone(folder, case)
        torch.testing.assert_close(found[case.name].scores, expected.scores, rtol=0, atol=1e-10)
        assert distance(found[case.name].gradient, expected.gradient) < TOLERANCE, case
