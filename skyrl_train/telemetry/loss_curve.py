"""`learning_curve.png` of supervised training: training loss, held-out loss and learning rate, from `metrics.jsonl`."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from skyrl_train.telemetry.files import write_atomically
from skyrl_train.telemetry.learning_curve import (
    LENGTH_COLOUR,
    TRAIN_COLOUR,
    draw_points,
    draw_series,
    finish_axes,
)
from skyrl_train.telemetry.metrics_log import read_metrics


def draw_loss_curve(metrics_file: Path, image_file: Path, *, title: str) -> bool:
    """Draws the curve and replaces the image; False, and no image, while there is no record to draw."""
    records = read_metrics(metrics_file)
    if not records:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 6.0), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    loss_axes, rate_axes = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    figure.suptitle(title, fontsize=13, fontweight="bold")
    draw_series(loss_axes, records, "train/loss", colour=TRAIN_COLOUR, label="training, mean of tokens")
    draw_points(loss_axes, records, "eval/loss", label="held out")
    finish_axes(loss_axes, "Loss", legend="upper right")
    draw_series(rate_axes, records, "policy/lr", colour=LENGTH_COLOUR, label="learning rate")
    finish_axes(rate_axes, "Learning rate", legend="upper right")
    rate_axes.set_xlabel("Step")
    rate_axes.xaxis.get_major_locator().set_params(integer=True)
    image = BytesIO()
    figure.savefig(image, format="png")
    write_atomically(image_file, image.getvalue())
    return True
