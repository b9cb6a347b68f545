"""Plain containers to the schema's dataclasses, strictly typed: everything that is wrong with them at once.

A value is accepted as what it is: `4` for a float and a whole string such as `file.parquet` for a tuple of one, but no
bool for an int, no `abc` for a number, no `4.5` for an int. Hydra's composed configs become plain in
`runs/cli/composition.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Generic, Literal, TypeVar, cast, get_args, get_origin

from skyrl_train.config.algorithm.settings import AlgorithmConfig
from skyrl_train.config.fields.fields import Most, Range, fact, hints, is_optional, section_of
from skyrl_train.config.fields.names import remedy_for_unknown
from skyrl_train.config.schema import Config
from skyrl_train.errors import ConfigError, Violation
from skyrl_train.parts import ADVANTAGE_ESTIMATORS, CRITIC_LOSSES, POLICY_LOSSES
from skyrl_train.registry import TARGET, PartSpec, Seam, absolute_target, did_you_mean, split_spec

_SECTION = "trainer.algorithm"


@dataclass(frozen=True)
class _Moved:
    seam: Seam
    part: str
    argument: str
    """Its default is what the setting's was."""

    @property
    def setting(self) -> str:
        """The setting that chooses the part, within its section."""
        return self.seam.setting.removeprefix(f"{_SECTION}.")

    def written(self, arguments: Mapping[str, Any]) -> str:
        """Return what to write now on the command line: the part, with these arguments."""
        inside = "".join(f", {key}: {value}" for key, value in arguments.items())
        return f"{self.seam.setting}={{{TARGET}: {self.part}{inside}}}"


_MOVED: Mapping[str, _Moved] = {
    "gae_lambda": _Moved(ADVANTAGE_ESTIMATORS, "gae", "gae_lambda"),
    "clip_ratio_c": _Moved(POLICY_LOSSES, "dual_clip", "clip_ratio_c"),
    "sapo_tau_pos": _Moved(POLICY_LOSSES, "sapo", "tau_pos"),
    "sapo_tau_neg": _Moved(POLICY_LOSSES, "sapo", "tau_neg"),
    "vespo_k_pos": _Moved(POLICY_LOSSES, "vespo", "k_pos"),
    "vespo_lambda_pos": _Moved(POLICY_LOSSES, "vespo", "lambda_pos"),
    "vespo_k_neg": _Moved(POLICY_LOSSES, "vespo", "k_neg"),
    "vespo_lambda_neg": _Moved(POLICY_LOSSES, "vespo", "lambda_neg"),
    "clip_cov_share": _Moved(POLICY_LOSSES, "clip_cov", "share"),
    "clip_cov_low": _Moved(POLICY_LOSSES, "clip_cov", "low"),
    "clip_cov_high": _Moved(POLICY_LOSSES, "clip_cov", "high"),
    "kl_cov_share": _Moved(POLICY_LOSSES, "kl_cov", "share"),
    "kl_cov_coef": _Moved(POLICY_LOSSES, "kl_cov", "coef"),
    "dppo_divergence": _Moved(POLICY_LOSSES, "dppo", "divergence"),
    "dppo_max_ratio": _Moved(POLICY_LOSSES, "dppo", "max_ratio"),
    "value_clip": _Moved(CRITIC_LOSSES, "clipped", "value_clip"),
}
"""Settings of `trainer.algorithm` that became arguments of the one part that reads them: what was written before goes on.

A command line, a preset, a checkpoint or a recorded configuration may hold them. One that belongs to the part that is
chosen is given to it. Another is left out where it has the value that it had by default or from a preset, and refused
where it has not; in a record of a run, of which nothing read it, it is left out in any case.
"""
EARLIER = frozenset(f"{_SECTION}.{name}" for name in _MOVED)
"""Dotted names of these settings."""
_PARTS = frozenset(moved.seam.setting for moved in _MOVED.values())


@dataclass(frozen=True, kw_only=True)
class AsNow:
    """A tree of settings without those of before."""

    tree: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    """What to write instead of each that was given to its part."""
    violations: tuple[Violation, ...] = ()
    """Of those that the chosen part lacks."""


def for_hydra(overrides: Sequence[str]) -> list[str]:
    """Arguments of a command line as Hydra takes them: it refuses to set what there is not, and adds the entries of a
    mapping to those that are there, where a part is meant to take the place of another."""
    found: list[str] = []
    for text in overrides:
        key, _, value = text.partition("=")
        if key in _PARTS and value.startswith("{") and TARGET in value:
            found.append(f"{key}=null")
        found.append(f"++{text}" if key in EARLIER else text)
    return found


def as_now(tree: Mapping[str, Any]) -> AsNow:
    """The settings of a tree in today's places."""
    trainer = tree.get("trainer")
    algorithm = trainer.get("algorithm") if isinstance(trainer, Mapping) else None
    if not isinstance(algorithm, Mapping) or not algorithm.keys() & _MOVED.keys():
        return AsNow(tree=tree)
    found = in_parts(algorithm)
    assert isinstance(trainer, Mapping), "it has a section"
    return AsNow(
        tree={**tree, "trainer": {**trainer, "algorithm": found.tree}}, notes=found.notes, violations=found.violations
    )


