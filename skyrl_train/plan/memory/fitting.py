"""`model.gradient_checkpointing=auto` and `placement.offload=auto`: what fits a device, by the plan's own arithmetic.

    recomputing   not where WANTED positions of a micro-batch fit without it, models and engines off the device in turn
    offload       not where everything fits at once, as it is computed by then

In this order: to recompute takes a quarter of an update, to move a model and back a second or two of a step. A run records
both as if they had been typed. Imports no torch where the model's step has been traced before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import Literal, TypeVar

from skyrl_train.config import AnyConfig, Config, MicroBatchConfig, SFTConfig, sft_learner_settings
from skyrl_train.config.placement import count_engines, shares_devices
from skyrl_train.errors import MemoryLimitError
from skyrl_train.learner.memory import Effort
from skyrl_train.model.sizes import model_sizes
from skyrl_train.plan.forms.scale import ENGINE_OVERHEAD_BYTES
from skyrl_train.plan.memory.device import CONTEXT_BYTES, plan_memory, predicted_passes

C = TypeVar("C", Config, SFTConfig, AnyConfig)

Announce = Callable[[str], object]
WANTED = 16_384
"""Positions of a micro-batch from which on a larger one is hardly faster."""
_CONTEXT_KEPT = 0.5
"""Share of the longest context that an engine has room for in each of its sequences, which begin and end at other times."""


def recomputing(config: C, value: Literal["auto", True, False]) -> C:
    """Return the config with another `model.gradient_checkpointing`."""
    return replace(config, model=replace(config.model, gradient_checkpointing=value))


def positions_that_fit(config: AnyConfig, memory_gb: float, announce: Announce = lambda _: None) -> int:
    """Return how many positions of a training micro-batch fit a device of `memory_gb`, on the trained model with the fewest,
    up to `wanted_positions`; 0 where a model does not fit at all.

    Raises ModelError where nothing is known of a model.
    """
    wanted = wanted_positions(config.trainer, _longest(config))
    if isinstance(config, SFTConfig):
        config = replace(config, trainer=replace(config.trainer, micro_batching="auto", max_positions=wanted))
        return _positions_of_sft(config, memory_gb, announce)
    # As if they sized themselves, so that no more is traced than is asked; compiling would take minutes.
    trainer = replace(config.trainer, micro_batching="auto", memory_probe="trace", max_positions=wanted)
    plan = replace(config.plan, device_memory_gb=memory_gb)
    memory = plan_memory(replace(config, plan=plan, trainer=trainer), largest_only=True, announce=announce)
    if memory is None or not memory.engine_fits or not all(each.budget for each in memory.passes):
        return 0
    return min(each.budget for each in memory.passes if each.phase == "training")


def wanted_positions(batching: MicroBatchConfig, longest: int) -> int:
    """Return the positions that have to fit: of the micro-batches that are stated, or `WANTED`, but one row at least."""
    found = WANTED
    if batching.sizes_itself:
        found = min(WANTED, batching.max_positions)
    elif batching.micro_batching == "token_budget":
        found = batching.max_tokens_per_microbatch
    elif batching.micro_batching == "fixed":
        found = batching.micro_train_batch_size_per_gpu * longest
    return max(longest, found)


def without_recomputing(config: C, memory_gb: float, announce: Announce = lambda _: None) -> tuple[C, str]:
    """Return the config with `model.gradient_checkpointing` decided, and why. Raises ModelError."""
    free, wanted = recomputing(config, False), wanted_positions(config.trainer, _longest(config))
    found = positions_that_fit(free, memory_gb, announce)
    if found >= wanted:
        return free, f"recomputes no activations: {wanted:,} positions fit {memory_gb:g} GB without"
    why = f"recomputes activations: {found:,} positions fit without, {wanted:,} are wanted"
    return recomputing(config, True), why


def kept_together(config: Config, memory_gb: float, announce: Announce = lambda _: None) -> tuple[Config, str]:
    """Return the config with `placement.offload` decided, and engines with as much of the device as models that stay leave
    them; and why. Raises ModelError."""
    wanted = wanted_positions(config.trainer, _longest(config))
    away = replace(config, placement=replace(config.placement, offload=True))
    if config.critic.model.path and config.placement.backend == "ray":
        return away, "models and engines leave their devices in turn, as there is a critic"
    stays = replace(config, placement=replace(config.placement, offload=False))

    def beside(share: float) -> Config:
        vllm = replace(config.generator.vllm, gpu_memory_utilization=share)
        return replace(stays, generator=replace(config.generator, vllm=vllm))

    def fits(share: float) -> bool:
        return positions_that_fit(beside(share), memory_gb, announce) >= wanted

    stated, least = config.generator.vllm.gpu_memory_utilization, _least_engine_share(config, memory_gb)
    shares = [stated, *(hundredths / 100 for hundredths in range(int(100 * stated), ceil(100 * least) - 1, -1))]
    share = next(filter(fits, shares), None) if fits(shares[-1]) else None
    if share is None:
        return away, f"models and engines leave their devices in turn: not all fit {memory_gb:g} GB at once"
    of = f"of which {share:g} are the engine's"
    return beside(share), f"models and engines stay on their devices: all fit {memory_gb:g} GB at once, {of}"


def _least_engine_share(config: Config, memory_gb: float) -> float:
    """Return the share of a device with which an engine has room for its sequences."""
    vllm, samples = config.generator.vllm, config.trainer.train_batch_size * config.generator.n_samples_per_prompt
    sizes = model_sizes(config.plan.architecture or config.model.path, revision=config.model.revision)
    dtype = config.model.dtype if vllm.dtype == "auto" else vllm.dtype
    number_bytes = 4 if dtype == "float32" else 2
    engines = max(1, count_engines(config.generator, config.placement))
    sequences = min(-(-samples // engines), vllm.most_sequences(on_gpu=True))
    kept = sequences * int(_CONTEXT_KEPT * config.generator.max_context_length)
    # Ranks beyond the key and value heads have copies of them.
    split = min(vllm.tensor_parallel_size, sizes.num_kv_heads)
    keys = 2 * sizes.num_layers * sizes.kv_size * number_bytes * kept / split
    weights = number_bytes * sizes.parameters / vllm.devices_per_engine
    return (weights + keys + ENGINE_OVERHEAD_BYTES) / (memory_gb * 1e9)


def shares_gpus(config: AnyConfig) -> bool:
    """Return whether models and engines are on the same GPUs, so that `placement.offload` says something."""
    return (
        isinstance(config, Config)
        and config.platform.name == "gpu"
        and config.generator.has_own_devices
        and shares_devices(config.placement, config.generator, config.platform)
    )


def _longest(config: AnyConfig) -> int:
    return config.data.max_length if isinstance(config, SFTConfig) else config.generator.max_context_length


def _positions_of_sft(config: SFTConfig, memory_gb: float, announce: Announce) -> int:
    settings, device_bytes = sft_learner_settings(config), int(memory_gb * 1e9)
    predicted = predicted_passes(
        settings,
        config.placement.policy_num_workers,
        Effort(announce=announce),
        longest=_longest(config),
        image_tokens=_longest(config),
        device_bytes=device_bytes,
    )
    limit = device_bytes - int(device_bytes * config.trainer.memory_margin) - CONTEXT_BYTES
    try:
        return predicted.token_budget("training", limit)
    except MemoryLimitError:
        return 0
