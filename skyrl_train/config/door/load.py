"""Plain containers to the schema's dataclasses, strictly typed: everything that is wrong with them at once.

A value is accepted as what it is: `4` for a float and a whole string such as `file.parquet` for a tuple of one, but no
bool for an int, no `abc` for a number, no `4.5` for an int. Hydra's composed configs become plain in
`runs/cli/composition.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Literal, TypeVar, cast, get_args, get_origin

from skyrl_train.config.algorithm.earlier import as_now
from skyrl_train.config.fields.facts import Most, Range, StandsFor
from skyrl_train.config.fields.fields import fact, hints, is_optional, remedy_for_unknown, section_of
from skyrl_train.config.schema import Config
from skyrl_train.errors import ConfigError, Violation
from skyrl_train.registry import TARGET, PartSpec, Seam, absolute_target, did_you_mean

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
    """A value that is not of its type: the rule it breaks, and what to do (empty: the default)."""

    def __init__(self, rule: str, remedy: str = ""):
        super().__init__(rule)
        self.rule = rule
        self.remedy = remedy


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


def read_root(tree: Mapping[str, Any], schema: type[T]) -> Loaded[T]:
    """Like `load_root`, but returns the violations beside what could be read."""
    now = as_now(tree)
    conversion = Conversion(schema)
    config = conversion.section(schema, now.tree)
    return Loaded(config=config, violations=(*now.violations, *conversion.violations), notes=now.notes)


@dataclass
class Conversion:
    """Collects violations while one tree is converted."""

    root: type
    violations: list[Violation] = field(default_factory=list)

    def section(self, schema: type[T], node: Any, prefix: str = "") -> T:
        """An instance of `schema`; a field that is absent or refused keeps its default."""
        if not isinstance(node, Mapping):
            self._refuse(
                prefix.rstrip("."), "must be a section with settings in it", node, f"set {prefix}KEY=VALUE instead"
            )
            return schema()
        types_of = hints(cast(type, schema))
        for key in node:
            if key not in types_of:
                self.unknown_key(f"{prefix}{key}", node[key])
        values: dict[str, Any] = {}
        for name, annotation in types_of.items():
            if name not in node:
                continue
            path = f"{prefix}{name}"
            nested = section_of(annotation)
            if nested is not None:
                values[name] = self.section(nested, node[name], f"{path}.")
                continue
            try:
                values[name] = convert(node[name], annotation, path)
            except _Refused as refused:
                remedy = refused.remedy or f"try {path}={as_typed(getattr(schema(), name))}"
                self._refuse(path, refused.rule, node[name], remedy)
        for name, annotation in types_of.items():
            alias = fact(annotation, StandsFor)
            if alias and values.get(name):
                default = getattr(schema(), alias.setting)
                if values.get(alias.setting, default) == default:
                    values[alias.setting] = alias.value
        return schema(**values)

    def unknown_key(self, path: str, value: Any) -> None:
        """Record that the schema has no `path`."""
        remedy = remedy_for_unknown(path, self.root) or "see docs/configuration.md for every setting"
        self._refuse(path, "is not a setting", value, remedy)

    def _refuse(self, path: str, rule: str, value: Any, remedy: str) -> None:
        self.violations.append(Violation(field=path, rule=rule, value=show(value), remedy=remedy))


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


def convert(value: Any, annotation: Any, path: str) -> Any:
    """`value` as `annotation` says. Raises _Refused."""
    if isinstance(value, Unresolved):
        raise _Refused(value.rule, value.reason)
    if isinstance(value, str) and value == MISSING:
        raise _Refused("must be given", f"set {path}=...")
    if annotation is Any and isinstance(value, (Mapping, list)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            convert(item, Any, f"{path}.{key}")
        return value
    if get_origin(annotation) is Annotated:
        base, *rules = get_args(annotation)
        seam = fact(annotation, Seam)
        if seam is not None:
            return _part(value, path, seam, optional=is_optional(base))
        result = convert(value, base, path)
        for rule in rules:
            if isinstance(rule, Range) and not rule.holds(result):
                raise _Refused(f"must be {rule}")
            if isinstance(rule, Most) and result > rule.value:
                raise _Refused(f"must be at most {rule.value:g}: {rule.why}")
        return result
    if is_optional(annotation):
        if value is None:
            return None
        inner = [part for part in get_args(annotation) if part is not type(None)]
        return convert(value, inner[0], path)
    return _convert_plain(value, annotation, path)


def _part(value: Any, path: str, seam: Seam, *, optional: bool) -> PartSpec | None:
    """A name or target as text, or `_target_` and arguments, whose values are checked against the part later on.

    A built-in part gets its name, however it was written, and keeps arguments that are not at their defaults.
    """
    if value is None and optional:
        return None
    if not isinstance(value, Mapping):
        return absolute_target(seam.name_of(cast(str, _scalar(value, str, path))))
    arguments = {str(key): convert(item, Any, f"{path}.{key}") for key, item in value.items()}
    target = arguments.get(TARGET)
    if not isinstance(target, str) or not target:
        raise _Refused(f"must name the part as {TARGET}", f"write {path}={{{TARGET}: package.module:attr, ...}}")
    return seam.normal({**arguments, TARGET: absolute_target(target)})


def _convert_plain(value: Any, annotation: Any, path: str) -> Any:
    origin = get_origin(annotation)
    if origin is Literal:
        return _choice(value, get_args(annotation))
    if origin is tuple:
        return _tuple(value, get_args(annotation), path)
    if origin is Mapping:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise _Refused("must be a mapping with names as keys", f"set {path}={{name: value}}")
        return {key: convert(item, Any, f"{path}.{key}") for key, item in value.items()}
    return _scalar(value, annotation, path)


def _scalar(value: Any, annotation: Any, path: str) -> Any:
    if annotation is bool:
        if not isinstance(value, bool):
            raise _Refused("must be true or false", f"set {path}=true or {path}=false")
        return value
    if annotation is int:
        if isinstance(value, bool) or not isinstance(value, int):
            whole = isinstance(value, float) and value.is_integer()
            raise _Refused("must be an integer", f"write {int(value)}" if whole else "")
        return value
    if annotation is float:
        return _float(value)
    if annotation is str:
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str):
            raise _Refused("must be text", f"quote it: {path}=\"'{value}'\"")
        return value
    return value


def _float(value: Any) -> float:
    if isinstance(value, str) and _EXPONENT.fullmatch(value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _Refused("must be a number")
    if not math.isfinite(value):
        raise _Refused("must be a finite number")
    return float(value)


def _choice(value: Any, choices: tuple[Any, ...]) -> Any:
    for choice in choices:
        if value == choice and type(value) is type(choice):
            return choice
    names = [str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in choices]
    remedy = did_you_mean(str(value), names) or f"choose one, e.g. {names[0]}"
    raise _Refused(f"must be one of {', '.join(names)}", remedy)


def _tuple(value: Any, args: tuple[Any, ...], path: str) -> tuple[Any, ...]:
    if isinstance(value, str) and args == (str, ...):
        return (value,)
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _Refused("must be a list", f"write {path}=[...]")
    if args[-1] is Ellipsis:
        args = (args[0],) * len(value)
    elif len(value) != len(args):
        raise _Refused(f"must be a list of {len(args)}", f"write {path}=[{','.join(['...'] * len(args))}]")
    converted = []
    for index, (item, kind) in enumerate(zip(value, args)):
        try:
            converted.append(convert(item, kind, f"{path}[{index}]"))
        except _Refused as refused:
            raise _Refused(f"{refused.rule} (item {index})", refused.remedy) from None
    return tuple(converted)
