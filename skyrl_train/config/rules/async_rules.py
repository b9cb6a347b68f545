"""Rules of asynchronous reinforcement learning: what `trainer.max_staleness` above 0 cannot be combined with, and what only
it reads. Refused is what cannot compute while the learner does."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl_train.config.fields.fields import Rule
from skyrl_train.config.models.engines import GeneratorConfig
from skyrl_train.config.models.placement import PlacementConfig, PlatformConfig
from skyrl_train.config.placement.bundles import shares_devices
from skyrl_train.config.schema import TrainerConfig
from skyrl_train.errors import Violation
from skyrl_train.parts import ENGINES
from skyrl_train.registry import part_name

_SERIAL = "or set trainer.max_staleness=0"


def _refused(
    trainer: TrainerConfig, holds: bool, field: str, value: object, rule: str, remedy: str
) -> Iterator[Violation]:
    if trainer.max_staleness and holds:
        full = f"{rule} with trainer.max_staleness={trainer.max_staleness}"
        yield Violation.of(field, value, full, f"{remedy}, {_SERIAL}")


def _engine(trainer: TrainerConfig, generator: GeneratorConfig) -> Iterator[Violation]:
    yield from _refused(
        trainer,
        generator.backend == "replay",
        "generator.backend",
        "replay",
        "must be an engine, as recordings are there before the learner is,",
        "add generator=hf",
    )


def _placement(
    trainer: TrainerConfig, generator: GeneratorConfig, placement: PlacementConfig, platform: PlatformConfig
) -> Iterator[Violation]:
    name = "colocate_all" if placement.colocate_all else "backend"
    apart = "set placement.colocate_all=false" if placement.colocate_all else "add placement=ray"
    yield from _refused(
        trainer,
        generator.has_own_devices and shares_devices(placement, generator, platform),
        f"placement.{name}",
        getattr(placement, name),
        "has models and engines share devices, where one of them waits while the other computes: nothing would overlap",
        f"{apart}, with devices for both: placement=auto and placement=gpu_8_split have them apart",
    )


def _groups(trainer: TrainerConfig) -> Iterator[Violation]:
    in_order = trainer.take_groups == "in_order"
    yield from _refused(
        trainer,
        trainer.oversample > 1 and not in_order and trainer.stale_groups == "wait",
        "trainer.stale_groups",
        "wait",
        f"must be drop with trainer.oversample={trainer.oversample:g}: prompts that are too many cannot be waited for,",
        "set trainer.stale_groups=drop, or trainer.take_groups=in_order",
    )
    yield from _refused(
        trainer,
        in_order and trainer.stale_groups == "drop",
        "trainer.stale_groups",
        "drop",
        "is not read with trainer.take_groups=in_order, which drops no prompt for taking long,",
        "drop trainer.stale_groups",
    )


def _in_flight(trainer: TrainerConfig, generator: GeneratorConfig) -> Iterator[Violation]:
    field, off = "trainer.in_flight_updates", "set trainer.in_flight_updates=false"
    if trainer.in_flight_updates and not trainer.max_staleness:
        rule = "needs rollouts that run while the learner updates, and trainer.max_staleness=0 has none"
        yield Violation.of(field, True, rule, f"set trainer.max_staleness=1, or {off}")
    elif trainer.in_flight_updates and not ENGINES.reads(generator.backend).in_flight_updates:
        rule = f"needs an engine that takes weights between two tokens; {part_name(generator.backend)} does not"
        remedy = f"add generator=hf or vllm, declare a custom engine with @reads(in_flight_updates=True), or {off}"
        yield Violation.of(field, True, rule, remedy)
    if trainer.in_flight_cache != "recompute" and not trainer.in_flight_updates:
        rule = "is not read with trainer.in_flight_updates=false"
        remedy = "set trainer.in_flight_updates=true, or drop trainer.in_flight_cache"
        yield Violation.of("trainer.in_flight_cache", trainer.in_flight_cache, rule, remedy)


def _not_read(trainer: TrainerConfig) -> Iterator[Violation]:
    default = TrainerConfig()
    for name in ("stale_groups", "oversample", "take_groups"):
        if not trainer.max_staleness and (value := getattr(trainer, name)) != getattr(default, name):
            yield Violation.of(
                f"trainer.{name}",
                value,
                "is not read with trainer.max_staleness=0",
                f"set trainer.max_staleness=1, or drop trainer.{name}",
            )


ASYNC_RULES: tuple[Rule, ...] = (_engine, _placement, _groups, _in_flight, _not_read)
