"""`timeline.jsonl`: what ran when, a line a step, and `timeline.png`, which is drawn of it.

    {"began": 1763844000.123, "engine": [[0.1, 2.4]], "groups": [[0.0, 8], [2.4, 0]],
     "learner": [["generate", 0.0, 2.5], ["update", 2.6, 3.9]], "seconds": 4.0, "step": 3}

`began` is in seconds since 1970, everything else in seconds from there. A line covers the time since the line before; what
the engine did and how many groups were in flight is to the 200th part of it. A run that goes on appends, so that steps
that were done twice are there twice. Times are worth no waiting for a disk: a power cut may cost the last lines.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_train.telemetry.activity import ActivityReport, Span
from skyrl_train.telemetry.trackers.learning_curve import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_RESOLUTION = 200
"""Parts of a line's time that are told apart."""
_STEPS_SHOWN = 12
"""The last ones, in detail; there is an overview of all."""
_PHASES = {
    "wait": ("generate",),
    "update": ("assemble", "collate", "score", "estimate", "update"),
    "sync": ("sync",),
    "save": ("log", "record", "checkpoint", "load"),
    "eval": ("evaluate", "sample"),
}
_COLOURS = {
    "wait": "#c9c9c9",
    "update": "#1f5fa8",
    "sync": "#c9822b",
    "save": "#8a6fb3",
    "eval": "#d1495b",
    "other": "#e9e4da",
}
_ENGINE_COLOUR = "#2e7d5b"
Phase = tuple[str, float, float]
"""Name, begin and end."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line, with all times in seconds since 1970."""

    step: int
    began: float
    ended: float
    learner: tuple[Phase, ...]
    engine: tuple[Span, ...]
    groups: tuple[tuple[float, int], ...]
    """When their number changed, and to what."""


class Timeline:
    """Appends to `timeline.jsonl`."""

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.perf_counter, now: Callable[[], float] = time.time
    ) -> None:
        """`clock` is that of the phases and of rollouts' activity, `now` gives seconds since 1970."""
        self._path, self._clock, self._now = path, clock, now
        self._began = clock()

    def write(self, step: int, phases: Sequence[Phase], activity: ActivityReport | None) -> None:
        """Append what went on since the last line. Raises OSError."""
        began, ended = self._began, self._clock()
        self._began = ended
        grain = (ended - began) / _RESOLUTION

        def from_begin(moment: float) -> float:
            return round(max(0.0, moment - began), 4)

        line = {
            "step": step,
            "began": round(self._now() - (ended - began), 3),
            "seconds": from_begin(ended),
            "learner": [[name, from_begin(start), from_begin(end)] for name, start, end in phases],
            "engine": [list(map(from_begin, span)) for span in _joined(activity.engine if activity else (), grain)],
            "groups": [[from_begin(moment), count] for moment, count in _thinned(activity, grain)],
        }
        with self._path.open("a+b", buffering=0) as file:
            if size := file.tell():
                file.seek(size - 1)
                if file.read(1) != b"\n":  # a kill tore the last line, which is not to be continued
                    file.write(b"\n")
            file.write(json.dumps(line, sort_keys=True).encode() + b"\n")


def _joined(spans: Sequence[Span], grain: float) -> list[Span]:
    """Spans of which those that are closer than `grain` are one."""
    joined: list[Span] = []
    for begin, end in spans:
        if joined and begin - joined[-1][1] < grain:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((begin, end))
    return joined


def _thinned(activity: ActivityReport | None, grain: float) -> list[tuple[float, int]]:
    """The counts of groups, the last one of each `grain`."""
    kept: list[tuple[float, int]] = []
    for moment, count in activity.groups if activity else ():
        if len(kept) > 1 and moment - kept[-2][0] < grain:
            kept.pop()
        kept.append((moment, count))
    return kept


def read_timeline(path: Path) -> list[Line]:
    """The lines of a `timeline.jsonl`, in order; none where the file is absent. What a kill tore is left out."""
    if not path.exists():
        return []
    return [line for text in path.read_bytes().split(b"\n") if (line := _line_of(text)) is not None]


def _line_of(text: bytes) -> Line | None:
    try:
        content: Mapping[str, Any] = json.loads(text)
        began = float(content["began"])
        return Line(
            step=int(content["step"]),
            began=began,
            ended=began + float(content["seconds"]),
            learner=tuple((str(name), began + start, began + end) for name, start, end in content["learner"]),
            engine=tuple((began + start, began + end) for start, end in content["engine"]),
            groups=tuple((began + moment, int(count)) for moment, count in content["groups"]),
        )
    except (ValueError, KeyError, TypeError):
        return None


