"""A composed Hydra config, or any mapping, to the frozen `Config`: everything that is wrong with it at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from skyrl_train.config.convert import MISSING, Conversion, Unresolved
from skyrl_train.config.schema import Config
from skyrl_train.errors import ConfigError, Violation

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Loaded(Generic[T]):
    """A config in which refused values are replaced by defaults, and what was refused."""

    config: T
    violations: tuple[Violation, ...]

    @property
    def refused(self) -> frozenset[str]:
        """Dotted names of the fields that carry a default because what was given is no good."""
        return frozenset(violation.field for violation in self.violations)


def load_config(node: DictConfig | Mapping[str, Any]) -> Config:
    """The validated configuration.

    Raises:
        ConfigError: with all unknown keys, wrong types, values out of range, missing values and unresolvable
            interpolations.
    """
    return load_root(node, Config)


def load_root(node: DictConfig | Mapping[str, Any], schema: type[T]) -> T:
    """`load_config` for another root, e.g. `SFTConfig`."""
    loaded = read_root(node, schema)
    if loaded.violations:
        raise ConfigError(loaded.violations)
    return loaded.config


def read_config(node: DictConfig | Mapping[str, Any]) -> Loaded[Config]:
    """Like `load_config`, but returns the violations beside what could be read."""
    return read_root(node, Config)


def read_root(node: DictConfig | Mapping[str, Any], schema: type[T]) -> Loaded[T]:
    """`read_config` for another root."""
    conversion = Conversion(schema)
    config = conversion.section(schema, _plain(node))
    return Loaded(config=config, violations=tuple(conversion.violations))


def write_yaml(content: Mapping[str, Any], path: Path) -> None:
    """Writes plain nested values, e.g. a resolved configuration with its secrets redacted."""
    OmegaConf.save(OmegaConf.create(dict(content)), path)


def _plain(node: Any) -> Any:
    """Nested plain containers; interpolations resolved one by one, so that one failure does not hide the next."""
    if isinstance(node, DictConfig):
        if node._is_none() or node._is_missing():
            return None if node._is_none() else MISSING
        return {key: _item(node, key) for key in node}
    if isinstance(node, ListConfig):
        if node._is_none() or node._is_missing():
            return None if node._is_none() else MISSING
        return [_item(node, index) for index in range(len(node))]
    if isinstance(node, Mapping):
        return {key: _plain(value) for key, value in node.items()}
    return node


def _item(node: DictConfig | ListConfig, key: Any) -> Any:
    if OmegaConf.is_missing(node, key):
        return MISSING
    try:
        return _plain(node[key])
    except OmegaConfBaseException as error:
        child = node._get_node(key)
        return Unresolved(str(getattr(child, "_value", lambda: key)()), str(error).splitlines()[0])