def in_parts(algorithm: Mapping[str, Any]) -> AsNow:
    """The settings of `trainer.algorithm`, each by its name, with those of before in their parts."""
    by_default = AlgorithmConfig()
    now = {name: value for name, value in algorithm.items() if name not in _MOVED}
    given: dict[str, dict[str, Any]] = {}
    notes: dict[str, str] = {}
    violations = []
    for name, moved in _MOVED.items():
        if name not in algorithm:
            continue
        value, spec = algorithm[name], now.get(moved.setting, getattr(by_default, moved.setting))
        if not isinstance(spec, str) and not (isinstance(spec, Mapping) and TARGET in spec):
            continue  # no part is chosen, which is refused elsewhere
        chosen, declared = moved.seam.name_of(spec), moved.seam.arguments(moved.part)[moved.argument]
        if chosen == moved.part:
            now[moved.setting] = {TARGET: chosen, **split_spec(spec)[1], moved.argument: value}
            given.setdefault(chosen, {})[name] = value
            renamed = {_MOVED[old].argument: each for old, each in given[chosen].items()}
            old = ", ".join(f"{_SECTION}.{each}" for each in given[chosen])
            is_one = "is an argument" if len(renamed) == 1 else "are arguments"
            notes[chosen] = f"{old} {is_one} of {chosen} now: write {moved.written(renamed)}"
        elif value != declared.default and not declared.is_preset(value):
            rule = f"is for {moved.setting}={moved.part}; it is {chosen}"
            remedy = f"drop it, or write {moved.written({moved.argument: value})}"
            violations.append(Violation.of(f"{_SECTION}.{name}", value, rule, remedy))
    return AsNow(tree=now, notes=tuple(notes.values()), violations=tuple(violations))


T = TypeVar("T")

MISSING = "???"
"""What YAML writes for a value that the user must give."""

_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
"""`1e-6`: YAML 1.1 readers leave it a string, where OmegaConf reads a number."""


@dataclass(frozen=True)
class Unresolved:
    """Stands for a value whose interpolation failed."""

    expression: str
    reason: str
    rule: str = "could not be worked out"


class NotStated(ValueError):
    """Raised by an interpolation for a value that nothing but the user can state: what must hold, and what to write."""

    def __init__(self, rule: str, remedy: str):
        super().__init__(f"{rule}. {remedy}")
        self.rule, self.remedy = rule, remedy


class _Refused(Exception):
    """A value that is not of its type: rules that it breaks, each with what to do (empty: the default)."""

    def __init__(self, *problems: tuple[str, str]):
        super().__init__(*problems)
        self.problems = problems


@dataclass(frozen=True, kw_only=True)
class Loaded(Generic[T]):
    """A config in which refused values are replaced by defaults, and what was refused."""

    config: T
    violations: tuple[Violation, ...]
    notes: tuple[str, ...] = ()
    """What to write instead of settings of before."""

    @property
    def refused(self) -> frozenset[str]:
        """Dotted names of the fields that carry a default because what was given is no good."""
        return frozenset(violation.field for violation in self.violations)


def load_config(tree: Mapping[str, Any]) -> Config:
    """The validated configuration.

    Raises:
        ConfigError: with all unknown keys, wrong types, values out of range, missing values and unresolvable
            interpolations.
    """
    return load_root(tree, Config)


def load_root(tree: Mapping[str, Any], schema: type[T]) -> T:
    """`load_config` for another root, e.g. `SFTConfig`."""
    loaded = read_root(tree, schema)
    if loaded.violations:
        raise ConfigError(loaded.violations)
    return loaded.config


def read_root(tree: object, schema: type[T], *, at: str = "", root: type | None = None) -> Loaded[T]:
    """Like `load_root`, but returns the violations beside what could be read.

    Args:
        at: Where the tree stands, if it is a section: `data.mix[0]`.
        root: Whose settings are suggested for unknown ones, if not those of `schema`.
    """
    violations: list[Violation] = []
    now = as_now(tree if isinstance(tree, Mapping) else {})
    config = _section(schema(), now.tree if isinstance(tree, Mapping) else tree, at, root or schema, violations)
    return Loaded(config=config, violations=(*now.violations, *violations), notes=now.notes)


def _section(default: T, node: Any, at: str, root: type, found: list[Violation]) -> T:
    """`default` with what `node` states; what is wrong with it is added to `found`, and leaves the default."""

    def refuse(path: str, rule: str, value: Any, remedy: str) -> None:
        found.append(Violation(field=path, rule=rule, value=show(value), remedy=remedy))

    if not isinstance(node, Mapping):
        refuse(at, "must be a section with settings in it", node, f"set {at}.KEY=VALUE instead")
        return default
    kind: type = type(default)
    types = hints(kind)
    paths = {name: f"{at}.{name}" if at else str(name) for name in (*node, *types)}
    for key in node:
        if key not in types:
            remedy = remedy_for_unknown(paths[key], root) or "see docs/configuration.md for every setting"
            refuse(paths[key], "is not a setting", node[key], remedy)
    values: dict[str, Any] = {}
    for name in (each for each in types if each in node):
        path, standard = paths[name], getattr(default, name)
        if section_of(types[name]) is not None:
            values[name] = _section(standard, node[name], path, root, found)
            continue
        try:
            values[name] = convert(node[name], types[name], path)
        except _Refused as refused:
            for rule, remedy in refused.problems:
                refuse(path, rule, node[name], remedy or f"try {path}={as_typed(standard)}")
    return replace(default, **values)  # type: ignore[type-var]


