"""Carries the policy's weights to an engine in the same process, and what every transport records of its syncs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

Verify = Callable[[int], float | None]
"""Compares engines with the trainer after a sync to that version: the largest difference found; None where there is nothing
to compare with. Raises EngineError."""


@dataclass(frozen=True, kw_only=True)
class SyncRecord:
    """What one sync did; a line of `weight_sync.jsonl`."""

    version: int
    seconds: float
    num_bytes: int
    num_engines: int
    probe_difference: float | None
    """Largest difference of a probe's log-probabilities; None where none was sent."""
    probe_seconds: float | None
    """What the probe took; not in `seconds`."""


class SyncRecords:
    """Has the first sync of a run verified always, since an engine that cannot take this model's weights says nothing
    itself, the others where it was asked for, and writes a line for each."""

    def __init__(self, file: Path, verify: Verify | None = None, *, verify_each: bool = True) -> None:
        """`verify_each`: `generator.verify_weight_sync`."""
        self._file, self._verify, self._verify_each = file, verify, verify_each
        self._is_first = True

    def add(self, version: int, *, started: float, num_bytes: int, num_engines: int) -> None:
        """A sync that began at `started`, of `time.monotonic()`, and is over. Raises EngineError where it is refused."""
        synced = time.monotonic()
        wanted = self._verify_each or self._is_first
        difference = self._verify(version) if self._verify is not None and wanted else None
        self._is_first = False
        record = SyncRecord(
            version=version,
            seconds=synced - started,
            num_bytes=num_bytes,
            num_engines=num_engines,
            probe_difference=difference,
            probe_seconds=None if difference is None else time.monotonic() - synced,
        )
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(vars(record)) + "\n")


class LoadsWeights(Protocol):
    """An engine that takes weights directly, e.g. `HFEngine`."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """All of them or none. Raises EngineError."""
        ...


class InlineTransport:
    """Implements `WeightTransport` where learner and engine share a process."""

    def __init__(self, engine: LoadsWeights) -> None:
        self._engine = engine

    def sync(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Raises EngineError where the weights do not fit the engine's model; it then keeps what it has."""
        self._engine.load_weights(weights, version)


class NoTransport:
    """Implements `WeightTransport` where nothing answers with the weights: replay has no engine."""

    def sync(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Leaves the weights where they are."""
