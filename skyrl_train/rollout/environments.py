"""Names to environments: the built-in ones, those registered in skyrl-gym, or a custom `module:attr`."""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

from skyrl_train.config.parts import ENVIRONMENTS
from skyrl_train.errors import ConfigError, Violation
from skyrl_train.interfaces import Environment
from skyrl_train.registry import PartSpec, argument_violations, import_attr, split_spec, unknown_name

_CONFIG_CLASSES: dict[str, str] = {
    "search": "skyrl_gym.envs.search.env:SearchEnvConfig",
    "text2sql": "skyrl_gym.envs.sql.env:Text2SQLEnvConfig",
}
"""skyrl-gym environments that read a dataclass of settings with defaults."""


def make_environment(spec: PartSpec, extras: Mapping[str, Any]) -> Environment:
    """Make one environment for one trajectory, constructed as `cls(env_config=..., extras=..., **arguments)`.

    Args:
        spec: A built-in name, a name in skyrl-gym's registry or a target, with arguments beside it. Those of a name in
            skyrl-gym's registry are attributes of its `env_config`.
        extras: Every column of the data row but the prompt, and `max_turns`.

    Raises:
        ConfigError: Nothing has that name. Whatever the constructor raises passes through.
    """
    name, arguments = split_spec(spec)
    create = resolve_environment(name)
    # A copy each: environments write into what they are given, and the samples of a prompt share their row.
    own = copy.deepcopy(dict(extras))
    if _is_registered(name):
        return create(env_config=_env_config(name, arguments), extras=own)
    settings = arguments.pop("env_config", {})
    return create(env_config=SimpleNamespace(**settings), extras=own, **copy.deepcopy(arguments))


def check_environment(spec: PartSpec) -> None:
    """Raises ConfigError where no environment has that name, or it does not take one of the arguments."""
    found = environment_violations(spec)
    if found:
        raise ConfigError(found)


def environment_violations(spec: PartSpec) -> list[Violation]:
    """Return what is wrong with the choice of an environment."""
    name, arguments = split_spec(spec)
    try:
        create = resolve_environment(name)
    except ConfigError as error:
        return list(error.violations)
    if not _is_registered(name):
        given = {"env_config": {}, "extras": {}, **arguments}
        found = argument_violations(create, given, field=ENVIRONMENTS.setting, name=name)
        return list(found)
    settings = _CONFIG_CLASSES.get(name)
    if settings is None:
        return []
    read = cast("type[Any]", import_attr(settings, field=ENVIRONMENTS.setting))
    return list(argument_violations(read, arguments, field=ENVIRONMENTS.setting, name=name))


@functools.cache
def resolve_environment(name: str) -> Callable[..., Environment]:
    """Return the class (or factory) that `name` names. Raises ConfigError with the known names and the nearest."""
    registered = _gym_entry_points()
    known = dict.fromkeys(sorted({*ENVIRONMENTS, *registered}))
    entry = ENVIRONMENTS.builtins[name].target if name in ENVIRONMENTS else registered.get(name)
    if entry is None and ":" in name:
        entry = name
    if entry is None:
        raise unknown_name(name, known, field=ENVIRONMENTS.setting)
    create = import_attr(entry, field=ENVIRONMENTS.setting) if isinstance(entry, str) else entry
    if not callable(create):
        rule, value = "must name a class or a function that makes an environment", f"{name!r} ({type(create).__name__})"
        remedy = "Point it at the class itself, e.g. my_package.my_env:MyEnv"
        raise ConfigError([Violation(field=ENVIRONMENTS.setting, rule=rule, value=value, remedy=remedy)])
    return cast("Callable[..., Environment]", create)


def _is_registered(name: str) -> bool:
    """Whether the environment is one of skyrl-gym's registry, which reads its settings from `env_config`."""
    return name not in ENVIRONMENTS and ":" not in name


def _env_config(name: str, settings: Mapping[str, Any]) -> Any:
    """Return the settings as attributes, laid over the environment's own defaults where it has some."""
    if name not in _CONFIG_CLASSES:
        return SimpleNamespace(**settings)
    return cast("type[Any]", import_attr(_CONFIG_CLASSES[name], field=ENVIRONMENTS.setting))(**settings)


@functools.cache
def _gym_entry_points() -> Mapping[str, Any]:
    """Return name to entry point of what skyrl-gym has registered; nothing where it is not installed."""
    try:
        registry = importlib.import_module("skyrl_gym.envs.registration").registry
        importlib.import_module("skyrl_gym.envs")
    except ImportError:
        return {}
    return {name: spec.entry_point for name, spec in registry.items()}
