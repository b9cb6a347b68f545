"""Settings that follow from the memory of a device, decided once a run's placement is known: before anything is built, in a
run and in its plan alike. What the run recorded that is gone on from, or forked, comes before the rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from skyrl_train.config import AnyConfig, Config, SFTConfig
from skyrl_train.data.sources import fetch_config
from skyrl_train.errors import ModelError
from skyrl_train.model.sizes import read_architecture
from skyrl_train.plan.memory import kept_together, recomputing, shares_gpus, without_recomputing
from skyrl_train.runs.cli.auto_placement import place
from skyrl_train.runs.cli.derived import recorded_settings
from skyrl_train.system import local_devices

C = TypeVar("C", Config, SFTConfig, AnyConfig)

_CHECKPOINTING, _OFFLOAD = "model.gradient_checkpointing", "placement.offload"
_ENGINE_SHARE = "generator.vllm.gpu_memory_utilization"


def settle(config: C) -> C:
    """Return the config of a run that trains, with its placement chosen and nothing left at `auto` that depends on the
    memory of a device. Raises ConfigError where no placement can be chosen."""
    memory_gb = 0.0
    if config.platform.name == "gpu":  # nothing is assumed here: what does not fit would fail in the run
        memory_gb = config.placement.gpu_memory_gb or local_devices().memory_gb
    return with_memory_settings(place(config), memory_gb)


def with_memory_settings(config: C, memory_gb: float, announce: Callable[[str], object] = lambda _: None) -> C:
    """Return the config, whose placement is chosen, with `model.gradient_checkpointing` and `placement.offload` as they were
    recorded, or as they follow from a device of `memory_gb`, 0 where that is not known; `derived` says why. `announce`: as
    in `plan_memory`."""
    if "auto" not in (config.model.gradient_checkpointing, config.placement.offload):
        return config
    trainer = config.trainer
    config = _as_recorded(config, recorded_settings(trainer.resume_mode, trainer.resume_path, config.output_dir))
    if config.platform.name == "cpu":  # what shares a CPU goes on as it did
        return _decided(config, checkpointing=False)
    if trainer.sizes_itself and trainer.memory_budget_gb:
        memory_gb = min(memory_gb or math.inf, trainer.memory_budget_gb * (1 << 30) / 1e9)
    lines: list[str] = []
    try:
        if memory_gb:
            _fetch_architecture(config)
            if config.model.gradient_checkpointing == "auto":
                config, why = without_recomputing(config, memory_gb, announce)
                lines.append(why)
            if isinstance(config, Config) and _leaves_open(config):
                config, why = kept_together(config, memory_gb, announce)
                lines.append(why)
    except ModelError:  # nothing is known of a model whose step cannot be traced
        pass
    if config.model.gradient_checkpointing == "auto":
        lines.append("recomputes activations: nothing is known here of the model, or of the memory of a device")
    config = _decided(config, checkpointing=True)
    return replace(config, derived=(*config.derived, *(f"memory      {line}" for line in lines)))


def _leaves_open(config: AnyConfig) -> bool:
    return config.placement.offload == "auto" and shares_gpus(config)


def _decided(config: C, *, checkpointing: bool) -> C:
    """Return the config with what is still at auto: `checkpointing`, and models that leave GPUs that they share."""
    if config.model.gradient_checkpointing == "auto":
        config = recomputing(config, checkpointing)
    if _leaves_open(config):
        config = replace(config, placement=replace(config.placement, offload=True))
    return config


def _as_recorded(config: C, record: Mapping[str, Any]) -> C:
    recorded = record.get(_CHECKPOINTING)
    if config.model.gradient_checkpointing == "auto" and isinstance(recorded, bool):
        config = recomputing(config, recorded)
    # Before it was a setting all left.
    offload = record.get(_OFFLOAD, True if record else None)
    if _leaves_open(config) and isinstance(offload, bool):
        config = replace(config, placement=replace(config.placement, offload=offload))
        if isinstance(config, Config) and not offload:
            vllm = config.generator.vllm
            share = min(vllm.gpu_memory_utilization, float(record.get(_ENGINE_SHARE, 1.0)))
            vllm = replace(vllm, gpu_memory_utilization=share)
            config = replace(config, generator=replace(config.generator, vllm=vllm))
    return config


def _fetch_architecture(config: AnyConfig) -> None:
    """Have the config of the policy's model here, where it can be had."""
    stands_in = config.plan.architecture if isinstance(config, Config) else ""
    path, revision = stands_in or config.model.path, config.model.revision
    try:
        read_architecture(path, revision=revision)
    except ModelError:
        fetch_config(path, revision=revision)
