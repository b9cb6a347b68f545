"""Nodes, GPUs and ranks that contradict each other are refused, all at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from skyrl_train.config.algorithm.settings import AlgorithmConfig
from skyrl_train.config.data.sources import EnvironmentConfig
from skyrl_train.config.models.engines import GeneratorConfig, VLLMConfig
from skyrl_train.config.models.placement import PlacementConfig, PlatformConfig
from skyrl_train.config.rules.validate import run_rules
from skyrl_train.config.rules.validate_placement import ENGINE_PLACEMENT_RULES, PLACEMENT_RULES
from skyrl_train.config.schema import Config, TrainerConfig
from skyrl_train.errors import Violation

RAY = {"backend": "ray", "ray_address": "auto"}


def placement_violations(config: Config) -> list[Violation]:
    return list(run_rules(config, (*PLACEMENT_RULES, *ENGINE_PLACEMENT_RULES)))


def violated(config: Config) -> list[str]:
    return [violation.field for violation in placement_violations(config)]


def placed(*, engines: int = 1, tensor_parallel: int = 1, transport: str = "auto", **settings: object) -> Config:
    vllm = VLLMConfig(num_engines=engines, tensor_parallel_size=tensor_parallel)
    return Config(
        platform=PlatformConfig(name="gpu"),
        placement=PlacementConfig(**{**RAY, **settings}),  # type: ignore[arg-type]
        generator=GeneratorConfig(backend="vllm", vllm=vllm, weight_transport=transport),
        trainer=TrainerConfig(algorithm=AlgorithmConfig(kl_loss_coef=0.1)),
    )


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({}, ""),
        ({"generator": GeneratorConfig(backend="hf")}, "generator.backend=hf, which is no engine in an actor"),
        ({"generator": GeneratorConfig(backend="vllm", agent_loop="agent")}, "whose programs ask the loop"),
        ({"trainer": TrainerConfig(max_staleness=1)}, "trainer.max_staleness=1, whose journal the loop writes"),
        ({"environment": EnvironmentConfig(placement="ray")}, "whose workers the loop starts"),
        (
            {"environment": EnvironmentConfig(rewards=("exact_match", {"_target_": "judge"}))},
            "whose model the loop has",
        ),
    ],
)
def test_what_needs_the_loop_is_refused_beside_engines(changes: dict[str, Any], rule: str) -> None:
    found = placement_violations(replace(placed(rollouts="engines"), **changes))
    rules = [violation.rule for violation in found if violation.field == "placement.rollouts"]
    assert len(rules) == bool(rule)
    assert all(each.startswith("must be driver with ") and each.endswith(rule) for each in rules)
    assert not [each for each in placement_violations(replace(placed(), **changes)) if "rollouts" in each.field]


def test_nodes_and_gpus_say_how_many_ranks_there_are() -> None:
    placement = PlacementConfig(critic_num_nodes=2, critic_num_gpus_per_node=8)
    assert (placement.critic_num_workers, placement.policy_num_workers) == (16, 1)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (placed(policy_num_workers=3, policy_num_nodes=2, ref_num_workers=2), "placement.policy_num_nodes"),
        (placed(policy_num_workers=6, policy_num_gpus_per_node=4), "placement.policy_num_workers"),
        (placed(policy_num_nodes=2, policy_num_gpus_per_node=4), "placement.ref_num_nodes"),
        (placed(inference_num_nodes=2, engines=3), "generator.vllm.num_engines"),
        (
            placed(inference_num_nodes=2, inference_num_gpus_per_node=8, engines=4, tensor_parallel=2),
            "generator.vllm.num_engines",
        ),
        (
            placed(inference_num_nodes=2, inference_num_gpus_per_node=4, tensor_parallel=8),
            "generator.vllm.tensor_parallel_size",
        ),
        (placed(inference_num_nodes=1, colocate_all=True), "placement.inference_num_nodes"),
        (placed(inference_num_nodes=1, ray_address=""), "placement.ray_address"),
        (placed(colocate_all=True, engines=2), "generator.vllm.num_engines"),
        (placed(colocate_all=True, tensor_parallel=2), "generator.vllm.tensor_parallel_size"),
        (
            placed(colocate_all=True, policy_num_nodes=2, policy_num_workers=8, ref_num_workers=8, tensor_parallel=8),
            "generator.vllm.tensor_parallel_size",
        ),
        (
            placed(colocate_all=True, policy_num_workers=8, ref_num_workers=8, engines=4, tensor_parallel=4),
            "generator.vllm.num_engines",
        ),
        (placed(transport="cuda_ipc"), "generator.weight_transport"),
        (placed(transport="broadcast", colocate_all=True), "generator.weight_transport"),
    ],
)
def test_a_contradiction_is_refused(config: Config, field: str) -> None:
    assert violated(config) == [field]


def test_all_contradictions_are_said_at_once_with_their_remedies() -> None:
    config = placed(
        policy_num_workers=6, policy_num_gpus_per_node=4, inference_num_nodes=2, engines=3, transport="cuda_ipc"
    )
    found = placement_violations(config)
    assert [violation.field for violation in found] == [
        "placement.policy_num_workers",
        "generator.vllm.num_engines",
        "generator.weight_transport",
    ]
    assert "= 4" in found[0].rule
    assert found[1].remedy == "try generator.vllm.num_engines=2"


@pytest.mark.parametrize(("engines", "tensor_parallel"), [(1, 3), (3, 2), (1, 16), (8, 2)])
def test_what_is_proposed_for_engines_on_shared_devices_is_accepted(engines: int, tensor_parallel: int) -> None:
    shared = {"colocate_all": True, "policy_num_nodes": 2, "policy_num_workers": 8, "ref_num_workers": 8}
    size, count = tensor_parallel, engines
    for _ in range(2):
        for violation in placement_violations(placed(engines=count, tensor_parallel=size, **shared)):
            setting, _, value = violation.remedy.removeprefix("try generator.vllm.").partition("=")
            size, count = (int(value), count) if setting == "tensor_parallel_size" else (size, int(value))
    assert violated(placed(engines=count, tensor_parallel=size, **shared)) == []


def test_what_agrees_is_accepted() -> None:
    assert violated(placed(policy_num_nodes=2, policy_num_gpus_per_node=4, ref_num_workers=4, engines=8)) == []
    assert violated(placed(inference_num_nodes=2, inference_num_gpus_per_node=8, engines=8, tensor_parallel=2)) == []
    assert violated(placed(colocate_all=True, transport="cuda_ipc")) == []
    shared = {"colocate_all": True, "policy_num_workers": 8, "ref_num_workers": 8}
    assert violated(placed(**shared, engines=4, tensor_parallel=2)) == []
    assert violated(placed(**shared, engines=1, tensor_parallel=8)) == []
