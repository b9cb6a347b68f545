"""Which ranks are a group along which axis."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl_train.config.door import load_config
from skyrl_train.config.models import MeshSizes, StrategyConfig, mesh_sizes
from skyrl_train.config.rules import validate_config
from skyrl_train.distributed.mesh import ranks_along

GRID = MeshSizes(replicate=2, shard=2, tensor=2, sequence=2)


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        ("tensor", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("shard", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replicate", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("sequence", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("expert", [[rank] for rank in (0, 1, 2, 3, 4, 5, 6, 7)]),
    ],
)
def test_every_rank_is_in_one_group_along_each_axis(axis: Any, expected: list[list[int]]) -> None:
    assert sorted(ranks_along(GRID, axis)) == expected


def test_sequence_groups_are_neighbours_on_the_shard_axis() -> None:
    sizes = MeshSizes(replicate=2, shard=4, sequence=2)
    assert ranks_along(sizes, "sequence") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert ranks_along(sizes, "shard") == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_all_ranks_share_one_model_unless_told_otherwise() -> None:
    assert mesh_sizes(StrategyConfig(name="fsdp2"), 8) == MeshSizes(shard=8)
    assert mesh_sizes(StrategyConfig(name="fsdp2", fsdp_size=2), 8) == MeshSizes(shard=2, replicate=4)


def refused(strategy: dict[str, Any], model: dict[str, Any] | None = None, **placement: Any) -> list[str]:
    config = load_config(
        {
            "strategy": {"name": "fsdp2", **strategy},
            "model": model or {},
            "placement": {"backend": "ray", "policy_num_workers": 8, "ray_address": "auto", **placement},
        }
    )
    return [str(violation) for violation in validate_config(config)]


def test_sizes_of_groups_that_fit_are_accepted() -> None:
    assert [refused({"fsdp_size": size}) for size in (0, 2, 4, 8)] == [[]] * 4
    assert refused({"fsdp_size": 4}, policy_num_nodes=2) == []
    assert refused({"fsdp_size": 4, "sequence_parallel_size": 2}) == []


@pytest.mark.parametrize(
    ("strategy", "placement", "message"),
    [
        ({"fsdp_size": 3}, {}, "must divide placement.policy_num_workers=8; got 3. Try strategy.fsdp_size=2 or"),
        ({"fsdp_size": 1}, {}, "must be more than 1: ranks that each hold the whole model are strategy=ddp"),
        ({"fsdp_size": 2, "name": "ddp"}, {}, "is for strategy=fsdp2, and does nothing with ddp"),
        ({"fsdp_size": 2, "sequence_parallel_size": 4}, {}, "must be a multiple of strategy.sequence_parallel_size=4"),
        (
            {"fsdp_size": 4},
            {"policy_num_workers": 24, "policy_num_nodes": 4},
            "must divide the 6 ranks of a node, or be a multiple of them; got 4. Try strategy.fsdp_size=2 or "
            "strategy.fsdp_size=3",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_sizes_that_do(
    strategy: dict[str, Any], placement: dict[str, Any], message: str
) -> None:
    found = refused(strategy, **placement)
    assert any("strategy.fsdp_size" in each and message in each for each in found), found


def test_sizes_of_ranks_with_parts_of_matrices_that_fit_are_accepted() -> None:
    assert [refused({"tensor_parallel_size": size}) for size in (2, 4, 8)] == [[]] * 3
    assert refused({"tensor_parallel_size": 2, "fsdp_size": 2, "cpu_offload": True}) == []
    assert refused({"tensor_parallel_size": 4}, policy_num_nodes=2) == []


@pytest.mark.parametrize(
    ("strategy", "model", "placement", "message"),
    [
        (
            {"name": "ddp"},
            {},
            {},
            "strategy.tensor_parallel_size: is for strategy=fsdp2, and does nothing with ddp; got 2. Add strategy=fsdp2",
        ),
        (
            {"sequence_parallel_size": 2},
            {},
            {},
            "strategy.sequence_parallel_size: must be 1 with strategy.tensor_parallel",
        ),
        (
            {"expert_parallel_size": 2},
            {},
            {},
            "strategy.expert_parallel_size: must be 1 with strategy.tensor_parallel_size",
        ),
        ({}, {"lora": {"rank": 8}}, {}, "model.lora.rank: must be 0 with strategy.tensor_parallel_size=2, which cuts"),
        ({}, {"quantization": "nf4", "lora": {"rank": 8}}, {}, "model.quantization: must be none with strategy.tensor"),
        ({}, {"compile": True}, {}, "model.compile: must be false with strategy.tensor_parallel_size=2, which cuts"),
        ({"fsdp_size": 8}, {}, {}, "strategy.fsdp_size: must divide placement.policy_num_workers=8 / strategy.tensor_"),
        (
            {"tensor_parallel_size": 4},
            {},
            {"policy_num_workers": 24, "policy_num_nodes": 4},
            "strategy.tensor_parallel_size: must divide the 6 ranks of the policy on a node; got 4. Try strategy.tensor_",
        ),
    ],
)
def test_what_does_not_go_with_parts_of_matrices_is_refused_by_name(
    strategy: dict[str, Any], model: dict[str, Any], placement: dict[str, Any], message: str
) -> None:
    found = refused({"tensor_parallel_size": 2, **strategy}, model, **placement)
    assert any(each.startswith(message) for each in found), found


def test_a_reference_of_other_ranks_is_looked_at_too() -> None:
    config = load_config(
        {
            "strategy": {"name": "fsdp2", "fsdp_size": 4},
            "placement": {"backend": "ray", "policy_num_workers": 8, "ref_num_workers": 2},
            "trainer": {"algorithm": {"kl_loss_coef": 0.1}},
        }
    )
    (violation,) = validate_config(config)
    assert "must divide placement.ref_num_workers=2" in str(violation)
