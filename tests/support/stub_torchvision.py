"""Stands in for torchvision where its CPU build is not there: vLLM and transformers import names of it for every model that
reads images, and call none of them for an image that was processed before it reaches vLLM.

`install(folder)` writes it as a distribution; the folder goes onto PYTHONPATH. Whatever is called raises.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

_REFUSING = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*_, **__):
        raise NotImplementedError(f"the stand-in for torchvision was asked for {name}")

    return refuse
"""
_TRANSFORMS = """
import enum

InterpolationMode = enum.Enum("InterpolationMode", "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS")
"""
_MODULES = {
    "__init__.py": "__version__ = '0.28.0'\nfrom torchvision import io, transforms\n",
    "io/__init__.py": _REFUSING,
    "transforms/__init__.py": _TRANSFORMS,
    "transforms/functional.py": _REFUSING,
    "transforms/v2/__init__.py": _REFUSING + "from torchvision.transforms.v2 import functional\n",
    "transforms/v2/functional.py": "from torchvision.transforms import InterpolationMode\n" + _REFUSING,
}


def is_needed() -> bool:
    """Whether there is no torchvision here."""
    return importlib.util.find_spec("torchvision") is None


def install(folder: Path) -> Path:
    """Return the folder, in which the stand-in now is."""
    for name, text in _MODULES.items():
        file = folder / "torchvision" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    about = folder / "torchvision-0.28.0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    return folder
