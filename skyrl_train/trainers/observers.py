"""Custom metrics and callbacks of a run: they are shown what happens, and can change nothing of it.

A metric is a function of one step, `(StepFacts) -> {name: Mean | Sum | Max | Min | Last}`; a callback is a function of
one event, `(RunEvent) -> None`. One that raises costs the run nothing but itself: it is warned about once, and called
again at the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.steps import MiniBatch
from skyrl_train.parts import CALLBACKS, METRICS
from skyrl_train.registry import PartSpec, part_name
from skyrl_train.telemetry import StepMetrics, to_values
from skyrl_train.telemetry.logs import RunConsole
from skyrl_train.types import RolloutBatch

EventKind = Literal["start", "step", "evaluation", "checkpoint", "end"]
NO_METRICS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """What one training step saw."""

    step: int
    batch: TrainingInputBatch
    """The training rows, with every column that was scored and estimated."""
    rollouts: RolloutBatch | None = None
    """All that was generated, rewarded as the environments did; None in supervised training, which generates nothing."""


@dataclass(kw_only=True)
class StepInputs:
    """What is known so far of the step that is running."""

    rollouts: RolloutBatch | None = None
    batch: TrainingInputBatch | MiniBatch | None = None
    """In supervised training what the optimizer step is taken on."""


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """Something that happened in a run."""

    kind: EventKind
    step: int
    """Training steps that are finished."""
    total_steps: int
    metrics: Mapping[str, float]
    """Of a step (all that is recorded of it) or an evaluation, else empty; cannot be written to."""
    path: Path | None = None
    """The checkpoint's folder; at the start and the end, the run's."""


Metric = Callable[[StepFacts], StepMetrics]
Callback = Callable[[RunEvent], None]


class Observers:
    """The custom metrics and callbacks of one run."""

    def __init__(
        self, metrics: Sequence[PartSpec], callbacks: Sequence[PartSpec], console: RunConsole, *, total_steps: int
    ) -> None:
        """Raises ConfigError where a metric or callback cannot be found. `total_steps` is that of the run."""
        self._metrics: dict[str, Metric] = {part_name(spec): METRICS.resolve(spec) for spec in metrics}
        self._callbacks: dict[str, Callback] = {part_name(spec): CALLBACKS.resolve(spec) for spec in callbacks}
        self._console = console
        self._total_steps = total_steps
        self._failed: set[str] = set()

    def measure(self, facts: StepFacts, measured: Mapping[str, float]) -> dict[str, float]:
        """`measured` with the custom metrics of the step added; none of its own is replaced."""
        found = dict(measured)
        for name, metric in self._metrics.items():
            try:
                own = to_values(metric(facts))
                taken = sorted(own.keys() & found.keys())
                if taken:
                    raise ValueError(f"there is a metric {taken[0]!r} already")
                found |= own
            except Exception as error:  # of whatever kind: a metric of the user's must not end the run
                self._warn("metric", name, error, facts.step)
        return found

    def tell(
        self, kind: EventKind, step: int, *, metrics: Mapping[str, float] = NO_METRICS, path: Path | None = None
    ) -> None:
        """Calls every callback with an event of this kind after `step` finished steps."""
        event = RunEvent(
            kind=kind,
            step=step,
            total_steps=self._total_steps,
            metrics=MappingProxyType(dict(metrics)),
            path=path,
        )
        for name, callback in self._callbacks.items():
            try:
                callback(event)
            except Exception as error:  # as above
                self._warn("callback", name, error, step)

    def _warn(self, what: str, name: str, error: Exception, step: int) -> None:
        if name not in self._failed:
            self._console.warn(
                f"{what} {name} failed at step {step} ({type(error).__name__}: {error}); training goes on"
            )
        self._failed.add(name)
