"""Which platform this machine is and which devices it has, found out without importing torch (seconds)."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
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


LARGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""The variable with which torch asks Linux for pages of 2 MiB, for tensors of that size or more on a CPU; it is read at the
first of them. Memory that a step takes anew is then there in a third of the time: 112 MB in 16 ms in place of 52."""


def usable_cores(root: Path = Path("/")) -> int:
    """Return the cores that this process may use: those it is bound to, as far as its control group's quota goes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    v1 = root / "sys/fs/cgroup/cpu"
    for files in ([root / "sys/fs/cgroup/cpu.max"], [v1 / "cpu.cfs_quota_us", v1 / "cpu.cfs_period_us"]):
        with suppress(OSError, ValueError):  # `max`, -1 or no file: no quota
            quota, period = (int(word) for file in files for word in file.read_text(encoding="ascii").split())
            if quota > 0 and period > 0:
                cores = min(cores, max(1, quota // period))
    return cores


def host_bytes(root: Path = Path("/")) -> int:
    """Return the memory of this machine, or the limit of this container where that is less; 0 where nothing tells."""
    found: list[int] = []
    with suppress(OSError, ValueError, LookupError):
        lines = dict(line.split(":") for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines())
        found.append(int(lines["MemTotal"].split()[0]) * 1024)
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # `max` or no file: no limit
            found.append(int((root / "sys/fs/cgroup" / limit).read_text(encoding="ascii")))
    return min(found, default=0)


def resident_bytes(root: Path = Path("/")) -> int:
    """Return the memory that this process holds now; 0 where nothing tells."""
    with suppress(OSError, ValueError, IndexError):
        return int((root / "proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def return_free_memory() -> None:
    """Give what the C library holds free back to the system, where the process has grown by holes in it: by a tenth over
    what it took when it was asked first after the last time. Memory that is given back and taken anew costs a sixth of an
    update. Does nothing where the library is not glibc."""
    held, usual = resident_bytes(), _HEAP.pop("usual", 0)
    if usual and held > usual * _MOST_GROWTH:
        with suppress(OSError, AttributeError, TypeError):
            ctypes.CDLL(None).malloc_trim(0)
    else:
        _HEAP["usual"] = usual or held


_MOST_GROWTH = 1.1
_HEAP: dict[str, int] = {}
"""`usual`: bytes that the process held once its heap was compact and had been used; absent until it has been."""


def multiplies_bfloat16(root: Path = Path("/")) -> bool:
    """Return whether the processor has what torch multiplies matrices of bfloat16 with; True where it does not say.

    Without AVX-512 (or Arm's `bf16`) a product takes some fifty times as long as in float32: 1.2 instead of 45 to 67 GFLOP/s
    of one core with AVX2, torch 2.13.
    """
    return _has_any(root, "avx512bw", "bf16")


def has_bfloat16_instructions(root: Path = Path("/")) -> bool:
    """Return whether the processor has instructions for products of bfloat16 numbers; True where it does not say. With
    AVX-512 alone such a product takes three times as long as one of float32."""
    return _has_any(root, "avx512_bf16", "amx_bf16", "bf16")


def _has_any(root: Path, *wanted: str) -> bool:
    """Whether the processor has one of these flags; True where the system does not tell any."""
    with suppress(OSError):
        for line in (root / "proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, flags = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return not set(wanted).isdisjoint(flags.split())
    return True


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The GPUs to place a run on, and the memory of their nodes."""

    gpus_per_node: tuple[int, ...] = ()
    """The GPUs of each node that has any."""
    memory_gb: float = 0.0
    """Memory of one of them, in GB (10^9 bytes), of the smallest where they differ; 0 where nothing tells."""
    host_memory_gb: float = 0.0
    """Memory of a node's host, in GB; 0 where nothing tells."""
    source: str = ""
    """Where this is known from, e.g. `/dev` or `placement.num_gpus=4`."""

    @property
    def num_gpus(self) -> int:
        return sum(self.gpus_per_node)


def local_devices(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Devices:
    """The CUDA devices that this process can use: the driver's device files, as far as `CUDA_VISIBLE_DEVICES` shows them.

    Their memory is what `nvidia-smi` says, 0 where it is not there or does not answer in two seconds.
    """
    platform = detect_platform(environ, root)
    if platform.name == "cpu":
        return Devices(source=platform.reason)
    files = [path for path in (root / "dev").glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdigit()]
    num_files = max(1, len(files))
    source, count = f"{num_files} in /dev", num_files
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        shown = [name.strip() for name in visible.split(",")]
        # CUDA stops at the first index that no device has; names of devices and of their parts are taken as they are.
        valid = [int(name) < num_files if name.isdigit() else name[:1] not in ("", "-") for name in shown]
        count = valid.index(False) if False in valid else len(shown)
        source = f"CUDA_VISIBLE_DEVICES={visible}"
    return Devices(
        gpus_per_node=(count,) if count else (),
        memory_gb=_smallest_memory_gb(),
        host_memory_gb=host_bytes(root) / 1e9,
        source=source,
    )


def _smallest_memory_gb() -> float:
    mebibytes = [int(number) for number in re.findall(r"^\d+$", _nvidia_smi("memory.total"), re.MULTILINE)]
    return min(mebibytes, default=0) * 2**20 / 1e9


def gpu_name() -> str:
    """Return the name of this machine's first GPU, as torch has it; empty where `nvidia-smi` does not tell it in two
    seconds."""
    return _nvidia_smi("name").partition("\n")[0].strip()


@functools.cache
def _nvidia_smi(query: str) -> str:
    """Return what it answers, a line for each GPU; nothing where it is not there or does not answer in two seconds."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=2.0, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
