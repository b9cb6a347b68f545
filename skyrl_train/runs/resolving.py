"""What is settled of a run before torch is imported, so that what is wrong is refused within a second or two.

    Config --place, size--> nothing is left at auto --rules--> sound --pin--> models and rewards have a digest --> Resolved

A run, its first look, an evaluation and a plan begin here, and so do an audit and a capsule's step that is executed again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, TypeVar

from skyrl_train.config import AnyConfig, Config, RunConfig, SFTConfig
from skyrl_train.config.data import DataConfig, EnvironmentConfig
from skyrl_train.config.environment import RewardEntry, reward_entries
from skyrl_train.config.models import ModelConfig, PlacementConfig, PlatformConfig, StrategyConfig
from skyrl_train.config.rules import mixed_datasets
from skyrl_train.data.sources import refuse_images
from skyrl_train.errors import ConfigError, DataError, ModelError, Violation, counted
from skyrl_train.model import files, pinned, source_line  # of which `files.weights_identity` alone imports torch
from skyrl_train.model.sizes import read_architecture
from skyrl_train.plan import placement_lines, placement_report
from skyrl_train.registry import TARGET, PartSpec, part_name, split_spec
from skyrl_train.rollout import checked_prompts, rewards
from skyrl_train.rollout.envs import reward_lines
from skyrl_train.rollout.hosts import held_rewards
from skyrl_train.runs.cli.placement import (
    place,
    place_for_plan,
    place_replicas,
    rule_violations,
    with_memory_settings,
)
from skyrl_train.system import LARGE_PAGES, Devices, detect_platform, local_devices, multiplies_bfloat16
from skyrl_train.types import Prompt

C = TypeVar("C", Config, SFTConfig, AnyConfig)
ConfigT = TypeVar("ConfigT", bound=AnyConfig, covariant=True)


@dataclass(frozen=True, kw_only=True)
class Resolved(Generic[ConfigT]):
    """A run of which nothing is left to choose, and nothing is known to be wrong but the `violations` of a plan."""

    config: ConfigT
    """Placed and sized; of a run, models and reward models by the digests of their weights."""
    devices: Devices = field(default_factory=Devices)
    """The GPUs that were found for a plan."""
    notes: tuple[str, ...] = ()
    """What a plan had to assume."""
    violations: tuple[Violation, ...] = ()
    """Why what is planned would be refused."""
    is_placed: bool = True
    """False where no placement can be chosen for a plan."""

    @property
    def promise(self) -> str:
        """What a resumed run has in common with one that was not interrupted; also kept in `plan.json`."""
        return resume_promise(self.config)

    @property
    def lines(self) -> tuple[str, ...]:
        """What a user wants to know before anything happens: where it runs, what it trains on what, where it writes."""
        return tuple(first_lines(self.config))


Purpose = Literal["train", "generate", "plan", "again"]


def resolve(
    config: C, *, purpose: Purpose = "train", announce: Callable[[str], object] = lambda _: None
) -> Resolved[C]:
    """Return the run of a configuration. Settles the threads of what a run imports next.

    Args:
        purpose: `train` and `generate` are for the devices that there are. `plan` is for those that are stated, reads no
            weights, and has what is wrong in `violations`. `again` is a step that was recorded, in this process alone.
        announce: Is told what takes seconds, one line each.

    Raises ConfigError with every rule that is broken; ModelError for weights that cannot be had.
    """
    if purpose == "again":
        return Resolved(config=_in_this_process(config))
    if purpose == "plan" and isinstance(config, Config):
        return _planned(config, announce)
    config = place(config, training=purpose == "train")
    if purpose == "train":
        memory_gb = 0.0
        if config.platform.name == "gpu":  # nothing is assumed here: what does not fit would fail in the run
            memory_gb = config.placement.gpu_memory_gb or local_devices().memory_gb
        config = with_memory_settings(config, memory_gb, announce)
    if violations := rule_violations(config):
        raise ConfigError(violations)
    limit_threads(config)
    config = replace(config, model=pinned(config.model))
    if purpose == "train" and isinstance(config, Config) and config.generator.backend != "replay":
        config = with_reward_weights(config)
    return Resolved(config=config)


def for_server(config: Config) -> Config:
    """Return the settings of a server, whose placement is chosen. Raises ConfigError for an engine or a strategy that a
    server has not."""
    if config.generator.backend not in ("hf", "vllm"):
        rule, remedy = "must be hf or vllm, which sample from adapters side by side", "set generator=hf"
        raise ConfigError([Violation.of("generator.backend", str(config.generator.backend), rule, remedy)])
    config = resolve(place_replicas(config)).config
    if config.strategy.kind not in ("single", "ddp"):
        rule, remedy = "must be ddp, or single on one device: each has the whole base", "set strategy=ddp"
        raise ConfigError([Violation.of("strategy", config.strategy.kind, rule, remedy)])
    return config


def _planned(config: Config, announce: Callable[[str], object]) -> Resolved[Config]:
    try:
        config, devices, notes = place_for_plan(config)
    except ConfigError as error:  # no placement can be chosen: the rules are those of all else
        found = (*error.violations, *rule_violations(config, refused=["placement"]))
        return Resolved(config=config, violations=found, is_placed=False)
    memory_gb = config.plan.device_memory_gb or config.placement.gpu_memory_gb or devices.memory_gb
    config = with_memory_settings(config, memory_gb, announce)
    return Resolved(config=config, devices=devices, notes=tuple(notes), violations=tuple(rule_violations(config)))


def _in_this_process(config: C) -> C:
    """Return a recorded configuration without Ray, with one rank, on the device of this process; nothing is profiled."""
    changes: dict[str, Any] = {
        "platform": _device_here(config.platform),
        "placement": PlacementConfig(),
        "strategy": StrategyConfig(),
        "trainer": replace(config.trainer, profile_steps=()),
    }
    return replace(config, **changes)


def _device_here(platform: PlatformConfig) -> PlatformConfig:
    """Return the run's device, or the CPU where there is no GPU."""
    from torch import cuda

    return platform if not platform.on_gpu or cuda.is_available() else replace(platform, name="cpu", device="cpu")


