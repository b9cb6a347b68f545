"""Faces of packages: what others may use of one, imported when it is used."""

from __future__ import annotations

import sys
from importlib import import_module

TYPE_CHECKING = False  # as type checkers know it: `typing` takes a while to import, and every package comes by here
if TYPE_CHECKING:
    from collections.abc import Callable


def lazily(package: str) -> Callable[[str], object]:
    """Return a package's `__getattr__`, which imports a name when it is first used, from where the package's block for type
    checkers imports it. So importing a package costs nothing, and a command that needs one light name of it stays quick.
    The package's `__all__` is the list of these names."""
    homes: dict[str, str] = {}

    def load(name: str) -> object:
        if not homes:
            spec = sys.modules[package].__spec__
            source: str = spec.loader.get_source(package)  # type: ignore[union-attr]
            found = import_module("re").findall(r"^    from (\S+) import (?:\(([^)]*)\)|(.*))$", source, 8)
            homes.update(
                (name.rpartition(" as ")[2].strip(), home)
                for home, *lines in found
                for name in "".join(lines).split(",")
                if name.strip()
            )
        if name == "__all__":
            return sorted(homes)
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        try:
            value = import_module(f"{home}.{name}") if home == package else getattr(import_module(home), name)
        except ModuleNotFoundError as error:
            if lacks := import_module("skyrl_train.system.installed").lacking(error):
                raise import_module("skyrl_train.errors").SkyrlTrainError(lacks) from error
            raise
        setattr(sys.modules[package], name, value)
        return value

    return load
