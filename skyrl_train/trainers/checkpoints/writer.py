"""Checkpoints on a thread of their own, from copies of the models, while the loop goes on.

    loop      step 10 | hold | step 11 | step 12 | step 13 ...        `timing/checkpoint` is the time of `hold`
    thread            | write, hash, seal, upload |                   `timing/background/checkpoint` is this one's

One save is under way at most: the next one waits for it (`timing/wait/checkpoint`), and so does whatever reads a checkpoint
or ends the run. What became of it is told to the loop, behind one of its next steps. Where the host has not the memory for
copies, or they are not wanted, the loop waits for the disk itself.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from pathlib import Path

from skyrl_train.errors import DeadlineError
from skyrl_train.interfaces import HeldState
from skyrl_train.system import WorkerThread
from skyrl_train.trainers.checkpoints.store import CheckpointStore

JOIN_TIMEOUT_S = 2 * 3600.0
"""For a save that is under way: the disk, a URL and the ranks have shorter deadlines of their own for each of its calls."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """What became of a save."""

    step: int
    paths: Mapping[CheckpointStore, Path]
    """The checkpoint in each store that took it."""
    errors: Sequence[Exception]
    """Of the stores that did not."""
    seconds: float


class CheckpointWriter:
    """Writes checkpoints of one run, one at a time."""

    def __init__(self) -> None:
        self._thread = WorkerThread("checkpoint")
        self._step = 0
        self._under_way: Future[Written] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way."""
        return self._under_way is not None and not self._under_way.done()

    @property
    def is_idle(self) -> bool:
        """Whether no save is under way, and of none it is unknown what became of it."""
        return self._under_way is None

    def begin(self, step: int, held: HeldState, stores: Sequence[CheckpointStore]) -> Written | None:
        """Have the state of `step` written to the stores, in their order, and return at once; where it is no copy, write it,
        and return what became of that. The save before has been collected. Raises OSError."""
        assert self.is_idle, "what became of the save before is not known"
        finishes = {store: store.begin(step) for store in stores}

        def write() -> Written:
            started, paths, errors = time.monotonic(), {}, []
            for store, finish in finishes.items():
                try:
                    paths[store] = finish(held.write)
                except Exception as error:  # of any kind: it is raised in the loop
                    errors.append(error)
            return Written(step=step, paths=paths, errors=errors, seconds=time.monotonic() - started)

        if not held.is_copied:
            return write()
        self._step, self._under_way = step, self._thread.submit(write)
        return None

    def collect(self, *, waits: bool) -> Written | None:
        """Return what became of the save that was under way, once; None where there is none, or where it goes on and nobody
        `waits`."""
        pending = self._under_way
        if pending is None or (not waits and not pending.done()):
            return None
        self._under_way = None
        try:
            return pending.result(JOIN_TIMEOUT_S)
        except FutureTimeoutError:
            error = DeadlineError(f"the checkpoint of step {self._step}", JOIN_TIMEOUT_S, "Is the disk reachable?")
            return Written(step=self._step, paths={}, errors=[error], seconds=JOIN_TIMEOUT_S)

    def close(self) -> None:
        """End the thread, behind what it does."""
        self._thread.close(0.0)
