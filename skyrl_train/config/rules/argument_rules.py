"""What declarations say by themselves: whether a setting is for the kinds that are chosen, and whether the values that are
given to a part are of the types, ranges and choices that it declares."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import field, make_dataclass, replace
from functools import cache
from operator import attrgetter
from typing import Any

from skyrl_train.config.algorithm.settings import NotAbove
from skyrl_train.config.door.load import as_typed, read_root
from skyrl_train.config.fields.fields import Kind, Of, SchemaField, fact, is_refused, kinds_of
from skyrl_train.declarations import declared_arguments
from skyrl_train.errors import Violation
from skyrl_train.registry import PartSpec, Reads, Seam, part_name, split_spec


def kind_violations(config: object, refused: Collection[str] = ()) -> Iterator[Violation]:
    """Settings that nothing reads with the kinds that are chosen, and that do not have their defaults.

    Args:
        refused: As in `validate_config`.
    """
    root: type = type(config)
    for path, (setting, kinds) in kinds_of(root).items():
        value = attrgetter(path)(config)
        if value == setting.default or any(
            is_refused(each, refused) for each in (path, *(one.setting for one in kinds))
        ):
            continue
        for kind in kinds:
            of, now = kind.of, attrgetter(kind.setting)(config)
            if isinstance(of, Of) and not kind.is_chosen(now) and (not of.values or value in of.values):
                yield _of_another_kind(setting, value, kind, now, of.why)
                break


def _of_another_kind(setting: SchemaField, value: Any, kind: Kind, now: Any, why: str) -> Violation:
    chosen = part_name(now) if kind.seam else as_typed(now)
    *others, last = [each.partition("=")[2] for each in kind.written]
    kinds = kind.with_value(f"{', '.join(others)} or {last}" if others else last)
    rule = (
        f"is for {kinds}, and does nothing with {chosen}"
        if kind.names
        else f"does nothing with {kind.setting}={chosen}"
    )
    rule += f": {why}" if why else ""
    write = kind.of.write or kind.written[0]
    if name := kind.of.reads:
        declared = f"{name}=True" if hasattr(Reads, name) else f'"{name}"'
        write += f" (a custom one declares @reads({declared}))"
    verb = "set" if "." in write.partition("=")[0] else "add"
    return Violation.of(setting.path, value, rule, f"{verb} {write}, or leave it at {as_typed(setting.default)}")


def value_violations(seam: Seam, spec: PartSpec, setting: str) -> Iterator[Violation]:
    """What is wrong with the values of arguments that a built-in part declares."""
    declared, (_, given) = seam.arguments(spec), split_spec(spec)
    stated = {key: value for key, value in given.items() if key in declared}
    if not stated:
        return
    read = read_root(stated, _schema(seam.builtins[seam.name_of(spec)].target))
    for found in read.violations:
        remedy = found.remedy.replace(f"{found.field}=", f"{setting}.{found.field}=")
        yield replace(found, field=f"{setting}.{found.field}", remedy=remedy)
    for key, argument in declared.items():
        above, value = fact(argument.annotation, NotAbove), getattr(read.config, key)
        if above is not None and not {key, above.argument} & read.refused:
            most = getattr(read.config, above.argument)
            if value > most:
                rule = f"must not be above {above.argument}={most:g}"
                yield Violation.of(f"{setting}.{key}", value, rule, f"try {setting}.{key}={most:g}")


@cache
def _schema(target: str) -> type[Any]:
    """A section with the arguments of a built-in part as its settings."""
    arguments = declared_arguments(target).items()
    return make_dataclass("Arguments", [(key, each.annotation, field(default=each.default)) for key, each in arguments])
