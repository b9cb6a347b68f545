"""What a notebook's cell shows of a run: one output that is rewritten, a line and the curve so far."""

from __future__ import annotations

import html
import importlib
import sys
import uuid
from typing import Any

MOST_POINTS = 200
"""Of a curve: as many as can be told apart at its width."""
_WIDTH, _HEIGHT = 420, 90


def in_notebook() -> bool:
    """Whether this process is a kernel that shows rich output. IPython is asked where it is loaded, never loaded."""
    ipython = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return getattr(shell, "kernel", None) is not None


class CellOutput:
    """One output of the running cell, made at the first `show` and rewritten by each further one.

    A step without a finite value moves the line alone.
    """

    def __init__(self) -> None:
        self._id = uuid.uuid4().hex
        self._is_there = False
        self._points: list[tuple[int, float]] = []

    def show(self, line: str, *, step: int, name: str = "", value: float | None = None) -> None:
        """Show a line, and under it the curve of `name`, of which `value` is the next point."""
        if value is not None and abs(value) < float("inf"):
            self._points.append((step, value))
        text = f"<pre>{html.escape(line)}</pre>{curve(self._points, name)}"
        bundle = {"text/plain": line, "text/html": text}
        display = importlib.import_module("IPython.display")
        show = display.update_display if self._is_there else display.display
        show(bundle, raw=True, display_id=self._id)
        self._is_there = True


def curve(points: list[tuple[int, float]], name: str) -> str:
    """Return an SVG of a curve over steps, with its ends in words; empty for fewer than two points."""
    if len(points) < 2:
        return ""
    every = -(-len(points) // MOST_POINTS)
    kept = [*points[:-1:every], points[-1]]
    low, high = min(value for _, value in points), max(value for _, value in points)
    first, last = points[0][0], points[-1][0]
    at = " ".join(
        f"{(step - first) / max(1, last - first) * _WIDTH:.1f},{(1 - (value - low) / ((high - low) or 1)) * _HEIGHT:.1f}"
        for step, value in kept
    )
    said = html.escape(f"{name} from {points[0][1]:.4g} at step {first} to {points[-1][1]:.4g} at step {last}")
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 -2 {_WIDTH} {_HEIGHT + 4}" role="img" aria-label="{said}">'
        f'<polyline points="{at}" fill="none" stroke="currentColor" stroke-width="1.5"/></svg><div>{said}</div>'
    )
