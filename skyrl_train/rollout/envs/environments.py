"""Names to environments: the built-in ones, those registered in skyrl-gym, or a custom `module:attr`."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from skyrl_train.config.environment import MODEL_CODE, reward_entries
from skyrl_train.errors import ConfigError, DataError, Violation
from skyrl_train.interfaces import Environment
from skyrl_train.objects import ON_THREADS, has_object
from skyrl_train.parts import ENVIRONMENTS
from skyrl_train.registry import PartSpec, argument_violations, import_attr, part_name, split_spec, unknown_name
from skyrl_train.rollout.envs.model_code import in_sandbox, sandbox_lines
from skyrl_train.system import install_command

if TYPE_CHECKING:
    from skyrl_train.config.data import EnvironmentConfig
    from skyrl_train.types import Prompt

_CONFIG_CLASSES: dict[str, str] = {
    "search": "skyrl_gym.envs.search.env:SearchEnvConfig",
    "text2sql": "skyrl_gym.envs.sql.env:Text2SQLEnvConfig",
}
"""skyrl-gym environments that read a dataclass of settings with defaults."""


_DRAWING = ("DISPLAY", "XAUTHORITY", "MUJOCO_GL", "PYOPENGL_PLATFORM", "SDL_VIDEODRIVER", "SDL_AUDIODRIVER")
_OWN_JUDGES = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "PRIME_API_KEY")
_VARIABLES = {"gymnasium": _DRAWING, "verifiers": _OWN_JUDGES}
"""What adapters need of the trainer's variables beside those that every worker gets."""
_ADAPTERS = {
    "gymnasium": ("id", "skyrl_train.rollout.adapters.gymnasium_text:GymnasiumEnvironment"),
    "openenv": ("url", "skyrl_train.rollout.adapters.openenv_client:OpenEnvironment"),
    "reasoning_gym": ("answer", "skyrl_train.rollout.adapters.reasoning_gym_tasks:ReasoningGymEnvironment"),
    "verifiers": ("name", "skyrl_train.rollout.adapters.verifiers_episodes:VerifiersEpisode"),
}
"""Environments of other packages: which argument `NAME:ARGUMENT` gives, and what runs them."""


def split_environment(spec: PartSpec) -> tuple[str, dict[str, Any]]:
    """Return name or target, and keyword arguments; `gymnasium:ID` is the target of its adapter, with `id`."""
    name, arguments = split_spec(spec)
    kind, colon, rest = name.partition(":")
    if kind not in _ADAPTERS:
        return name, arguments
    argument, target = _ADAPTERS[kind]
    return target, {argument: rest, **arguments} if colon else arguments


def is_adapter(spec: PartSpec) -> bool:
    """Whether an environment is one of another package, which is imported only where it runs."""
    return split_environment(spec)[0] in (target for _, target in _ADAPTERS.values())


def variables_of(spec: PartSpec) -> tuple[str, ...]:
    """Return the names of the trainer's variables that an environment needs beside those that every worker gets."""
    target = split_environment(spec)[0]
    return next((_VARIABLES.get(kind, ()) for kind, (_, each) in _ADAPTERS.items() if each == target), ())


def make_environment(spec: PartSpec, extras: Mapping[str, Any]) -> Environment:
    """Make one environment for one trajectory, constructed as `cls(env_config=..., extras=..., **arguments)`.

    Args:
        spec: A built-in name, a name in skyrl-gym's registry or a target, with arguments beside it. Those of a name in
            skyrl-gym's registry are attributes of its `env_config`.
        extras: Every column of the data row but the prompt, and `max_turns`.

    Raises:
        ConfigError: Nothing has that name. Whatever the constructor raises passes through.
    """
    name, arguments = split_environment(spec)
    create = resolve_environment(name)
    # A copy each: environments write into what they are given, and the samples of a prompt share their row.
    own = copy.deepcopy(dict(extras))
    if _is_registered(name):
        level = arguments.pop("sandbox", "required")
        environment = create(env_config=_env_config(name, arguments), extras=own)
        return in_sandbox(environment, name, level) if name in MODEL_CODE else environment
    settings = arguments.pop("env_config", {})
    return create(env_config=SimpleNamespace(**settings), extras=own, **copy.deepcopy(arguments))


