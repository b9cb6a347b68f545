"""Where the seconds of a step go: phases that are wrapped around the loop's verbs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StepTimer:
    """Seconds per phase, step after step, without a gap between steps.

    A step's clock starts where the step before was finished, so the sum over all steps is the run's wall time. What no
    phase covers is reported as `timing/other`: the phases of a step always add up to `timing/step`.

    Example:
        >>> timer = StepTimer()
        >>> with timer.phase("generate"):
        ...     pass
        >>> sorted(timer.finish_step())
        ['timing/generate', 'timing/other', 'timing/step']
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._running: str | None = None
        self._step_start = clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the block's seconds to `name`. Raises ValueError inside another phase: it would be counted twice."""
        if self._running is not None:
            raise ValueError(f"phase {name!r} inside phase {self._running!r}: its seconds would be counted twice")
        self._running, start = name, self._clock()
        try:
            yield
        finally:
            self._running = None
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start

    def seconds(self, name: str) -> float:
        """Seconds of a phase in the running step so far; 0 where it did not run."""
        return self._seconds.get(name, 0.0)

    def finish_step(self) -> dict[str, float]:
        """`timing/<phase>`, `timing/other` and their sum `timing/step`, in seconds; starts the next step's clock."""
        now = self._clock()
        step_s = now - self._step_start
        phases = self._seconds
        other_s = max(0.0, step_s - sum(phases.values()))
        self._seconds, self._step_start = {}, now
        timings = {f"timing/{name}": seconds for name, seconds in phases.items()}
        return {**timings, "timing/other": other_s, "timing/step": step_s}
