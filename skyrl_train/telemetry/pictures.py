"""The pictures in a run's folder, which are no reason to end it."""

from __future__ import annotations

from collections.abc import Callable

from skyrl_train.telemetry.console import RunConsole
from skyrl_train.telemetry.run_folder import RunFolder


def draw_or_warn(draw: Callable[..., object], folder: RunFolder, console: RunConsole, *, title: str) -> None:
    """`draw(metrics file, image file, title=...)`; a failure becomes a line on the console."""
    try:
        draw(folder.metrics_file, folder.learning_curve_file, title=title)
    except Exception as error:  # matplotlib, its fonts and its caches fail in many ways
        console.warn(f"{folder.learning_curve_file.name} could not be drawn: {type(error).__name__}: {error}")
