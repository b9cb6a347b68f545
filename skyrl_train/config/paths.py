"""Where the configuration files are: beside the package in a checkout, inside it once installed."""

from __future__ import annotations

from pathlib import Path

from skyrl_train.errors import ConfigError, Violation

_PACKAGE = Path(__file__).resolve().parents[1]


def conf_dir(package: Path = _PACKAGE) -> Path:
    """Return the folder of Hydra's groups (`conf/`), absolute.

    Inside the package comes first: beside an installed package there may be a `conf` of someone else.

    Raises:
        ConfigError: when neither place has it, which means a broken installation.
    """
    for folder in (package / "conf", package.parent / "conf"):
        if folder.is_dir():
            return folder
    raise ConfigError(
        [
            Violation(
                field="conf",
                rule="must lie inside the package or, in a checkout, beside it",
                value=f"neither {package / 'conf'} nor {package.parent / 'conf'}",
                remedy="install skyrl_train again, or run from a complete clone",
            )
        ]
    )
