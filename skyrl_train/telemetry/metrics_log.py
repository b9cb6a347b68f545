"""`metrics.jsonl`: the record of a run that everything else can be drawn from.

One JSON object per line and step, `{"reward/mean": 0.5, "step": 3, ...}`, with sorted keys. Each line is synced before
the run goes on, so `kill -9` and a power cut lose at most the step that was running. A value that is not finite is
written as null and counted in `metrics/non_finite` of the same line; JSON knows no NaN.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from skyrl_train.errors import DataError
from skyrl_train.system.files import bring_to_disk, sync_folder, write_atomically

DECLARED_METRICS = """
step | count | Finished training steps; 0 is the evaluation before. | | TRL `step`; verl `training/global_step`; SkyRL
    `trainer/global_step`
metrics/non_finite | count | NaN or infinite values: null in `metrics.jsonl`. | where any
"""


class MetricsLog:
    """Appends to `metrics.jsonl`, and holds nothing open between lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._owed = b""
        """Lines that are not on disk yet."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Appends the step's line and waits until it is on disk. Raises OSError; the line is kept then, and written with the
        next one."""
        self._owed += _line(metrics, step)
        self.flush()

    def flush(self) -> None:
        """Writes what could not be written before. Raises OSError, and leaves no part of a line behind."""
        if not self._owed:
            return
        new = not self._path.exists()
        with self._path.open("ab", buffering=0) as file:
            whole = file.tell()
            try:
                rest = memoryview(self._owed)
                while rest:
                    rest = rest[file.write(rest) :]
                bring_to_disk(file.fileno(), self._path)
            except OSError:
                file.truncate(whole)
                raise
        self._owed = b""
        if new:
            sync_folder(self._path.parent)


def _line(metrics: Mapping[str, float], step: int) -> bytes:
    record: dict[str, float | int | None] = {
        name: value if math.isfinite(value) else None for name, value in metrics.items()
    }
    non_finite = sum(value is None for value in record.values())
    if non_finite:
        record["metrics/non_finite"] = non_finite
    record["step"] = step
    return (json.dumps(record, sort_keys=True, allow_nan=False) + "\n").encode()


def read_metrics(path: Path, *, keeps: Callable[[str], bool] = lambda _: True) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`, in order; none where the file is absent. A last line that was torn by a kill is
    left out. Of each record there is its step and what `keeps` says of its names: a whole one takes 12 kB.

    Raises DataError where any other line is not a record with a step.
    """
    if not path.exists():
        return []
    records: list[dict[str, Any]] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
                if not isinstance(record["step"], int):
                    raise TypeError("step is not an integer")
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{path}:{number}: not a metrics record ({type(error).__name__}: {error}). "
                    "Delete the line, or move the file away, if you edited it by hand."
                ) from error
            records.append({sys.intern(name): value for name, value in record.items() if name == "step" or keeps(name)})
    return records


def phase_seconds(record: Mapping[str, float]) -> dict[str, float]:
    """The seconds of each phase of a step by its name, `other` among them: they add up to `timing/step`. Rates are none, nor
    is what has a group of its own, as waits do."""
    names = [
        name for name in record if name.startswith("timing/") and not name.endswith("_per_s") and name.count("/") == 1
    ]
    return {name.removeprefix("timing/"): record[name] for name in names if name != "timing/step"}


def cut_metrics_after(path: Path, step: int) -> int:
    """Drops the lines of later steps and a torn last line; how many whole lines were dropped.

    A resumed run repeats those steps and writes the same lines again.
    """
    steps = [record["step"] for record in read_metrics(path)]
    if not path.exists():
        return 0
    before = path.read_bytes()
    lines = before.splitlines(keepends=True)[: len(steps)]
    after = b"".join(line for line, line_step in zip(lines, steps) if line_step <= step)
    if after != before:
        write_atomically(path, after)
    return sum(line_step > step for line_step in steps)
