"""What is decided by the memory of a device: whether activations are recomputed, and whether models and engines move."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_train.config import Config, SFTConfig
from skyrl_train.config.models import CriticConfig, CriticModelConfig
from skyrl_train.config.placement import leaves_devices
from skyrl_train.config.rules import validate_config
from skyrl_train.plan import plan_memory, positions_that_fit
from skyrl_train.plan.memory import WANTED, wanted_positions
from skyrl_train.runs.cli.placement import place, with_memory_settings
from skyrl_train.runs.cli.placement_search import recomputing
from skyrl_train.runs.resolving import resolve
from skyrl_train.telemetry import STATE_FILE
from tests.support.auto_placement_cases import gpu_config, gpus, sized_model

Decided = tuple[bool, bool, float]
SHORT = ("generator.max_context_length=8192",)
"""Of which two rows are wanted, so that few sizes are traced."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sized_model(tmp_path_factory.mktemp("sizes") / "0.5B", "0.5B")


def placed(model: Path, memory_gb: float, *overrides: str, count: int = 1) -> Config:
    """A placement as if it were stated: whether to recompute is left open."""
    config = gpu_config(f"model.path={model}", *SHORT, *overrides)
    found = place(config, gpus(count, memory_gb=memory_gb))
    return recomputing(found, config.model.gradient_checkpointing)


def decided(config: Config) -> Decided:
    assert config.model.gradient_checkpointing != "auto"
    assert config.placement.offload != "auto"
    return config.model.recomputes, config.placement.offload, config.generator.vllm.gpu_memory_utilization


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory_gb", "recomputes", "offload"),
    [
        pytest.param(24, True, True, marks=pytest.mark.nightly),
        (80, False, True),
        pytest.param(141, False, False, marks=pytest.mark.nightly),
    ],
)
def test_what_fits_is_decided_by_the_plans_own_arithmetic(
    small: Path, memory_gb: float, recomputes: bool, offload: bool
) -> None:
    config = placed(small, memory_gb)
    found = with_memory_settings(config, memory_gb)
    assert decided(found)[:2] == (recomputes, offload)
    assert validate_config(found) == []
    free = recomputing(replace(config, placement=replace(config.placement, offload=True)), False)
    fits = positions_that_fit(free, memory_gb)
    assert (fits < WANTED) == recomputes
    why = "\n".join(found.derived)
    assert (f"recomputes activations: {fits:,} positions fit without, 16,384 are wanted" in why) == recomputes
    assert ("models and engines leave their devices in turn" in why) == offload
    plan = replace(found.plan, device_memory_gb=memory_gb)
    memory = plan_memory(replace(found, plan=plan), largest_only=True)
    assert memory is not None
    assert memory.violations() == ()
    assert min(each.budget for each in memory.passes) >= WANTED
    assert memory.host is not None
    moved = {"policy, while others have its devices", "engines asleep"}
    assert moved.isdisjoint(memory.host.owners) == (not offload)
    if not offload:
        share = found.generator.vllm.gpu_memory_utilization
        assert share <= config.generator.vllm.gpu_memory_utilization
        assert memory.engine_bytes == pytest.approx(share * memory_gb * 1e9)
        assert all(each.limit_bytes < memory_gb * 1e9 - memory.engine_bytes for each in memory.passes)
        assert not leaves_devices(found.placement, found.generator, found.platform)


@pytest.mark.slow
def test_stated_values_stay(small: Path) -> None:
    config = placed(small, 141, "model.gradient_checkpointing=true", "placement.offload=true")
    assert with_memory_settings(config, 141) is config
    config = placed(small, 141, "model.gradient_checkpointing=true")
    assert decided(with_memory_settings(config, 141))[:2] == (True, False)


@pytest.mark.slow
def test_where_nothing_is_known_of_the_memory_activations_are_recomputed_and_models_move(small: Path) -> None:
    found = with_memory_settings(placed(small, 141), 0.0)
    assert decided(found) == (True, True, 0.8)
    assert found.derived[-1].startswith("memory      recomputes activations: nothing is known here")


def test_a_cpu_recomputes_nothing_and_says_nothing() -> None:
    found = resolve(Config()).config
    assert (found.model.gradient_checkpointing, found.derived) == (False, ())
    assert with_memory_settings(SFTConfig(), 0.0).model.gradient_checkpointing is False


def test_a_run_that_goes_on_or_is_forked_reads_what_was_recorded(small: Path, tmp_path: Path) -> None:
    state = tmp_path / "run" / "checkpoints" / "step_000001" / STATE_FILE
    state.parent.mkdir(parents=True)

    def again(record: dict[str, object], *overrides: str) -> Config:
        state.write_text(json.dumps({"config": record}), encoding="utf-8")
        return with_memory_settings(placed(small, 24, *overrides), 24)

    names = ("model.gradient_checkpointing", "placement.offload", "generator.vllm.gpu_memory_utilization")
    record = dict(zip(names, (False, False, 0.4)))
    forks = ("trainer.resume_mode=fork", f"trainer.resume_path={tmp_path / 'run'}")
    assert decided(again(record, f"output_dir={tmp_path / 'run'}")) == (False, False, 0.4)
    assert decided(again(record, *forks)) == (False, False, 0.4)
    assert decided(again(record, *forks, "model.gradient_checkpointing=auto")) == (False, False, 0.4)
    assert decided(again(record, *forks, "model.gradient_checkpointing=true", "placement.offload=true")) == (
        True,
        True,
        0.8,
    )
    assert decided(again({names[0]: True}, *forks)) == (True, True, 0.8), "before it was a setting all moved"
    assert decided(again(record, "trainer.resume_mode=none", f"output_dir={tmp_path / 'run'}"))[:2] == (True, True)


def test_micro_batches_that_are_stated_have_to_fit_and_those_that_size_themselves_need_not_grow_further(
    small: Path,
) -> None:
    trainer = placed(small, 141).trainer
    assert wanted_positions(trainer, 3072) == WANTED
    assert wanted_positions(replace(trainer, max_positions=8192), 3072) == 8192
    assert wanted_positions(trainer, 40_000) == 40_000
    assert wanted_positions(replace(trainer, micro_batching="fixed", micro_train_batch_size_per_gpu=64), 1024) == 65_536
    assert wanted_positions(replace(trainer, micro_batching="token_budget"), 1024) == 8192


def test_models_move_where_a_critic_is_trained_on_ray(small: Path) -> None:
    alone = placed(small, 141, "model.gradient_checkpointing=true")
    config = replace(alone, critic=CriticConfig(model=CriticModelConfig(path="policy")))
    assert with_memory_settings(config, 141).placement.offload is True
    (violation,) = validate_config(replace(config, placement=replace(config.placement, offload=False)))
    assert violation.field == "placement.offload"


@pytest.mark.slow
def test_supervised_training_is_decided_alike(small: Path) -> None:
    plain = SFTConfig()
    config = replace(
        plain,
        model=replace(plain.model, path=str(small), dtype="bfloat16"),
        platform=replace(plain.platform, name="gpu", device="cuda:0"),
        data=replace(plain.data, max_length=8192),
    )
    assert with_memory_settings(place(config), 80.0).model.gradient_checkpointing is False
    lines = with_memory_settings(place(config), 12.0).derived
    assert lines[-1].startswith("memory      recomputes activations: ")
    assert lines[-1].endswith("8,192 are wanted")
