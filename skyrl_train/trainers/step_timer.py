"""`StepTimer`: where the time of a step went."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StepTimer:
    """Seconds per phase, step after step, without a gap between steps.

    A step's clock starts where the step before was finished, so the sum over all steps is the run's wall time. What no
    phase covers is reported as `timing/other`: the phases of a step always add up to `timing/step`. Waits, which are within
    phases, and what other threads took are beside them as `timing/<group>/<name>`.

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
        self._beside: dict[str, float] = {}
        self._spans: list[tuple[str, float, float]] = []
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
            self._running, end = None, self._clock()
            self._seconds[name] = self._seconds.get(name, 0.0) + end - start
            self._spans.append((name, start, end))

    @contextmanager
    def wait(self, name: str) -> Iterator[None]:
        """Adds the block's seconds to `timing/wait/<name>`, whatever phase it is in."""
        start = self._clock()
        try:
            yield
        finally:
            self.add(f"wait/{name}", self._clock() - start)

    def add(self, name: str, seconds: float) -> None:
        """Adds seconds to `timing/<name>`, a name with a group that is not part of the step's sum."""
        self._beside[name] = self._beside.get(name, 0.0) + seconds

    def take_spans(self) -> list[tuple[str, float, float]]:
        """Return name, begin and end of the phases since the last time, in seconds of the clock."""
        spans, self._spans = self._spans, []
        return spans

    def finish_step(self) -> dict[str, float]:
        """`timing/<phase>`, `timing/other` and their sum `timing/step`, in seconds; starts the next step's clock."""
        now = self._clock()
        step_s = now - self._step_start
        phases = self._seconds
        other_s = max(0.0, step_s - sum(phases.values()))
        timings = {f"timing/{name}": seconds for name, seconds in {**phases, **self._beside}.items()}
        self._seconds, self._beside, self._step_start = {}, {}, now
        return {**timings, "timing/other": other_s, "timing/step": step_s}