def limit_threads(config: RunConfig) -> None:
    """Settles the threads of libraries that are imported later, and their pages of memory. Idle OpenMP threads spin on busy
    cores and make all of it several times slower."""
    os.environ.setdefault("OMP_NUM_THREADS", str(config.platform.num_threads))
    if config.platform.num_threads > 1:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name, value in LARGE_PAGES.items():
        os.environ.setdefault(name, value)


def resume_promise(config: AnyConfig) -> str:
    """Return what a resumed run has in common with one that was not interrupted."""
    if isinstance(config, Config) and config.trainer.max_staleness:
        return (
            "identical in what was trained on before, and no prompt is lost or comes twice; which weights sample what "
            f"comes next depends on time (trainer.max_staleness={config.trainer.max_staleness})"
        )
    if isinstance(config, Config) and config.generator.seeds == "engine":
        return "not identical: samples are left to the engine's own seed (generator.seeds=engine)"
    if config.platform.name == "cpu":
        return "identical"
    if config.deterministic:
        return "identical (deterministic=true)"
    return "identical in data, prompts and seeds, not in rounding (deterministic=false)"


def first_lines(config: AnyConfig) -> Iterator[str]:
    """Yield where the run is, what it trains on what, what acts and what generates, and where it writes."""
    detected = detect_platform()
    why = detected.reason if detected.name == config.platform.name else "chosen on the command line"
    yield f"platform    {config.platform.name} ({why})"
    yield f"placement   {config.placement.backend}, strategy {part_name(config.strategy.name)}"
    yield f"model       {config.model.path} ({config.model.dtype} on {config.platform.device})"
    if config.platform.name == "cpu" and config.model.dtype == "bfloat16" and not multiplies_bfloat16():
        yield "            this processor multiplies no bfloat16, so that it takes fifty times as long: model.dtype=float32"
    if source := source_line(config.model):
        yield f"            {source}"
    if isinstance(config, Config):
        yield from _lines_of_rl(config)
    else:
        yield f"data        {', '.join(config.data.train)}"
        yield f"held out    {', '.join(config.data.held_out) or 'none'}"
    yield from config.derived
    if (promise := resume_promise(config)) != "identical":
        yield f"resume      {promise}"
    yield f"output      {config.output_dir}"


