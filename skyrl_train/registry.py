"""Names to functions: a plain dict beside the entries, or `package.module:attr` for a user's own.

A `module:attr` string resolves the same way in every process, so nothing has to be registered or shipped.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import TypeVar

from skyrl_train.errors import ConfigError, Violation

T = TypeVar("T")


def did_you_mean(name: str, known: Mapping[str, object] | list[str]) -> str:
    """`did you mean 'grpo'?`, or an empty string where nothing is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean '{near[0]}'?" if near else ""


def import_attr(path: str, *, field: str) -> object:
    """The object that `package.module:attr` names.

    Raises ConfigError naming `field` when the module cannot be imported or has no such attribute.
    """
    module_name, _, attr = path.partition(":")
    try:
        value: object = importlib.import_module(module_name)
        for part in attr.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            [
                Violation(
                    field=field,
                    rule="must name an importable `package.module:attr`",
                    value=repr(path),
                    remedy=f"{type(error).__name__}: {error}. Is the package installed, or its folder on PYTHONPATH?",
                )
            ]
        ) from error
    return value


def resolve(name: str, entries: Mapping[str, T], *, field: str) -> T:
    """The entry called `name`, or the user's own where `name` has the form `package.module:attr`.

    Raises ConfigError naming `field`, the known names and the nearest one.
    """
    if name in entries:
        return entries[name]
    if ":" in name:
        return import_attr(name, field=field)  # type: ignore[return-value]
    remedy = f"{did_you_mean(name, dict(entries))} Write package.module:attr for your own".strip()
    raise ConfigError(
        [Violation(field=field, rule=f"must be one of {', '.join(sorted(entries))}", value=repr(name), remedy=remedy)]
    )