def kind_of(phase: str) -> str:
    """Return what a phase of the learner is drawn as: `wait`, `update`, `sync`, `save`, `eval` or `other`."""
    return next((kind for kind, phases in _PHASES.items() if phase in phases), "other")


def draw_timeline(record: Path, image_file: Path, *, title: str) -> bool:
    """Draws what ran when in the last steps, and what each step was spent on; False, and no image, while there is no record.

    In a serial run the engine computes while the learner waits. Gaps of the engine's lane within are waits for
    environments; those of the learner's are `timing/other`.
    """
    if not (lines := read_timeline(record)):
        return False
    figure = new_figure((11.0, 7.6), title)
    lanes, groups, shares = figure.subplots(3, 1, height_ratios=(2.2, 1.4, 2.0))
    shown = _last_steps(lines)
    origin = shown[0].began
    _draw_lanes(lanes, shown, origin)
    times = [moment - origin for line in shown for moment, _ in line.groups]
    counts = [count for line in shown for _, count in line.groups]
    if times:
        groups.step(times, counts, where="post", color=_ENGINE_COLOUR, linewidth=1.2)
        groups.set_ylim(bottom=0)
    groups.set_xlim(lanes.get_xlim())
    groups.set_ylabel("Groups in flight")
    groups.set_xlabel("Seconds")
    _draw_shares(shares, lines)
    for axes in (groups, shares):
        axes.grid(visible=True, alpha=0.25)
    for axes in (lanes, groups, shares):
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, shares, image_file)
    return True


def _last_steps(lines: Sequence[Line]) -> Sequence[Line]:
    """The last lines of one process: from one to the next there is no gap."""
    first = len(lines) - 1
    while first > max(0, len(lines) - _STEPS_SHOWN) and lines[first].began - lines[first - 1].ended < 1.0:
        first -= 1
    return lines[first:]


def _draw_lanes(axes: Axes, lines: Sequence[Line], origin: float) -> None:
    for kind, colour in _COLOURS.items():
        spans = [(b - origin, e - b) for line in lines for name, b, e in line.learner if kind_of(name) == kind]
        if spans:
            axes.broken_barh(spans, (1.1, 0.8), facecolors=colour, label=f"learner: {kind}")
    busy = [(begin - origin, end - begin) for line in lines for begin, end in line.engine]
    if busy:
        axes.broken_barh(busy, (0.1, 0.8), facecolors=_ENGINE_COLOUR, label="engine: busy")
    for line in lines:
        axes.axvline(line.ended - origin, color="0.7", linewidth=0.6)
    for step, ended in {line.step: line.ended for line in reversed(lines)}.items():
        axes.text(ended - origin, 2.02, f"{step}", ha="right", va="bottom", fontsize=8, color="0.4")
    axes.set_xlim(0.0, max(1e-3, lines[-1].ended - origin))
    axes.set_ylim(0.0, 2.0)
    axes.set_yticks([0.5, 1.5], ["engine", "learner"])
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=7, frameon=False, fontsize=8)


def _draw_shares(axes: Axes, lines: Sequence[Line]) -> None:
    """Of each step, the seconds of the learner by kind, one above the other; of one that was done again, of all times."""
    below = dict.fromkeys((line.step for line in lines), 0.0)
    for kind, seconds in _seconds_by_kind(lines):
        found = dict.fromkeys(below, 0.0)
        for line, own in zip(lines, seconds):
            found[line.step] += own
        axes.bar(list(found), list(found.values()), bottom=list(below.values()), color=_COLOURS[kind], width=0.9)
        below = {step: total + found[step] for step, total in below.items()}
    axes.set_ylabel("Seconds of a step")


def _seconds_by_kind(lines: Sequence[Line]) -> Iterator[tuple[str, list[float]]]:
    left = [line.ended - line.began for line in lines]
    for kind in _PHASES:
        seconds = [sum(end - begin for name, begin, end in line.learner if kind_of(name) == kind) for line in lines]
        left = [rest - own for rest, own in zip(left, seconds)]
        yield kind, seconds
    yield "other", [max(0.0, rest) for rest in left]
