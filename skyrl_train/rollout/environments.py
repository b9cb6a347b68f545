"""Names to environments: the built-in ones, those registered in skyrl-gym, or a user's own `module:attr`."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

from skyrl_train.errors import ConfigError, Violation
from skyrl_train.interfaces import Environment
from skyrl_train.registry import did_you_mean, import_attr

ENVIRONMENTS: dict[str, str] = {
    "word_problems": "skyrl_train.rollout.envs.word_problems:WordProblemsEnv",
}
"""Built-in environments, found before skyrl-gym's of the same name."""

_CONFIG_CLASSES: dict[str, str] = {
    "search": "skyrl_gym.envs.search.env:SearchEnvConfig",
    "text2sql": "skyrl_gym.envs.sql.env:Text2SQLEnvConfig",
}
"""skyrl-gym environments that read a dataclass of settings with defaults."""


def make_environment(env_class: str, kwargs: Mapping[str, Any], extras: Mapping[str, Any]) -> Environment:
    """One environment for one trajectory, constructed as `cls(env_config=..., extras=...)`.

    Args:
        env_class: A name in `ENVIRONMENTS`, a name in skyrl-gym's registry, or `package.module:attr`.
        kwargs: The user's `environment.kwargs`; read by the environment as attributes of `env_config`.
        extras: Every column of the data row but the prompt, and `max_turns`.

    Raises:
        ConfigError: Nothing has that name. Whatever the constructor raises passes through.
    """
    create = resolve_environment(env_class)
    # A copy each: environments write into what they are given, and the samples of a prompt share their row.
    return create(env_config=make_env_config(env_class, kwargs), extras=copy.deepcopy(dict(extras)))


def check_environment(env_class: str, kwargs: Mapping[str, Any]) -> None:
    """Raises ConfigError where no environment has that name, or it does not know one of the settings."""
    resolve_environment(env_class)
    make_env_config(env_class, kwargs)


@functools.cache
def resolve_environment(env_class: str) -> Callable[..., Environment]:
    """The class (or factory) that `env_class` names. Raises ConfigError with the known names and the nearest."""
    if env_class in ENVIRONMENTS:
        return cast("Callable[..., Environment]", import_attr(ENVIRONMENTS[env_class], field="environment.env_class"))
    registered = _gym_entry_points()
    entry = registered.get(env_class)
    if entry is None and ":" in env_class:
        entry = env_class
    if entry is None:
        known = sorted({*ENVIRONMENTS, *registered})
        remedy = f"{did_you_mean(env_class, known)} Write package.module:attr for your own".strip()
        raise ConfigError(
            [
                Violation(
                    field="environment.env_class",
                    rule=f"must be one of {', '.join(known)}",
                    value=repr(env_class),
                    remedy=remedy,
                )
            ]
        )
    create = import_attr(entry, field="environment.env_class") if isinstance(entry, str) else entry
    if not callable(create):
        raise ConfigError(
            [
                Violation(
                    field="environment.env_class",
                    rule="must name a class or a function that makes an environment",
                    value=f"{env_class!r} ({type(create).__name__})",
                    remedy="Point it at the class itself, e.g. my_package.my_env:MyEnv",
                )
            ]
        )
    return cast("Callable[..., Environment]", create)


def make_env_config(env_class: str, kwargs: Mapping[str, Any]) -> Any:
    """`env_config` with `kwargs` as attributes, laid over the environment's own defaults where it has some.

    Raises ConfigError for a setting that the environment's dataclass does not have.
    """
    if env_class not in _CONFIG_CLASSES:
        return SimpleNamespace(**kwargs)
    config_class = cast("type[Any]", import_attr(_CONFIG_CLASSES[env_class], field="environment.env_class"))
    known = [field.name for field in dataclasses.fields(config_class)]
    unknown = [name for name in kwargs if name not in known]
    if unknown:
        raise ConfigError(
            [
                Violation(
                    field=f"environment.kwargs.{name}",
                    rule=f"must be one of {', '.join(known)} for env_class {env_class}",
                    value=repr(kwargs[name]),
                    remedy=did_you_mean(name, known) or f"Drop environment.kwargs.{name}",
                )
                for name in unknown
            ]
        )
    return config_class(**kwargs)


def _gym_entry_points() -> Mapping[str, Any]:
    """Name to entry point of what skyrl-gym has registered; nothing where it is not installed."""
    try:
        registry = importlib.import_module("skyrl_gym.envs.registration").registry
        importlib.import_module("skyrl_gym.envs")
    except ImportError:
        return {}
    return {name: spec.entry_point for name, spec in registry.items()}
