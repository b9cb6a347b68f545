"""Whether the values that are given to a part are such as it declares: their types, ranges and choices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, make_dataclass, replace
from functools import cache
from typing import Any

from skyrl_train.config.algorithm.settings import NotAbove
from skyrl_train.config.door.load import read_root
from skyrl_train.config.fields.fields import fact
from skyrl_train.declarations import declared_arguments
from skyrl_train.errors import Violation
from skyrl_train.registry import PartSpec, Seam, split_spec


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
