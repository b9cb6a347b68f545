"""Which rank lies on which node beside whom: layouts, before anything is reserved."""

from __future__ import annotations

import pytest

from skyrl_train.config.models.engines import GeneratorConfig, VLLMConfig
from skyrl_train.config.models.models import ModelConfig
from skyrl_train.config.models.placement import PlacementConfig
from skyrl_train.config.placement.bundles import Bundle, Layout, count_engines, missing_room, plan_layout
from skyrl_train.config.schema import Config
from skyrl_train.runs.construction import loaded_models, with_time_to_load

ALL = ("policy", "reference", "critic")


def layout(placement: PlacementConfig, *, engines: int = 0, tensor_parallel: int = 1, platform: str = "gpu") -> Layout:
    return plan_layout(
        placement, roles=ALL, gpu=platform == "gpu", num_engines=engines, devices_per_engine=tensor_parallel
    )


def test_ranks_whose_nodes_are_not_stated_go_wherever_there_is_room() -> None:
    found = layout(PlacementConfig(policy_num_workers=2), platform="cpu")
    assert found.groups["shared"] == (Bundle(cpus=2.0, gpus=0.0), Bundle(cpus=1.0, gpus=0.0))
    assert found.groups["critic"] == (Bundle(cpus=1.0, gpus=0.0),)
    assert found.seats == {"policy": ("shared", (0, 1)), "reference": ("shared", (0,)), "critic": ("critic", (0,))}
    assert found.nodes == ()


def test_ranks_fill_their_nodes_one_after_the_other() -> None:
    placement = PlacementConfig(
        policy_num_nodes=2, policy_num_gpus_per_node=2, ref_num_gpus_per_node=2, critic_num_gpus_per_node=2
    )
    found = layout(placement)
    assert placement.policy_num_workers == 4
    assert [bundle.node for bundle in found.groups["shared"]] == [0, 0, 1, 1]
    assert found.seats["policy"] == ("shared", (0, 1, 2, 3))
    assert found.seats["reference"] == ("shared", (0, 2)), "one on each of the policy's nodes"
    assert found.nodes == (Bundle(cpus=5.0, gpus=4.0, node=0), Bundle(cpus=3.0, gpus=2.0, node=1))


def test_engines_with_nodes_of_their_own_share_none_with_a_model() -> None:
    placement = PlacementConfig(policy_num_gpus_per_node=4, inference_num_nodes=2, inference_num_gpus_per_node=4)
    found = layout(placement, engines=4, tensor_parallel=2)
    assert [bundle.node for bundle in found.groups["engine"]] == [1, 1, 2, 2]
    assert [bundle.gpus for bundle in found.nodes] == [5.0, 4.0, 4.0]
    assert found.seats["engine"] == ("engine", (0, 1, 2, 3))


def test_an_engine_of_several_devices_lies_on_those_of_consecutive_ranks_of_one_node() -> None:
    placement = PlacementConfig(
        policy_num_nodes=2, policy_num_gpus_per_node=4, ref_num_nodes=2, ref_num_gpus_per_node=4, colocate_all=True
    )
    found = layout(placement, engines=4, tensor_parallel=2)
    assert found.bundles_per_engine == 2
    assert found.seats["engine"] == ("shared", (0, 2, 4, 6))
    assert [bundle.node for bundle in found.groups["shared"]] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {bundle.gpus for bundle in found.groups["shared"]} == {1.0}
    half = layout(placement, engines=2, tensor_parallel=2)
    assert half.seats["engine"] == ("shared", (0, 4)), "the first devices of each node"
    apart = layout(PlacementConfig(policy_num_workers=4), engines=2, tensor_parallel=2)
    assert (apart.bundles_per_engine, apart.seats["engine"]) == (1, ("engine", (0, 1)))
    assert {bundle.gpus for bundle in apart.groups["engine"]} == {2.0}


@pytest.mark.parametrize(
    ("placement", "size", "expected"),
    [
        (PlacementConfig(), 1, 1),
        (PlacementConfig(policy_num_gpus_per_node=8), 1, 1),
        (PlacementConfig(policy_num_gpus_per_node=8, colocate_all=True), 1, 8),
        (PlacementConfig(policy_num_gpus_per_node=8, colocate_all=True), 4, 2),
        (PlacementConfig(policy_num_nodes=2, policy_num_gpus_per_node=8, colocate_all=True), 8, 2),
        (PlacementConfig(inference_num_nodes=2, inference_num_gpus_per_node=8), 2, 8),
        (PlacementConfig(inference_num_nodes=2), 2, 2),
    ],
)
def test_there_are_as_many_engines_as_their_devices_hold(placement: PlacementConfig, size: int, expected: int) -> None:
    vllm = VLLMConfig(tensor_parallel_size=size)
    assert count_engines(GeneratorConfig(backend="vllm", vllm=vllm), placement) == expected
    assert VLLMConfig(num_engines=1).count(placement) == 1


def test_with_everything_in_one_place_each_device_has_one_of_each() -> None:
    found = layout(PlacementConfig(policy_num_gpus_per_node=2, ref_num_workers=2, colocate_all=True), engines=2)
    assert set(found.groups) == {"shared"}
    assert [(bundle.cpus, bundle.gpus) for bundle in found.groups["shared"]] == [(4.0, 1.0), (3.0, 1.0)]
    assert {role: places for role, (_, places) in found.seats.items()} == {
        "policy": (0, 1),
        "reference": (0, 1),
        "critic": (0,),
        "engine": (0, 1),
    }


NODE = {"CPU": 64.0, "GPU": 8.0, "memory": 1e12}


@pytest.mark.parametrize(
    ("placement", "engines", "tensor_parallel", "nodes", "problem"),
    [
        (PlacementConfig(policy_num_gpus_per_node=8, colocate_all=True), 8, 1, [NODE], None),
        (PlacementConfig(policy_num_gpus_per_node=8, policy_num_nodes=2), 0, 1, [NODE, NODE], "GPUs are needed"),
        (
            PlacementConfig(policy_num_gpus_per_node=8, policy_num_nodes=2, colocate_all=True),
            0,
            1,
            [NODE],
            "2 nodes with",
        ),
        (PlacementConfig(policy_num_gpus_per_node=16, colocate_all=True), 0, 1, [NODE, NODE], "1 node with"),
        (PlacementConfig(), 1, 16, [NODE, NODE], "engines over several nodes are not supported"),
        (PlacementConfig(policy_num_workers=9, colocate_all=True), 0, 1, [NODE], "9 GPUs are needed, and there are 8"),
        (PlacementConfig(), 0, 1, [{"CPU": 8.0}], "group shared needs 2 CPUs and 1 GPUs on one node"),
    ],
)
def test_what_the_nodes_can_never_hold_is_named(
    placement: PlacementConfig,
    engines: int,
    tensor_parallel: int,
    nodes: list[dict[str, float]],
    problem: str | None,
) -> None:
    found = missing_room(layout(placement, engines=engines, tensor_parallel=tensor_parallel), nodes)
    assert found is None if problem is None else problem in str(found)


def test_large_models_have_longer_to_load() -> None:
    config = Config(
        model=ModelConfig(path="Qwen/Qwen2.5-7B"),
        placement=PlacementConfig(backend="ray", start_timeout_s=300.0),
        generator=GeneratorConfig(backend="vllm"),
    )
    # 15.2 GB, read by the policy and by the engine
    placement = with_time_to_load(config.placement, loaded_models(config))
    assert placement.start_timeout_s == pytest.approx(300 + 2 * 15.23e9 / 50e6, abs=1)
