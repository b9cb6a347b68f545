"""Where metrics go: `metrics.jsonl` always, and console and services as configured.

`metrics.jsonl` is the record of the run: no checkpoint is written ahead of it. The others are views of it: one that
fails later is warned about once, tried again at each step, and its losses are stated at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from skyrl_train.errors import counted
from skyrl_train.telemetry.logs.console import RunConsole
from skyrl_train.telemetry.metrics_log import MetricsLog
from skyrl_train.types import ChatMessage, RolloutBatch, Trajectory

SAMPLES_SHOWN = 10
SAMPLE_COLUMNS = ("uid", "prompt", "response", "reward", "turns", "tokens", "outcome")
SampleRow = Mapping[str, str | float | int]
"""By `SAMPLE_COLUMNS`. The reward of a failed trajectory is not a number, and its outcome says what broke it."""


class Tracker(Protocol):
    """A place where metrics go.

    One that also has `log_samples(rows, *, step)` is given a table of each evaluation (`sample_rows`), as many rows as
    its `num_samples` says, or 10; one that has `alert(title, text)` is told of alerts.
    """

    def log(self, metrics: Mapping[str, float], *, step: int) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """One record and any number of views of it. Implements Tracker."""

    def __init__(self, *, record: MetricsLog, views: Mapping[str, Tracker], console: RunConsole) -> None:
        self._record = record
        self._views = dict(views)
        self._console = console
        self._lost: dict[str, list[int]] = {}

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Writes the record, then the views. Raises only what the record raises, which is written at the next call then."""
        try:
            self._record.log(metrics, step=step)
        finally:
            for name, view in self._views.items():
                self._tell(name, step, view.log, metrics, step=step)

    def log_samples(self, step: int, rollouts: RolloutBatch) -> None:
        """Show rollouts of an evaluation where a view has tables."""
        for name, view in self._views.items():
            show, most = getattr(view, "log_samples", None), getattr(view, "num_samples", SAMPLES_SHOWN)
            if show is not None and most:
                self._tell(name, step, show, sample_rows(rollouts, most), step=step)

    def alert(self, step: int, title: str, text: str) -> None:
        """Show an alert where a view has them."""
        for name, view in self._views.items():
            if (show := getattr(view, "alert", None)) is not None:
                self._tell(name, step, show, title, text)

    def flush(self) -> None:
        """Writes what the record owes. Raises OSError."""
        self._record.flush()

    def close(self) -> None:
        """Closes the views, whatever happens to one, and says what was lost."""
        for name, view in self._views.items():
            try:
                view.close()
            except Exception as error:
                self._console.warn(f"tracker {name} did not close: {type(error).__name__}: {error}")
        for name, steps in self._lost.items():
            self._console.warn(
                f"tracker {name} lost {counted(len(steps), 'step')} between {steps[0]} and {steps[-1]}; "
                "metrics.jsonl has them all"
            )

    def _tell(self, view: str, at_step: int, call: Callable[..., object], *args: object, **named: object) -> None:
        try:
            call(*args, **named)
        except Exception as error:  # a view's own failures are of every kind; none may stop training
            if view not in self._lost:
                self._console.warn(
                    f"tracker {view} failed at step {at_step} ({type(error).__name__}: {error}); training goes on, "
                    "metrics.jsonl is complete"
                )
            if at_step not in self._lost.setdefault(view, []):
                self._lost[view].append(at_step)


class ConsoleTracker:
    """One line a step for a person. Implements Tracker."""

    def __init__(self, console: RunConsole, *, total_steps: int) -> None:
        self._console = console
        self._total_steps = total_steps

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        if step > 0:  # the evaluation before training has its own line
            self._console.step(metrics, step=step, total_steps=self._total_steps)

    def close(self) -> None:
        """The console outlives its tracker."""


def sample_rows(rollouts: RolloutBatch, most: int) -> list[SampleRow]:
    """Return the first sample of each of the first `most` prompts, which are the same at each evaluation."""
    size = rollouts.n_samples_per_prompt
    return [
        sample_row(prompt.messages, rollouts.trajectories[index * size])
        for index, prompt in enumerate(rollouts.prompts[:most])
    ]


def sample_row(messages: Sequence[ChatMessage], trajectory: Trajectory) -> SampleRow:
    """Return one trajectory as a row."""
    outcome = trajectory.outcome.value
    if trajectory.failure is not None:
        outcome = f"{trajectory.failure.kind.value}: {trajectory.failure.message}"
    return {
        "uid": trajectory.prompt_uid,
        "prompt": _said(trajectory.first_messages or messages),
        "response": "\n\n".join(
            text for turn in trajectory.turns for text in (turn.response_text, _said(turn.observations)) if text
        ),
        "reward": float("nan") if trajectory.failed else trajectory.reward,
        "turns": len(trajectory.turns),
        "tokens": sum(len(turn.response_token_ids) for turn in trajectory.turns),
        "outcome": outcome,
    }


def _said(messages: Sequence[Mapping[str, object]]) -> str:
    return "\n".join(f"[{message.get('role', '')}] {message.get('content', '')}" for message in messages)