RowProblems = list[tuple[int, str]] | None
"""Numbers of rows, and what is wrong with each; None where an environment does not say what it needs."""


def row_problems(spec: PartSpec, rows: Sequence[Mapping[str, Any]]) -> RowProblems:
    """Return what the environment's `check_row` says of each row: the text of what it raises, or returns.

    Args:
        spec: As `make_environment`. Arguments that `check_row` has parameters for are given to it as well.
        rows: Columns of data rows, without the prompt.
    """
    name, arguments = split_environment(spec)
    check = getattr(resolve_environment(name), "check_row", None)
    if check is None:
        return None
    known = inspect.signature(check).parameters
    given = {key: value for key, value in arguments.items() if key in known}
    found: list[tuple[int, str]] = []
    for index, row in enumerate(rows):
        try:
            problem = check(row, **given)
        except Exception as error:
            own = isinstance(error, (DataError, ValueError)) and str(error)
            problem = own or f"{name}.check_row refused the row ({type(error).__name__}: {error})"
        if isinstance(problem, str) and problem:
            found.append((index, " ".join(problem.split())[:500]))
    return found


def is_asynchronous(environment: object) -> bool:
    """Whether the methods of an environment, or of a class of them, are coroutine functions."""
    return any(inspect.iscoroutinefunction(getattr(environment, name, None)) for name in ("init", "step"))


def plays_itself(environment: object) -> bool:
    """Whether an environment, or a class of them, runs its tools by itself and scores whole episodes.

    It has `schemas` of its tools once it has begun, `step_calls(action, calls)` for a response that calls some, and `cut()`
    for a trajectory that no response follows in, for want of room or turns; both answer as `step` does.
    """
    return hasattr(environment, "step_calls")


def playing_itself_violations(spec: PartSpec) -> Iterator[Violation]:
    """What is wrong with an environment beside `environment.tools`: one that runs its own does not run others."""
    name, _ = split_environment(spec)
    if plays_itself(resolve_environment(name)):
        rule, remedy = "runs its tools by itself and no others", "Leave environment.tools empty"
        yield Violation.of(ENVIRONMENTS.setting, split_spec(spec)[0], rule, remedy)


def uses_processes(environment: EnvironmentConfig) -> bool:
    """Whether environments, and with them reward functions, run in worker processes."""
    if environment.isolation != "auto":
        return environment.isolation == "process"
    return (
        environment.env_class is None
        or bool(environment.python)
        or bool(environment.tools)
        or not all(entry.in_trainer for entry in reward_entries(environment))
        or split_spec(environment.env_class)[0] not in ENVIRONMENTS
    )


_CANNOT_END = (
    "a call that never lets others run, as one regular expression may, stops the whole run and cannot be ended"
)


def reward_lines(environment: EnvironmentConfig) -> list[str]:
    """Return what a run's first lines say of its rewards: where they run, which they are, and where to read their prints."""
    lines = [f"isolation   {ON_THREADS}"] if has_object(asdict(environment)) else []
    if environment.isolation == "thread" and not lines:
        lines = [f"isolation   thread: {_CANNOT_END}"]
    lines += [f"reward      {entry.name}, {part_name(entry.spec)}" for entry in reward_entries(environment)]
    lines += [f"sandbox     {line}" for line in sandbox_lines(environment)]
    in_processes = uses_processes(environment)
    return [*lines, *(["prints      of environments and rewards: environments.log"] if in_processes else [])]


def environment_of(prompt: Prompt, environment: EnvironmentConfig) -> str:
    """Return the name of the configured environment; where that is null, of the row's own.

    Raises DataError where nothing names one, or a row names code that the configuration does not allow: whoever writes data
    does not choose what runs here.
    """
    if environment.env_class is not None:
        return split_spec(environment.env_class)[0]
    name = prompt.env_class
    if name is None:
        raise DataError(
            f"prompt {prompt.uid} names no environment, and environment.env_class is null. "
            "Set environment=NAME, or give the row an env_class."
        )
    if ":" in name and name not in environment.allowed:
        raise DataError(
            f"prompt {prompt.uid}: its env_class {name!r} is code that environment.allowed does not list. Rows may name "
            f"registered environments and those listed there. If you trust it, set environment.allowed=['{name}']."
        )
    return name


