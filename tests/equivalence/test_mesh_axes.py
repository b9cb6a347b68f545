"""Every axis along which ranks are used, on two real ranks, one layer each: the scores and the gradient of one process.

The cases of other layouts, families and more ranks are slow, in the files of their own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from skyrl_train.config.models import StrategyConfig, mesh_sizes
from skyrl_train.distributed import ModelStrategy, RankContext, RankMesh, SingleProcess, make_strategy as strategy_of
from tests.support.gloo_ranks import on_ranks
from tests.support.layout_cases import distance
from tests.support.moe_cases import EXPERTS
from tests.support.sequence_cases import Case, Outcome, Ranks, make_learner, make_strategy, outcome, save_models

DENSE, MIXTURE = "qwen2", "qwen3_moe"
AXES = {
    "data, replicas": (DENSE, Ranks(strategy="ddp", num_ranks=2)),
    "data, shards": (DENSE, Ranks(strategy="fsdp2", num_ranks=2)),
    "data, two groups of shards": (DENSE, Ranks(strategy="fsdp2", num_ranks=2, fsdp_size=1)),
    "sequence": (DENSE, Ranks(strategy="ddp", num_ranks=2, sequence_parallel_size=2)),
    "tensor": (DENSE, Ranks(strategy="fsdp2", num_ranks=2, tensor_parallel_size=2)),
    "experts": (MIXTURE, None),
}


def divided_experts() -> ModelStrategy:
    config = StrategyConfig(name="ddp", expert_parallel_size=2)
    mesh = RankMesh(sizes=mesh_sizes(config, 2), device_type="cpu")
    ranks = RankContext(num_ranks=2, device=torch.device("cpu"), dtype=torch.float64, mesh=mesh, cpu_offload=False)
    return strategy_of(config, ranks)


def of_axis(folder: Path, axis: str, rank: int) -> Outcome:
    family, ranks = AXES[axis]
    strategy = divided_experts() if ranks is None else make_strategy(ranks)
    shares = 1 if ranks is None else ranks.ranks_per_share
    return outcome(make_learner(folder, Case(family=family), strategy), dp_rank=rank // shares, dp_size=2 // shares)


def run_rank(rank: int, folder: Path) -> dict[str, Outcome]:
    return {axis: of_axis(folder, axis, rank) for axis in AXES}


def test_two_ranks_along_each_axis_have_the_gradient_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    save_models(tmp_path, {DENSE: {}, MIXTURE: EXPERTS}, num_layers=1)
    expected = {
        family: outcome(make_learner(tmp_path, Case(family=family), SingleProcess())) for family in (DENSE, MIXTURE)
    }
    for ranks in on_ranks(run_rank, tmp_path):
        apart = {axis: apart_from(expected[AXES[axis][0]], found) for axis, found in ranks.items()}
        # A router's own softmax is of float32.
        wrong = {axis: found for axis, found in apart.items() if found > (1e-6 if axis == "experts" else 1e-10)}
        assert wrong == {}


def apart_from(one: Outcome, found: Outcome) -> float:
    return max(distance(found.gradient, one.gradient), float((found.scores - one.scores).abs().max()))
