"""What this project's own metadata say, and where its commands find modules. Needs the standard library alone."""

from __future__ import annotations

import os
import sys
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

DISTRIBUTION = "one-gradient-skyrl-train"
"""The name that pip knows, as in pyproject.toml. PyPI's `skyrl-train` is another project's."""
_PARENT = Path(__file__).resolve().parents[1]


def requirements() -> list[str]:
    """Return what this release requires, extras included: `peft>=0.21,<0.22; extra == 'lora'`.

    They are those of the distribution that was installed, or of the checkout. Empty where neither can be read.
    """
    path = [str(_PARENT), *sys.path]  # beside the package first: an environment's own interpreter has another path
    for distribution in metadata.distributions(name=DISTRIBUTION, path=path):
        return distribution.requires or []
    pyproject = _PARENT / "pyproject.toml"
    if find_spec("tomllib") is None or not pyproject.is_file():  # Python 3.10 reads no TOML
        return []
    project = import_module("tomllib").loads(pyproject.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].items()
    of_extras = [
        f"{line}{' and' if ';' in line else ';'} extra == '{name}'" for name, lines in extras for line in lines
    ]
    return [*project["dependencies"], *of_extras]


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra, in their versions: `pip install 'peft>=0.21,<0.22'`."""
    lines = [line.partition(";") for line in requirements()]
    names = [f"'{name.strip()}'" for name, _, marker in lines if f"extra == '{extra}'" in marker.replace('"', "'")]
    return f"pip install {' '.join(names)}" if names else f"pip install -e '.[{extra}]' in this project's checkout"


def find_modules_here() -> None:
    """Have a console command find modules in the folder where the user stands, as `python -m` does.

    Worker processes of environments take `sys.path` from this process; Ray adds that folder to its workers' by itself.
    """
    folder = os.getcwd()
    if folder not in sys.path and not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)
