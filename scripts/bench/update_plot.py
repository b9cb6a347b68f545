"""The plot of `scripts/bench/update.py growth`."""

from __future__ import annotations

from pathlib import Path

NAMES = {"padded": "padded", "packed": "packed", "shared": "turns merged, prefixes shared"}


def draw_growth(curves: dict[str, dict[str, list[tuple[int, float, int]]]], path: Path) -> None:
    """`curves[turns|samples][variant]` are points (count, CPU seconds, positions computed)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.6), dpi=130, layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, (name, by_variant) in zip(axes, curves.items()):
        for variant, points in by_variant.items():
            axis.plot([count for count, _, _ in points], [s for _, s, _ in points], marker="o", label=NAMES[variant])
        axis.set_xlabel("turns of a trajectory" if name == "turns" else "samples of a prompt")
        axis.set_ylabel("CPU seconds of an update")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    print(f"wrote {path}")
