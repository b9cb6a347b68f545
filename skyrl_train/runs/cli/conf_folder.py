"""Where Hydra's groups are, and what `--help` tells of them. Imports neither Hydra nor the schema.

Hydra composes a configuration before it answers `--help`, which takes seconds, and shows nothing of it.
"""

from __future__ import annotations

import string
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from skyrl_train.errors import ConfigError, Violation

_PACKAGE = Path(__file__).resolve().parents[2]
_TEMPLATES = {"config": "skyrl_train", "sft": "skyrl_sft"}
"""Root configuration to the file of `conf/hydra/help` that its defaults list chooses."""


def conf_dir(package: Path = _PACKAGE) -> Path:
    """Return the folder of Hydra's groups (`conf/`), absolute.

    Inside the package comes first: beside an installed package there may be a `conf` of someone else.

    Raises:
        ConfigError: when neither place has it, which means a broken installation.
    """
    for folder in (package / "conf", package.parent / "conf"):
        if folder.is_dir():
            return folder
    missing = Violation(
        field="conf",
        rule="must lie inside the package or, in a checkout, beside it",
        value=f"neither {package / 'conf'} nor {package.parent / 'conf'}",
        remedy="install skyrl_train again, or run from a complete clone",
    )
    raise ConfigError([missing])


def answers_help(*, config_name: str) -> bool:
    """Whether the arguments of this process are `--help` or `-h` alone, which has been answered then. With others beside it
    Hydra answers, which may have to look into more folders."""
    if sys.argv[1:] not in (["--help"], ["-h"]):
        return False
    sys.stdout.write(f"{plain_help(config_name)}\n")
    return True


def plain_help(config_name: str) -> str:
    """Return what `--help` shows of the entry point with this root configuration."""
    folder = conf_dir()
    file = folder / "hydra" / "help" / f"{_TEMPLATES[config_name]}.yaml"
    parts = yaml.safe_load(file.read_text(encoding="utf-8"))
    text = str(parts["template"])
    for name in ("header", "footer"):
        text = text.replace(f"${{hydra.help.{name}}}", str(parts[name]))
    listed = "".join(f"{group}: {', '.join(names)}\n" for group, names in sorted(_groups(folder, "")))
    return string.Template(text).substitute(APP_CONFIG_GROUPS=listed)


def _groups(folder: Path, parent: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each group below `folder`, by its path, and its choices."""
    for each in folder.iterdir():
        group = f"{parent}{each.name}"
        if not each.is_dir() or group in ("hydra", "__pycache__"):
            continue
        yield group, sorted(file.stem for file in each.glob("*.yaml"))
        yield from _groups(each, f"{group}/")
