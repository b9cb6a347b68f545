"""Rules of asynchronous reinforcement learning: what `trainer.max_staleness` above 0 cannot be combined with. That is what
reads the order of whole batches, and engines whose weights were not tried to change between requests."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.data import DataConfig
from skyrl_train.config.fields import Rule
from skyrl_train.config.generation import GeneratorConfig
from skyrl_train.config.placement import PlacementConfig
from skyrl_train.config.schema import TrainerConfig
from skyrl_train.errors import Violation
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
        generator.backend != "hf",
        "generator.backend",
        part_name(generator.backend),
        "must be hf, the engine whose weights may change while requests wait,",
        "add generator=hf",
    )


def _placement(trainer: TrainerConfig, placement: PlacementConfig) -> Iterator[Violation]:
    yield from _refused(
        trainer,
        placement.backend != "inline",
        "placement.backend",
        placement.backend,
        "must be inline, one process, as nothing else was tried",
        "add placement=inline",
    )


def _curriculum(trainer: TrainerConfig, data: DataConfig) -> Iterator[Violation]:
    yield from _refused(
        trainer,
        data.curriculum.enabled,
        "data.curriculum.enabled",
        True,
        "must be false: it chooses a batch by what the batch before taught,",
        "drop data.curriculum",
    )


def _sampling(trainer: TrainerConfig, algorithm: AlgorithmConfig) -> Iterator[Violation]:
    chosen = algorithm.filters.dynamic_sampling
    yield from _refused(
        trainer,
        chosen == "replace",
        "trainer.algorithm.filters.dynamic_sampling",
        chosen,
        "must be none, or filter: there another prompt begins at once in place of one that teaches nothing,",
        "set trainer.algorithm.filters.dynamic_sampling=filter",
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


ASYNC_RULES: tuple[Rule, ...] = (_engine, _placement, _curriculum, _sampling, _groups, _not_read)
