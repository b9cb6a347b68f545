"""`Activity`: what rollouts are at, second by second: the engine's work, waits for environments, groups in flight.

It is told when each begins and ends, and adds up between two steps' records what is declared below."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

DECLARED_METRICS = """
timing/wait/environments | s | Waits for environments, tools or rewards, summed over trajectories. | with rollouts
timing/wait/environments_alone | share | Of these seconds, those of an idle engine. | where any
timing/engine/busy | s | Time in which the engine computed. | with rollouts
timing/group/max | s | The longest group of samples, evaluations aside. | where one ended
"""

Span = tuple[float, float]
"""Begin and end, in seconds of the clock."""
_MOST_KEPT = 20_000
"""Spans and counts between two records; the oldest go first, from the picture alone."""


class TellsWhenBusy:
    """An engine that says itself when it computes, since requests may wait in it for others. Of any other it is taken to
    compute while it has a request."""

    on_busy: Callable[[bool], object] = staticmethod(lambda _: None)
    """Called with True where it begins to compute and with False where it ends."""


@dataclass(frozen=True, kw_only=True)
class ActivityReport:
    """What was going on between two records."""

    metrics: dict[str, float]
    engine: tuple[Span, ...]
    """When it computed; what it is still at ends with the report."""
    groups: tuple[tuple[float, int], ...]
    """When the number of groups in flight changed, and to what; the first is that of the begin."""


class Activity:
    """Counts what is going on. Used from any thread."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._last = clock()
        self._num_waiting = self._num_requests = 0
        self._is_computing: bool | None = None
        """Of an engine that says so itself."""
        self._waited_s = self._alone_s = self._busy_s = 0.0
        self._group_s: list[float] = []
        self._in_flight: dict[Hashable, tuple[int, float]] = {}
        """Of each group the trajectories that run, and when the first began."""
        self._busy_since: float | None = None
        self._engine: deque[Span] = deque(maxlen=_MOST_KEPT)
        self._groups: deque[tuple[float, int]] = deque([(self._last, 0)], maxlen=_MOST_KEPT)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Wraps a request to the engine."""
        self._change(requests=1)
        try:
            yield
        finally:
            self._change(requests=-1)

    @contextmanager
    def environment(self) -> Iterator[None]:
        """Wraps a trajectory's wait for an environment's answer."""
        self._change(waiting=1)
        try:
            yield
        finally:
            self._change(waiting=-1)

    @contextmanager
    def trajectory(self, group: Hashable, *, is_timed: bool) -> Iterator[None]:
        """Wraps a trajectory of `group`, which is in flight while any of its trajectories is; `is_timed`: whether its
        seconds count."""
        self._move(group, 1, is_timed)
        try:
            yield
        finally:
            self._move(group, -1, is_timed)

    def engine_computes(self, is_computing: bool) -> None:
        """Told by an engine that knows: requests do not stand for its work from then on."""
        with self._lock:
            self._advance()
            self._is_computing = is_computing
            self._note_engine()

    def take(self) -> ActivityReport:
        """Return what was going on since the last time."""
        with self._lock:
            now = self._advance()
            metrics: dict[str, float] = {"timing/engine/busy": self._busy_s, "timing/wait/environments": self._waited_s}
            if self._waited_s:
                metrics["timing/wait/environments_alone"] = self._alone_s / self._waited_s
            if self._group_s:
                metrics["timing/group/max"] = max(self._group_s)
            if self._busy_since is not None:
                self._engine.append((self._busy_since, now))
                self._busy_since = now
            report = ActivityReport(metrics=metrics, engine=tuple(self._engine), groups=tuple(self._groups))
            self._waited_s = self._alone_s = self._busy_s = 0.0
            self._group_s = []
            self._engine.clear()
            self._groups.clear()
            self._groups.append((now, len(self._in_flight)))
            return report

    def _change(self, *, requests: int = 0, waiting: int = 0) -> None:
        with self._lock:
            self._advance()
            self._num_requests += requests
            self._num_waiting += waiting
            self._note_engine()

    def _move(self, group: Hashable, by: int, is_timed: bool) -> None:
        with self._lock:
            now = self._advance()
            before = len(self._in_flight)
            count, began = self._in_flight.pop(group, (0, now))
            if count + by:
                self._in_flight[group] = count + by, began
            elif is_timed:
                self._group_s.append(now - began)
            if len(self._in_flight) != before:
                self._groups.append((now, len(self._in_flight)))

    @property
    def _is_busy(self) -> bool:
        return self._num_requests > 0 if self._is_computing is None else self._is_computing

    def _advance(self) -> float:
        """Add the seconds since the last change to whatever was going on in them."""
        now = self._clock()
        passed, self._last = now - self._last, now
        self._waited_s += passed * self._num_waiting
        if self._is_busy:
            self._busy_s += passed
        else:
            self._alone_s += passed * self._num_waiting
        return now

    def _note_engine(self) -> None:
        """Begin or end a span of the engine's work, after a change."""
        if self._is_busy and self._busy_since is None:
            self._busy_since = self._last
        elif not self._is_busy and self._busy_since is not None:
            self._engine.append((self._busy_since, self._last))
            self._busy_since = None
