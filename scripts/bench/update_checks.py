"""What keeps the measurements of `update.py` honest and the machine alive: gradients are compared, and memory is bounded.

Each trainer rounds sums in another order, and their gradients are further apart the larger the model. So how far is too far
is not stated, but follows from the two trainers of other makers whose gradients are nearest to each other: a gradient
differs where it is more than `FACTOR` times as far from the nearer of the two as they are from each other, and more than
`MAX_DISTANCE`. Where there are fewer than two, it is the latter alone, from the one that is there or else from the first.
"""

from __future__ import annotations

import math
import os
import subprocess
import tempfile
import time
from itertools import combinations
from pathlib import Path

from update_peers import PEERS

MAX_DISTANCE = {"float32": 1e-5, "bfloat16": 0.05}
"""Relative L2 between gradients that is never too far."""
FACTOR = 3.0


class MeasurementError(Exception):
    """A measuring process failed; the text is the end of what it printed."""


def compare_gradients(files: dict[str, Path], dtype: str) -> tuple[dict[str, float], set[str]]:
    """Relative L2 between each variant's gradient and the first one's, and which differ, by the rule at the head of this
    file. Two gradients are in memory at a time."""
    distances: dict[frozenset[str], float] = {}

    def apart(one: str, other: str) -> float:
        pair = frozenset((one, other))
        if pair not in distances:
            found = 0.0 if one == other else _distance(files[one], files[other])
            distances[pair] = found if math.isfinite(found) else math.inf
        return distances[pair]

    peers = [name for name in files if name in PEERS]
    pairs = [pair for pair in combinations(peers, 2) if PEERS[pair[0]][0] != PEERS[pair[1]][0]]
    pairs = [pair for pair in pairs if apart(*pair) < math.inf]
    first = next(iter(files))
    agreed = min(pairs, key=lambda pair: apart(*pair), default=(peers[0] if peers else first,) * 2)
    limit = max(MAX_DISTANCE[dtype], FACTOR * apart(*agreed))
    differing = {name for name in files if min(apart(name, each) for each in agreed) > limit}
    return {name: apart(first, name) for name in files}, differing


def _distance(one: Path, other: Path) -> float:
    import torch

    left, right = (torch.load(file, mmap=True, weights_only=True) for file in (one, other))
    norm = sum(float(tensor.double().square().sum()) for tensor in left.values()) ** 0.5
    return sum(float((right[name] - left[name]).double().square().sum()) for name in left) ** 0.5 / norm


def run_within(
    command: list[str], environment: dict[str, str], *, memory_gb: float, timeout_s: float
) -> tuple[int, str, str]:
    """Run a process; return its exit status and what it printed. It is ended where it takes more memory or time. Raises
    MeasurementError then."""
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, env=environment, stdout=printed, stderr=errors)
        ends = time.monotonic() + timeout_s
        try:
            while child.poll() is None:
                time.sleep(0.05)
                if _resident_gb(child.pid) > memory_gb:
                    raise MeasurementError(f"over {memory_gb:.1f} GB")
                if time.monotonic() > ends:
                    raise MeasurementError(f"over {timeout_s:.0f} s")
        finally:
            child.kill()
            child.wait()
        printed.seek(0), errors.seek(0)
        return child.returncode, printed.read(), errors.read()


def _resident_gb(pid: int) -> float:
    """Of 10^9 bytes; 0 of a process that has ended, or where the system does not say."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e9


def available_gb() -> float:
    """Memory that is free, or held by caches; infinite where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return float("inf")
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024 / 1e9
