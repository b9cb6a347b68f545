"""How fast a machine computes, for a plan: as it is measured (`measured_cpu.py`) or stated.

Measuring takes a few seconds once, and is remembered by processor, threads, type, versions and this package's sources.
"""

from __future__ import annotations

import json
import os
import platform as host
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from skyrl_train.config.models import PlatformConfig
from skyrl_train.model.sizes import remember, remembered_file, source_stamps
from skyrl_train.plan.machine import MachineRates, stated_rates
from skyrl_train.system import gpu_name

_BUSY = 1.5
"""Wall time over what counts, from which cores are called busy: what several threads took then is not remembered."""


def machine_rates(
    platform: PlatformConfig, dtype: str, *, announce: Callable[[str], object] | None = None
) -> MachineRates:
    """Return the rates of a CPU as they were measured, now or by an earlier process; those of a GPU as they are stated, or
    as the self-test measured them.

    Args:
        dtype: In which models compute.
        announce: Told before measuring, which takes seconds. None: nothing is measured, and what no earlier process did
            is stated.
    """
    threads = platform.num_threads
    if platform.on_gpu:
        return stated_rates(gpu_name(), recorded=platform.rates)
    file = _file(threads, dtype)
    with suppress(OSError, ValueError, TypeError, KeyError):
        known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return MachineRates(**known | {name: tuple(known[name]) for name in ("widths", "trained_flops")})
    if announce is None:
        return stated_rates("cpu", num_threads=threads)
    announce(
        "how fast this machine computes is measured for the plan's times, once: seconds (plan.rates=none: not at all)"
    )
    from skyrl_train.plan.measured_cpu import measured  # and with it torch

    found, busy = measured(threads, dtype)
    if threads > 1 and busy > _BUSY:
        return replace(
            found, source=f"{found.source}, while others used its cores, so that the next plan measures again"
        )
    remember(file, asdict(found))
    return found


def _file(num_threads: int, dtype: str) -> Path:
    name = host.processor()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    sources = source_stamps(("inference", "learner", "model", "plan"))
    return remembered_file("machine", [name, os.cpu_count(), num_threads, dtype, sources])
