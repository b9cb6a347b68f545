"""Which platform this machine is, found out without importing torch (seconds) or touching a driver."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class DetectedPlatform:
    """The answer and its one-line reason, e.g. `gpu` because `/dev/nvidia0 exists`."""

    name: Literal["cpu", "gpu"]
    reason: str


def detect_platform(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> DetectedPlatform:
    """`gpu` where a CUDA device can be used by this process, else `cpu`.

    Looks at `CUDA_VISIBLE_DEVICES` and for the NVIDIA driver's device files, under `root`.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.split(",")[0].strip() in ("", "-1", "NoDevFiles"):
        return DetectedPlatform(name="cpu", reason=f"CUDA_VISIBLE_DEVICES='{visible}' hides every CUDA device")
    for device in ("dev/nvidia0", "dev/dxg"):
        if (root / device).exists():
            return DetectedPlatform(name="gpu", reason=f"/{device} exists")
    devices = sorted(path.name for path in (root / "dev").glob("nvidia[0-9]*"))
    if devices:
        return DetectedPlatform(name="gpu", reason=f"/dev/{devices[0]} exists")
    if (root / "proc/driver/nvidia/version").exists():
        return DetectedPlatform(name="cpu", reason="an NVIDIA driver is loaded, but /dev has no NVIDIA device")
    return DetectedPlatform(name="cpu", reason="no CUDA device found (no /dev/nvidia0)")