def convert(value: Any, annotation: Any, path: str) -> Any:
    """`value` as `annotation` says. Raises _Refused."""
    if isinstance(value, Unresolved):
        raise _Refused((value.rule, value.reason))
    if isinstance(value, str) and value == MISSING:
        raise _Refused(("must be given", f"set {path}=..."))
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        seam = fact(annotation, Seam)
        if seam is not None:
            return None if value is None and is_optional(args[0]) else _part(value, path, seam)
        result = convert(value, args[0], path)
        for rule in args[1:]:
            if isinstance(rule, (Range, Most)) and not rule.holds(result):
                raise _Refused((f"must be {rule}", ""))
        return result
    if is_optional(annotation):
        return None if value is None else convert(value, next(each for each in args if each is not type(None)), path)
    if origin is Literal:
        return _choice(value, args)
    if origin is tuple:
        return _tuple(value, args, path)
    if origin is Mapping and not (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
        raise _Refused(("must be a mapping with names as keys", f"set {path}={{name: value}}"))
    if origin is Mapping or (annotation is Any and isinstance(value, Mapping)):
        return {key: convert(item, Any, f"{path}.{key}") for key, item in value.items()}
    if annotation is Any and isinstance(value, list):
        return [convert(item, Any, f"{path}.{index}") for index, item in enumerate(value)]
    return _scalar(value, annotation, path)


def _part(value: Any, path: str, seam: Seam) -> PartSpec:
    """A name or target as text, or `_target_` and arguments, whose values are checked against the part later on.

    A built-in part gets its name, however it was written, and keeps arguments that are not at their defaults.
    """
    if not isinstance(value, Mapping):
        return absolute_target(seam.name_of(cast(str, _scalar(value, str, path))))
    arguments = {str(key): convert(item, Any, f"{path}.{key}") for key, item in value.items()}
    target = arguments.pop(TARGET, None)
    if not isinstance(target, str) or not target:
        raise _Refused((f"must name the part as {TARGET}", f"write {path}={{{TARGET}: package.module:attr, ...}}"))
    return seam.normal({**arguments, TARGET: absolute_target(target)})


def _scalar(value: Any, annotation: Any, path: str) -> Any:
    if annotation is float and isinstance(value, str) and _EXPONENT.fullmatch(value):
        value = float(value)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_whole = is_number and isinstance(value, int)
    if annotation is bool and not isinstance(value, bool):
        raise _Refused(("must be true or false", f"set {path}=true or {path}=false"))
    if annotation is int and not is_whole:
        raise _Refused(("must be an integer", f"write {int(value)}" if is_number and value.is_integer() else ""))
    if annotation is float:
        if not is_number or not math.isfinite(value):
            raise _Refused((f"must be a {'finite ' if is_number else ''}number", ""))
        return float(value)
    if annotation is str and not is_whole and not isinstance(value, str):
        raise _Refused(("must be text", f"quote it: {path}=\"'{value}'\""))
    return str(value) if annotation is str else value


def _choice(value: Any, choices: tuple[Any, ...]) -> Any:
    if any(value == choice and type(value) is type(choice) for choice in choices):
        return value
    names = [as_typed(choice) for choice in choices]
    remedy = did_you_mean(str(value), names) or f"choose one, e.g. {names[0]}"
    raise _Refused((f"must be one of {', '.join(names)}", remedy))


def _tuple(value: Any, args: tuple[Any, ...], path: str) -> tuple[Any, ...]:
    if isinstance(value, str) and args == (str, ...):
        return (value,)
    if not isinstance(value, (list, tuple)):
        raise _Refused(("must be a list", f"write {path}=[...]"))
    if args[-1] is Ellipsis:
        args = (args[0],) * len(value)
    elif len(value) != len(args):
        raise _Refused((f"must be a list of {len(args)}", f"write {path}=[{','.join(['...'] * len(args))}]"))
    converted: list[Any] = []
    problems: list[tuple[str, str]] = []
    for index, (item, kind) in enumerate(zip(value, args)):
        try:
            converted.append(convert(item, kind, f"{path}[{index}]"))
        except _Refused as refused:
            problems += [(f"{rule} (item {index})", remedy) for rule, remedy in refused.problems]
    if problems:
        raise _Refused(*problems)
    return tuple(converted)


def show(value: Any) -> str:
    """A value as text for a message, short."""
    if isinstance(value, Unresolved):
        return value.expression
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def as_typed(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, (tuple, list)):
        return f"[{','.join(as_typed(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{as_typed(item)}' for key, item in value.items())}}}"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return "''" if value == "" else str(value)
