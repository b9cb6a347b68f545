"""`learning_curve.png`, drawn from `metrics.jsonl`: reward, accuracy and response length over steps; in supervised
training the loss of training, the held-out loss and the learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from skyrl_train.errors import counted
from skyrl_train.system import require
from skyrl_train.system.files import write_atomically
from skyrl_train.telemetry.metrics_log import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TRAIN_COLOUR = "#1f5fa8"
_EVAL_COLOUR = "#d1495b"
_LENGTH_COLOUR = "#2e7d5b"
_COMPONENT_COLOURS = ("#8a6fb3", "#c9822b", "#4a9aa8", "#9c5a4b", "#7a8b3c", "#b06a94")
"""Of the rewards of functions, of which the first few are drawn."""
_SMOOTH_FROM_POINTS = 30
"""From here on a running mean is drawn over the raw points, which become faint."""
_WINDOW_SHARE = 0.05
"""Width of the running mean, as a share of the points."""

_DRAWN = ("reward/", "env/solved", "eval/accuracy", "eval/loss", "response_length/mean", "train/loss", "policy/lr")
"""Begin the names of metrics that are in a picture."""

Record = Mapping[str, Any]


def draw_learning_curve(metrics_file: Path, image_file: Path, *, title: str) -> bool:
    """Draws the curve of reinforcement learning and replaces the image; False, and no image, while there is no record to
    draw."""
    if not (records := read_metrics(metrics_file, keeps=_is_drawn)):
        return False
    figure = new_figure((8.0, 8.4), title)
    reward_axes, accuracy_axes, length_axes = figure.subplots(3, 1, sharex=True)

    _draw_series(reward_axes, records, "reward/mean", colour=_TRAIN_COLOUR, label="training, mean of trajectories")
    for name, colour in zip(_components(records), _COMPONENT_COLOURS):
        _draw_series(reward_axes, records, f"reward/{name}/mean", colour=colour, label=name)
    _finish_axes(reward_axes, "Reward")

    solved = _first_present(records, ("env/solved_first_turn", "env/solved"))
    held_out = _first_present(records, ("eval/accuracy_first_turn", "eval/accuracy"))
    first_turn = ", first turn" if solved.endswith("first_turn") else ""
    _draw_series(accuracy_axes, records, solved, colour=_TRAIN_COLOUR, label=f"training, sampled{first_turn}")
    first_turn = ", first turn" if held_out.endswith("first_turn") else ""
    _draw_points(accuracy_axes, records, held_out, label=f"held out{first_turn}")
    accuracy_axes.set_ylim(-0.02, 1.02)
    _finish_axes(accuracy_axes, "Accuracy")

    _draw_series(length_axes, records, "response_length/mean", colour=_LENGTH_COLOUR, label="training, mean")
    _finish_axes(length_axes, "Response length (tokens)")
    save_figure(figure, length_axes, image_file)
    return True


def draw_loss_curve(metrics_file: Path, image_file: Path, *, title: str) -> bool:
    """The same for supervised training."""
    if not (records := read_metrics(metrics_file, keeps=_is_drawn)):
        return False
    figure = new_figure((8.0, 6.0), title)
    loss_axes, rate_axes = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    _draw_series(loss_axes, records, "train/loss", colour=_TRAIN_COLOUR, label="training, mean of tokens")
    _draw_points(loss_axes, records, "eval/loss", label="held out")
    _finish_axes(loss_axes, "Loss", legend="upper right")
    _draw_series(rate_axes, records, "policy/lr", colour=_LENGTH_COLOUR, label="learning rate")
    _finish_axes(rate_axes, "Learning rate", legend="upper right")
    save_figure(figure, rate_axes, image_file)
    return True


def new_figure(size: tuple[float, float], title: str) -> Figure:
    """An empty figure of `size` in inches, which is drawn without a display."""
    require("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    return figure


def save_figure(figure: Figure, lowest: Any, image_file: Path) -> None:
    """Names the steps under the `lowest` axes and replaces the image."""
    lowest.set_xlabel("Step")
    lowest.xaxis.get_major_locator().set_params(integer=True)
    image = BytesIO()
    figure.savefig(image, format="png")
    write_atomically(image_file, image.getvalue())


def _is_drawn(name: str) -> bool:
    return name.startswith(_DRAWN)


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of up to `width` values around each one, fewer at both ends. `width` is odd.

    Example:
        >>> running_mean([0.0, 3.0, 6.0], 3)
        [1.5, 3.0, 4.5]
    """
    half, sums = width // 2, [0.0, *accumulate(values)]
    windows = [(max(0, index - half), min(len(values), index + half + 1)) for index in range(len(values))]
    return [(sums[stop] - sums[start]) / (stop - start) for start, stop in windows]


def _points(records: Sequence[Record], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of the records that carry a number under `name`."""
    found = [record for record in records if record.get(name) is not None]
    return [record["step"] for record in found], [float(record[name]) for record in found]


def _components(records: Sequence[Record]) -> list[str]:
    """The names of the rewards of functions, where there are several or there is an environment's own beside one."""
    suffix = "/mean"
    found = {
        key[len("reward/") : -len(suffix)]
        for one in records
        for key in one
        if key.startswith("reward/") and key.endswith(suffix)
    }
    names = sorted(found - {""})
    return names if len(names) > 1 else []


def _first_present(records: Sequence[Record], names: Sequence[str]) -> str:
    """The first name that any record carries, else the last name."""
    return next((name for name in names if any(name in record for record in records)), names[-1])


def _draw_series(axes: Axes, records: Sequence[Record], name: str, *, colour: str, label: str) -> None:
    """A line through the records that carry `name`; nothing where none does."""
    steps, values = _points(records, name)
    if not steps:
        return
    if len(steps) < _SMOOTH_FROM_POINTS:
        axes.plot(steps, values, color=colour, linewidth=1.8, marker="o", markersize=3.5, label=label)
        return
    width = 2 * max(1, round(len(steps) * _WINDOW_SHARE / 2)) + 1
    axes.plot(steps, values, color=colour, linewidth=1.0, alpha=0.3)
    axes.plot(
        steps,
        running_mean(values, width),
        color=colour,
        linewidth=2.0,
        label=f"{label} (running, {counted(width, 'step')})",
    )


def _draw_points(axes: Axes, records: Sequence[Record], name: str, *, label: str) -> None:
    """Marks at the records that carry `name`, the first and the last with their values."""
    steps, values = _points(records, name)
    if not steps:
        return
    axes.plot(
        steps,
        values,
        color=_EVAL_COLOUR,
        linestyle="--",
        linewidth=1.2,
        marker="D",
        markersize=6,
        label=label,
        zorder=3,
    )
    for step, value in {steps[0]: values[0], steps[-1]: values[-1]}.items():
        below = value > 0.9
        axes.annotate(
            f"{value:.2f}",
            (step, value),
            textcoords="offset points",
            xytext=(0, -14 if below else 8),
            ha="center",
            fontsize=9,
            color=_EVAL_COLOUR,
        )


def _finish_axes(axes: Axes, name: str, legend: Literal["lower right", "upper right"] = "lower right") -> None:
    """Grid, name and legend, or a word where nothing was drawn."""
    axes.set_ylabel(name)
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.lines:
        axes.legend(loc=legend, frameon=False, fontsize=9)
    else:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center", color="0.5")
