"""The root configs of `conf/`, and what checks each of them: its schema, its rules, what it needs of the machine."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from skyrl_train.config.schema import Config
from skyrl_train.config.sft import AnyConfig, SFTConfig, validate_sft
from skyrl_train.config.validate import validate_config
from skyrl_train.config.validate_batch import with_sound_sizes
from skyrl_train.errors import Violation


@dataclass(frozen=True, kw_only=True)
class Root:
    """One kind of run."""

    schema: type[AnyConfig]
    platform_group: str
    """The group that chooses the platform."""
    trains: bool = True
    """Whether models are trained, or only generate."""

    def violations(self, config: AnyConfig, *, refused: Collection[str]) -> list[Violation]:
        """Rules between fields."""
        if isinstance(config, SFTConfig):
            return validate_sft(config, refused=refused)
        return validate_config(config, refused=refused)

    def of_settings(
        self, violations: Iterable[Violation], config: AnyConfig, *, refused: Collection[str]
    ) -> list[Violation]:
        """What is wrong with single settings, with remedies that go with the others."""
        if isinstance(config, SFTConfig):
            return list(violations)
        return with_sound_sizes(violations, config, refused=refused)


RL_ROOT = Root(schema=Config, platform_group="platform")
SFT_ROOT = Root(schema=SFTConfig, platform_group="sft_platform")


def root_of(config_name: str) -> Root:
    """By the name of an entry point's root config."""
    return SFT_ROOT if config_name == "sft" else RL_ROOT