def _lines_of_rl(config: Config) -> Iterator[str]:
    mix = mixed_datasets(config.data, config.environment, config.generator.sampling)[0]
    yield f"data        {', '.join([f'{each.name} ({each.weight:g})' for each in mix] or config.data.train)}"
    if config.platform.name == "gpu":
        devices = Devices() if config.placement.ray_address else local_devices()
        for name, _, rest in (line.partition(" ") for line in placement_lines(placement_report(config, devices))):
            yield f"{name:<11} {rest.strip()}"
    environment, generator = part_name(config.environment.env_class or "of each row"), config.generator
    is_single = environment == "single_turn" and not config.environment.tools
    turns = "1 turn" if is_single else f"up to {counted(generator.max_turns, 'turn')}"
    yield f"environment {environment}, {turns}"
    yield from reward_lines(config.environment)
    new_tokens = counted(generator.sampling.max_generate_length, "new token")
    yield f"engine      {part_name(generator.backend)}, {new_tokens} a turn"
    if generator.eval_differences:
        yield f"evaluation  samples with {generator.eval_differences}"


def reward_models(environment: EnvironmentConfig) -> list[tuple[RewardEntry, rewards.RewardModel]]:
    """Return the rewards that a model of this run gives, not one behind a URL."""
    found = held_rewards(reward_entries(environment))
    return [(entry, reward) for entry, reward in found if isinstance(reward, rewards.RewardModel) and reward.path]


def with_reward_weights(config: Config) -> Config:
    """Return the configuration in which each reward model of this run has the digest of its weights, so that the run, and
    whoever resumes it, scores with no others. Raises ModelError."""
    models = reward_models(config.environment)
    if not models:
        return config
    found = {
        entry.setting: reward.weights or files.weights_identity(reward.path, reward.revision)
        for entry, reward in models
    }

    def with_digest(setting: str, spec: PartSpec) -> PartSpec:
        target, arguments = split_spec(spec)
        return {TARGET: target, **arguments, "weights": found[setting]} if setting in found else spec

    environment = config.environment
    pinned_rewards = tuple(
        with_digest(f"environment.rewards[{index}]", spec) for index, spec in enumerate(environment.rewards)
    )
    reward = None if environment.reward is None else with_digest("environment.reward", environment.reward)
    return replace(config, environment=replace(environment, reward=reward, rewards=pinned_rewards))


@dataclass(frozen=True, kw_only=True)
class CheckedRows:
    """The prompts of a run, or of one data set of a mix, whose rows have what their environment and rewards need."""

    train: list[Prompt]
    validation: list[Prompt]


def read_all_rows(config: Config) -> list[CheckedRows]:
    """Read and check the rows of a run, or of each data set of its mix. Raises DataError, ConfigError."""
    if config.generator.backend == "replay":
        return []
    mix = mixed_datasets(config.data, config.environment, config.generator.sampling)[0]
    datasets = [(each.data, each.environment) for each in mix] or [(config.data, config.environment)]
    return [_read_rows(config.model, data, environment) for data, environment in datasets]


def _read_rows(model: ModelConfig, data: DataConfig, environment: EnvironmentConfig) -> CheckedRows:
    train = checked_prompts(data, data.train, data.max_train_prompts, environment)
    try:
        validation = checked_prompts(data, data.held_out, data.max_validation_prompts, environment)
    except DataError as error:
        raise DataError(
            f"{error} It is of data.validation; data.validation=[] goes without held-out prompts."
        ) from error
    with suppress(ModelError):  # nothing is known of it yet
        if "vision_config" not in read_architecture(model.path, revision=model.revision):
            for prompt in (*train, *validation):
                refuse_images(prompt)
    return CheckedRows(train=train, validation=validation)
