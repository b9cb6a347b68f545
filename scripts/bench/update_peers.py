"""The other trainers that `update.py` measures: which there are, where they are installed, and how."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
from collections.abc import Sequence
from pathlib import Path

import harness

PEERS: dict[str, tuple[str, dict[str, bool]]] = {
    "trl": ("trl", {"merged": False}),
    "trl_merged": ("trl", {"merged": True}),
    "verl": ("verl", {"packed": False}),
    "verl_packed": ("verl", {"packed": True}),
    "openrlhf": ("openrlhf", {"packed": False}),
    "openrlhf_packed": ("openrlhf", {"packed": True}),
}
"""Name to package, whose driver is `update_PACKAGE.py`, and form."""
PACKAGES = {
    "trl": ["trl==1.16", "accelerate"],
    "verl": [
        "verl==0.9.1",
        "tensordict==0.10.0",
        "transformers==5.10.4",
        "tokenizers<=0.23.0",
        "huggingface-hub<2",
        "trl==0.27.0",
        "codetiming",
        "pylatexenc",
        "torchdata",
        "pyvers",
        "orjson",
        "cloudpickle",
    ],
    "openrlhf": ["openrlhf==0.11.2", "pylatexenc"],
}
"""What `peers` installs, without dependencies: torch and the rest are this environment's."""
CACHE = Path.home() / ".cache" / "skyrl_train" / "peers"


def package_folders(stated: Sequence[str]) -> dict[str, str]:
    """Name of each package that lies in a folder of its own, to the folder; `stated` are "NAME=FOLDER"."""
    cached = {name: str(CACHE / name) for name in PACKAGES if (CACHE / name / "installed").is_file()}
    named = (each.partition("=") for each in stated)
    return cached | {name: str(Path(folder).expanduser()) for name, _, folder in named}


def install(_args: argparse.Namespace) -> None:
    """Install the other trainers, each in a folder of its own, once."""
    for name, requirements in PACKAGES.items():
        folder, wanted = CACHE / name, "\n".join(requirements)
        done = folder / "installed"
        if done.is_file() and done.read_text(encoding="utf-8") == wanted:
            print(f"{name}: {folder}")
            continue
        shutil.rmtree(folder, ignore_errors=True)
        command = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, *requirements]
        try:
            harness.apart(command, deadline_s=1800.0)
        except harness.MeasurementError as error:
            print(f"{name}: not installed: {str(error).splitlines()[-1]}")
        else:
            done.write_text(wanted, encoding="utf-8")
            print(f"{name}: {folder}")


def is_there(package: str, folders: dict[str, str]) -> bool:
    """Whether the package can be imported by a measuring process."""
    if package in folders:
        return (Path(folders[package]) / package).is_dir()
    return importlib.util.find_spec(package) is not None
