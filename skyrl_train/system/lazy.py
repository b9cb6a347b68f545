"""Faces of packages: what others may use of one, imported when it is used."""

from __future__ import annotations

import sys
from importlib import import_module

TYPE_CHECKING = False  # as type checkers know it: `typing` takes a while to import, and every package comes by here
if TYPE_CHECKING:
    from collections.abc import Callable


def lazily(package: str) -> Callable[[str], object]:
    """Return a package's `__getattr__`, which imports a name when it is first used, from where the package's block for type
    checkers imports it. So importing a package costs nothing, and a command that needs one light name of it stays quick."""
    homes: dict[str, str] = {}

    def load(name: str) -> object:
        if not homes:
            spec = sys.modules[package].__spec__
            source: str = spec.loader.get_source(package)  # type: ignore[union-attr]
            found = import_module("re").findall(r"^    from (\S+) import (?:\(([^)]*)\)|(.*))$", source, 8)
            homes.update({each.strip(): home for home, lines, line in found for each in (lines or line).split(",")})
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        value = import_module(f"{home}.{name}") if home == package else getattr(import_module(home), name)
        setattr(sys.modules[package], name, value)
        return value

    return load
