"""The real commands in processes of their own, and what the runs leave in their folders."""

from __future__ import annotations

import json
import math
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from skyrl_train.system.processes import STOP_SIGNALS
from skyrl_train.telemetry import phase_seconds
from skyrl_train.telemetry.records import encode_trajectory, pairs_of, read_rollouts
from tests.support import warm_python
from tests.support.warm_python import Started

RAY = ("placement.backend=ray", "placement.start_timeout_s=180", "placement.call_timeout_s=120")
TIMEOUT_S = 800.0
"""Less than what ends a test run as hung (`faulthandler_timeout`), so that nothing is left behind."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """A command that was started."""

    process: Started
    log: Path
    """What it prints."""


def start_command(folder: Path, *overrides: str, module: str = "skyrl_train.main") -> Running:
    """Starts `python -m module` into `folder`; what it prints goes into a file beside it.

    It answers signals, also where tests were started by something that ignores them, as `nohup` does.
    """
    for signum in STOP_SIGNALS:
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder.with_name(f"{folder.name}.log")
    with log.open("w", encoding="utf-8") as file:
        process = warm_python.start(("-m", module, *overrides, f"hydra.run.dir={folder}"), output=file.fileno())
    return Running(process=process, log=log)


def wait_for(running: Running) -> tuple[int, str]:
    """Exit status and all that was printed. Raises TimeoutExpired, with the process killed."""
    try:
        status = running.process.wait(TIMEOUT_S)
    finally:
        running.process.kill()
    return status, running.log.read_text(encoding="utf-8")


def run_command(folder: Path, *overrides: str, module: str = "skyrl_train.main") -> str:
    """Runs `python -m module` into `folder` to its end and returns what it printed. Fails with that where it fails."""
    status, said = wait_for(start_command(folder, *overrides, module=module))
    assert status == 0, said[-6000:]
    return said


def records(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Lines of a file of JSON lines in a run's folder; of recorded rollouts what such lines would be."""
    if name.endswith(".parquet"):
        pairs = [pair for batch in read_rollouts(folder / name).values() for pair in pairs_of(batch)]
        return [encode_trajectory(prompt, trajectory) for prompt, trajectory in pairs]
    return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]


def exported(folder: Path) -> dict[str, Tensor]:
    """The weights that a run exported at its end."""
    return load_file(folder / "export" / "model.safetensors")


def relative_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Length of the difference of all weights over the length of the expected ones."""
    assert set(found) == set(expected)
    difference = sum(float((found[name] - expected[name]).double().square().sum()) for name in expected)
    size = sum(float(tensor.double().square().sum()) for tensor in expected.values())
    return float((difference / size) ** 0.5)


def unaccounted_share(found: list[dict[str, Any]]) -> float:
    """Of a step's seconds those that its phases do not add up to: the largest share but for one step in five, which, where
    it takes milliseconds, the machine or Python's garbage collector may interrupt anywhere."""
    shares = sorted(abs(_seconds_of_phases(each) - each["timing/step"]) / float(each["timing/step"]) for each in found)
    return float(shares[-1 - math.ceil(len(shares) / 5)])


def _seconds_of_phases(record: dict[str, Any]) -> float:
    return sum(seconds for name, seconds in phase_seconds(record).items() if name != "other")
