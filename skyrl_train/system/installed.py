"""What this project's own metadata say, and where its commands find modules and programs. Needs the standard library."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

from skyrl_train.errors import SkyrlTrainError

DISTRIBUTION = "one-gradient-skyrl-train"
"""The name that pip knows, as in pyproject.toml. PyPI's `skyrl-train` is another project's."""
OF_EXTRAS = {
    "datasets": "hub",
    "skyrl_gym": "gym",
    "matplotlib": "plots",
    "httpx": "http",
    "msgpack": "http",
    "fsspec": "remote",
    "jsonschema": "jsonschema",
}
"""Modules that are imported by what uses them alone, and the extras that install them."""
_PARENT = Path(__file__).resolve().parents[2]
_INTERPRETER = re.compile(r"(python|pypy|bash|dash|sh|zsh|node|perl|ruby)[\d.]*")
_SCRIPT = re.compile(r"[^-{}][^{}]*\.(py|sh|js|mjs|cjs|pl|rb)")
_NO_SCRIPT = ("-c", "-e", "-m")
"""Options of interpreters in place of a script."""


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


def require(module: str) -> None:
    """Raise SkyrlTrainError, with the command that installs it, where a module of an extra is not installed."""
    if find_spec(module) is None:
        raise SkyrlTrainError(_lacks(module))


def lacking(error: Exception) -> str:
    """Return what an error of an import lacks and the command that installs it; empty where no extra has it."""
    module = str(getattr(error, "name", "")).partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return _lacks(module) if module in OF_EXTRAS else ""


def _lacks(module: str) -> str:
    return f"{module} is not installed, which is needed here: {install_command(OF_EXTRAS[module])}"


def find_modules_here() -> None:
    """Have a console command find modules in the folder where the user stands, as `python -m` does.

    Worker processes of environments take `sys.path` from this process; Ray adds that folder to its workers' by itself.
    """
    folder = os.getcwd()
    if folder not in sys.path and not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)


def find_programs(words: Sequence[str]) -> list[str]:
    """Return a command that can run in any folder: its program, if it is a path, and an interpreter's script are found from
    the folder where the user stands. What is not there stays as it is, as do names that PATH finds."""
    found = list(words)
    for index in _programs(words):
        path = Path(words[index]).expanduser()
        if path.exists() and (index or os.sep in words[index]):
            found[index] = str(path.absolute())
    return found


def missing_program(words: Sequence[str]) -> str | None:
    """Return the word of a command for its program, or an interpreter's script, that is not here; None where all are."""
    found = find_programs(words)
    for index in _programs(words):
        if not (Path(found[index]).exists() if index else shutil.which(found[index])):
            return words[index]
    return None


def _programs(words: Sequence[str]) -> Iterator[int]:
    """Yield the index of the program, and that of the script where it is an interpreter."""
    if not words or "{" in words[0]:
        return
    yield 0
    if not _INTERPRETER.fullmatch(Path(words[0]).name):
        return
    for index, word in enumerate(words[1:], 1):
        if word in _NO_SCRIPT:
            return
        if _SCRIPT.fullmatch(word):
            yield index
            return