def check_rows(prompts: Iterable[Prompt], environment: EnvironmentConfig) -> None:
    """Check the environments that rows choose, where they do. Raises DataError as `environment_of`, ConfigError for a name
    that there is not."""
    if environment.env_class is None:
        for name in {environment_of(prompt, environment) for prompt in prompts}:
            if name not in environment.allowed:
                check_environment(name)


def check_environment(spec: PartSpec) -> None:
    """Raises ConfigError where no environment has that name, or it does not take one of the arguments."""
    found = environment_violations(spec)
    if found:
        raise ConfigError(found)


def environment_violations(spec: PartSpec) -> list[Violation]:
    """Return what is wrong with the choice of an environment."""
    name, arguments = split_environment(spec)
    try:
        create = resolve_environment(name)
    except ConfigError as error:
        return list(error.violations)
    if not _is_registered(name):
        given = {"env_config": {}, "extras": {}, **arguments}
        found = argument_violations(create, given, field=ENVIRONMENTS.setting, name=name)
        wrong = [*found, *_unusable(create, name)]
        return wrong or (list(cast("Any", create).violations(**arguments)) if is_adapter(spec) else [])
    settings = _CONFIG_CLASSES.get(name)
    if settings is None:
        return []
    read = cast("type[Any]", import_attr(settings, field=ENVIRONMENTS.setting))
    return list(argument_violations(read, arguments, field=ENVIRONMENTS.setting, name=name))


def _unusable(create: object, name: str) -> Iterator[Violation]:
    """What is wrong with a custom environment as far as its class, or the function that makes it, tells."""
    if inspect.iscoroutinefunction(create):
        rule, remedy = "must not be awaited to be made", "make it with 'def'; its methods may be 'async def'"
        yield Violation.of(ENVIRONMENTS.setting, name, rule, remedy)
    missing = [each for each in ("init", "step") if inspect.isclass(create) and not hasattr(create, each)]
    if missing:
        rule, remedy = f"must define {' and '.join(missing)}", "docs/environments.md says what they do"
        if hasattr(create, "reset"):
            remedy = "a class with gymnasium's reset is named by the ID that it is registered with: gymnasium:ID"
        yield Violation.of(ENVIRONMENTS.setting, name, rule, remedy)


@functools.cache
def resolve_environment(name: str) -> Callable[..., Environment]:
    """Return the class (or factory) that `name` names. Raises ConfigError with the known names and the nearest."""
    entry: Any = name
    if name in ENVIRONMENTS:
        entry = ENVIRONMENTS.builtins[name].target
    elif ":" not in name:
        registered = _gym_entry_points()
        if name not in registered:
            known = dict.fromkeys(sorted({*ENVIRONMENTS, *registered}))
            error = unknown_name(name, known, field=ENVIRONMENTS.setting)
            raise error if registered else _without_gym(error)
        entry = registered[name]
    create = import_attr(entry, field=ENVIRONMENTS.setting) if isinstance(entry, str) else entry
    if not callable(create):
        rule, value = "must name a class or a function that makes an environment", f"{name!r} ({type(create).__name__})"
        remedy = "Point it at the class itself, e.g. my_package.my_env:MyEnv"
        raise ConfigError([Violation(field=ENVIRONMENTS.setting, rule=rule, value=value, remedy=remedy)])
    return cast("Callable[..., Environment]", create)


def _without_gym(error: ConfigError) -> ConfigError:
    """Say that skyrl-gym, which would have more names, is not installed, and how it is."""
    told = f"skyrl-gym, which has more, is not installed: {install_command('gym')}"
    return ConfigError([replace(each, remedy=f"{each.remedy}. Or {told}") for each in error.violations])


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
