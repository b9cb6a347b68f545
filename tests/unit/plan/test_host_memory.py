"""What lies in the memory of a node: by owner, against sums by hand; and the refusal of what does not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from skyrl_train.config import Config
from skyrl_train.config.derived import layout_of
from skyrl_train.config.models import PlacementConfig, PlatformConfig, StrategyConfig
from skyrl_train.errors import ConfigError
from skyrl_train.learner.memory import Effort
from skyrl_train.model.sizes import model_sizes
from skyrl_train.plan.dry_run import models_of
from skyrl_train.plan.memory.device import HostMemory, host_lines, host_memory
from skyrl_train.runs.cli import place
from skyrl_train.system import host_bytes, local_devices
from tests.support.auto_placement_cases import gpu_config, gpus, sized_model

REPOSITORY = Path(__file__).parents[3]


def config_of(model: str, *, nodes: int = 1, **placement: object) -> Config:
    plain = Config()
    return replace(
        plain,
        platform=PlatformConfig(name="gpu", device="cuda:0"),
        strategy=StrategyConfig(name="fsdp2"),
        model=replace(plain.model, dtype="bfloat16"),
        placement=PlacementConfig(
            backend="ray", policy_num_nodes=nodes, policy_num_gpus_per_node=8, colocate_all=True, **placement
        ),
        generator=replace(plain.generator, backend="vllm"),
        plan=replace(plain.plan, architecture=model),
    )


def host_of(config: Config) -> HostMemory:
    return host_memory(
        models_of(config, Effort()),
        layout_of(config),
        trainer=config.trainer,
        generator=config.generator,
        placement=config.placement,
        platform=config.platform,
    )


@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_share_what_is_sharded_and_each_engine_has_the_whole_model(nodes: int) -> None:
    parameters = model_sizes("Qwen2.5-32B").parameters
    found = host_of(config_of("Qwen2.5-32B", nodes=nodes))
    state, engines = 12 * parameters / nodes, 8 * 2 * parameters
    assert found.owners == pytest.approx(
        {
            "policy, while others have its devices": state,
            "policy, copy that a checkpoint is written from": state,
            "engines asleep": engines,
        },
        rel=1e-6,
    )
    assert found.violations() == ()


def test_ranks_with_parts_of_matrices_keep_as_much_together() -> None:
    config = config_of("Qwen2.5-7B")
    cut = replace(config, strategy=StrategyConfig(name="fsdp2", tensor_parallel_size=2))
    assert host_of(cut).owners == pytest.approx(host_of(config).owners, rel=1e-3)


def test_what_does_not_fit_is_refused_with_each_owner() -> None:
    config = config_of("Qwen2.5-32B", host_memory_gb=1400.0)
    (violation,) = host_of(config).violations()
    assert str(violation).startswith(
        "placement.host_memory_gb: a node must hold what the run keeps in its memory, 1.31 TB and a tenth beside it: "
        "policy, while others have its devices 393 GB, policy, copy that a checkpoint is written from 393 GB, "
        "engines asleep 524 GB; got 1400. More nodes"
    )
    assert list(host_lines(host_of(config)))[-1] == "  1.31 TB  in all (of 1.4 TB)"
    enough = replace(config, placement=replace(config.placement, host_memory_gb=1500.0))
    assert host_of(enough).violations() == ()
    two = config_of("Qwen2.5-32B", nodes=2, host_memory_gb=1400.0)
    assert host_of(two).violations() == ()
    plain = replace(config.trainer, background_checkpoints=False)
    assert host_of(replace(config, trainer=plain)).violations() == ()


def test_an_optimizers_state_in_the_host_counts_whether_or_not_the_device_is_shared() -> None:
    parameters = model_sizes("Qwen2.5-7B").parameters
    config = config_of("Qwen2.5-7B")
    config = replace(config, strategy=replace(config.strategy, cpu_offload="optimizer"))
    owners = host_of(config).owners
    assert owners["policy, optimizer state by strategy.cpu_offload"] == pytest.approx(8 * parameters, rel=1e-6)
    assert owners["policy, while others have its devices"] == pytest.approx(4 * parameters, rel=1e-6)
    apart = replace(config, placement=replace(config.placement, colocate_all=False))
    assert host_of(apart).owners["policy, optimizer state by strategy.cpu_offload"] == pytest.approx(8 * parameters)


def test_offloaded_state_is_in_the_host_and_models_of_their_own_devices_are_not() -> None:
    config = config_of("Qwen2.5-7B")
    config = replace(config, strategy=replace(config.strategy, cpu_offload=True))
    parameters = model_sizes("Qwen2.5-7B").parameters
    assert host_of(config).owners["policy, by strategy.cpu_offload"] == pytest.approx(16 * parameters, rel=1e-6)
    apart = replace(config.placement, colocate_all=False)
    assert set(host_of(replace(config, placement=apart, strategy=StrategyConfig(name="fsdp2"))).owners) == {
        "policy, copy that a checkpoint is written from"
    }


def test_the_memory_of_a_container_is_its_limit(tmp_path: Path) -> None:
    assert host_bytes(tmp_path) == 0
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:       2000 kB\nMemFree:        100 kB\n")
    assert host_bytes(tmp_path) == 2_048_000
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert host_bytes(tmp_path) == 2_048_000
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("1000000\n")
    assert host_bytes(tmp_path) == 1_000_000
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    assert local_devices({}, tmp_path).host_memory_gb == 0.001


def test_the_pods_of_kuberay_hold_what_their_job_keeps() -> None:
    job = yaml.safe_load((REPOSITORY / "scripts/launch/kuberay.yaml").read_text())
    (container,) = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    limit = int(container["resources"]["limits"]["memory"].removesuffix("Gi")) * 2**30
    for model in ("Qwen2.5-1.5B", "Qwen2.5-7B"):
        found = host_of(config_of(model, nodes=2, host_memory_gb=limit / 1e9))
        assert found.owners
        assert found.violations() == (), model


@pytest.mark.nightly
@pytest.mark.slow
def test_a_placement_is_chosen_for_the_memory_of_this_machines_node(tmp_path: Path) -> None:
    config = gpu_config("placement=auto", f"model.path={sized_model(tmp_path / '7B', '7B')}")
    found = gpus(8)
    assert place(config, replace(found, host_memory_gb=1000.0)).placement.policy_num_workers == 8
    with pytest.raises(ConfigError, match="a node must hold what the run keeps in its memory"):
        place(config, replace(found, host_memory_gb=100.0))
