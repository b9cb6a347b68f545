"""What a person sees: the run's header, one line a step, bars inside long phases, tables of evaluations.

In a notebook a step rewrites one output of the cell, with the curve under it; run.log has a line for each all the same.
On a terminal it is coloured (unless `NO_COLOR` is set), and a bar shows what runs for more than a second, and how far it is
where that is known. Anywhere else every line is plain text without control characters, so that it can be kept in a log file.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from skyrl_train.registry import at_breakpoint
from skyrl_train.telemetry.logs.notebook import CellOutput, in_notebook

logger = logging.getLogger(__name__)

_RECENT_STEPS = 20
"""Steps over which the time left is estimated: the last ones, since responses grow during training."""
_SHOWN_AFTER_S = 1.0
"""From when on a phase that does not say how far it is has a bar."""
_PLAIN_WIDTH = 100
"""Columns of tables where the output is not a terminal."""


class RunConsole:
    """Writes to `file` (standard output unless stated).

    `step_lines=False` (`tracker.console.enabled=false`) leaves header, notes, warnings and tables.
    """

    def __init__(self, *, step_lines: bool = True, file: TextIO | None = None) -> None:
        stream = file or sys.stdout
        terminal = stream.isatty()
        self._console = Console(
            file=stream,
            highlight=False,
            force_terminal=terminal,
            force_jupyter=False,  # which would make an output of each line
            width=None if terminal else _PLAIN_WIDTH,
        )
        self._cell = CellOutput() if step_lines and file is None and in_notebook() else None
        self._step_lines = step_lines
        self._bars = step_lines and terminal and not self._console.is_dumb_terminal
        at_breakpoint[:] = [self._leave_terminal]
        self._phase = ""
        self._lock = threading.Lock()
        """Of the bar, which a timer may begin."""
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)

    def header(self, title: str, lines: Sequence[str]) -> None:
        """The first lines of a run: what it is and what it will do."""
        self._print(Text(title, style="bold cyan"))
        for line in lines:
            self._print(Text(f"  {line}"))

    def note(self, line: str) -> None:
        self._print(Text(line))

    def warn(self, line: str) -> None:
        self._print(Text(f"warning: {line}", style="yellow"))

    def show(self, renderable: RenderableType) -> None:
        """Show a table or another rich object."""
        self._console.print(renderable)

    def step(self, metrics: Mapping[str, float], *, step: int, total_steps: int) -> None:
        """One line with what matters of a step's metrics; those that are absent are left out."""
        seconds = metrics.get("timing/step")
        if seconds is not None:
            self._step_seconds.append(seconds)
        if not self._step_lines:
            return
        mean_s = sum(self._step_seconds) / max(1, len(self._step_seconds))
        left_s = mean_s * (total_steps - step)
        line = step_line(metrics, step=step, total_steps=total_steps, left_s=left_s)
        if self._cell is None:
            self._print(Text(line))
            return
        logger.info("%s", line)
        name = next((each for each in ("reward/mean", "train/loss") if each in metrics), "")
        self._cell.show(line, step=step, name=name, value=metrics.get(name))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Wraps a phase, which has a bar called `name` once it takes more than a second; `on_progress` moves it within. The
        bar is gone at the end of the phase."""
        self._phase = name
        slow = threading.Timer(_SHOWN_AFTER_S, self._show_bar)
        slow.daemon = True
        if self._bars:
            slow.start()
        try:
            yield
        finally:
            slow.cancel()
            self._phase = ""
            self.stop_bar()

    def on_progress(self, done: int, total: int) -> None:
        """How far the running phase is; for generators, learners and evaluations. Does nothing off a terminal."""
        if self._bars and self._phase and total > 1:
            self._show_bar(done, total)

    def _leave_terminal(self) -> None:
        """Show no bars any more: a debugger has the terminal."""
        self._bars = False
        self.stop_bar()

    def stop_bar(self) -> None:
        """Takes the bar away and gives the terminal its cursor back."""
        with self._lock:
            if self._progress is not None:
                self._progress.stop()
                self._progress = self._task = None

    def _show_bar(self, done: int = 0, total: int | None = None) -> None:
        """`total`: None of a phase that does not know it, whose bar moves by itself."""
        with self._lock:
            if self._progress is None and self._phase:
                self._progress = Progress(
                    TextColumn("{task.description:>10}"),
                    BarColumn(bar_width=40),
                    TextColumn("{task.fields[count]}"),
                    TimeElapsedColumn(),
                    TimeRemainingColumn(compact=True),
                    console=self._console,
                    transient=True,
                )
                self._progress.start()
                self._task = self._progress.add_task(self._phase, total=None, count="")
            if self._progress is not None and self._task is not None and total is not None:
                self._progress.update(self._task, completed=done, total=total, count=f"{done}/{total}")

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)


def step_line(metrics: Mapping[str, float], *, step: int, total_steps: int, left_s: float) -> str:
    """Return the line of a step: at most 125 columns for ordinary values.

    `acc` is the share of trajectories that their environment calls solved, `grad` the norm of the gradient before clipping,
    `diff` how far the engine's log-probabilities are from the trainer's, in nats a token.

    Example: `step  3/40  reward 0.412  acc 0.31  kl 0.0011  ent 0.82  grad 0.27  diff 0.0004  len 18.2  4.8k tok/s  1.3 s`.
    """
    parts = [f"step {step:>{len(str(total_steps))}}/{total_steps}"]
    columns = (
        (("train/loss",), "loss", "{:.4f}".format),
        (("eval/loss",), "held-out", "{:.4f}".format),
        (("reward/mean",), "reward", "{:.3f}".format),
        (("env/solved",), "acc", "{:.2f}".format),
        (("kl/reference",), "kl", "{:.4f}".format),
        (("policy/entropy",), "ent", "{:.2f}".format),
        (("policy/grad_norm",), "grad", _two_digits),
        (("mismatch/logprob_diff_mean", "policy/rollout_logprob_diff"), "diff", "{:.4f}".format),
        (("response_length/mean",), "len", _three_digits),
    )
    found = [(next((name for name in names if name in metrics), ""), label, shown) for names, label, shown in columns]
    parts += [f"{label} {shown(metrics[name])}" for name, label, shown in found if name]
    if "timing/tokens_per_s" in metrics:
        parts.append(f"{_short(metrics['timing/tokens_per_s'])} tok/s")
    if "timing/step" in metrics:
        parts.append(f"{_three_digits(metrics['timing/step'])} s")
    if step < total_steps:
        parts.append(f"{clock(left_s)} left")
    if metrics.get("batch/trained_tokens") == 0:
        parts.append("0 LOSS TOKENS: NOTHING LEARNED")
    if metrics.get("failures/count"):
        parts.append(f"{metrics['failures/count']:.0f} FAILED")
    return "  ".join(parts)


def clock(seconds: float) -> str:
    """Return a duration as `0:05`, `12:40`, `3:02:10`, `2 d 03:00:00`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def _short(value: float) -> str:
    """Return a number as short text: `950`, `4.8k`, `1.2M`."""
    for limit, suffix in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{suffix}"
    return f"{value:.0f}"


def _two_digits(value: float) -> str:
    """Return a number of any size with two digits or more: `0.0031`, `0.27`, `8.1`, `120`."""
    return f"{value:.0f}" if value >= 9.95 else f"{value:.2g}"


def _three_digits(value: float) -> str:
    """Return a number with about three digits: `1.3`, `41.0`, `1480`, `12k`."""
    if value >= 10_000:
        return f"{value / 1000:.0f}k"
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"
