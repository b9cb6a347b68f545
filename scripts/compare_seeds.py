"""The runs of a sweep side by side: a table of before and after, and their held-out curves in one picture.

python -m skyrl_train.main -m +experiment=gsm8k_multiturn seed=1,2,3,4,5 hydra.sweep.dir=outputs/seeds
python scripts/compare_seeds.py outputs/seeds --picture docs/images/five_seeds.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from skyrl_train.telemetry.metrics_log import read_metrics
from skyrl_train.trainers.evaluation_report import read_evaluations

HEADER = (
    "| seed | first turn, before | first turn, after | any turn, after | reward, first 5 steps | reward, last 5 steps |"
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="folder whose sub-folders are finished runs")
    parser.add_argument("--picture", type=Path, help="where to write the curves")
    args = parser.parse_args(argv)
    runs = sorted(path.parent for path in args.sweep.glob("*/complete.json"))
    if not runs:
        sys.stderr.write(f"{args.sweep} holds no finished run (a folder with complete.json)\n")
        return 2
    print(HEADER)
    print("|" + "---|" * (HEADER.count("|") - 1))
    for run in runs:
        print(row(run))
    if args.picture:
        draw(runs, args.picture)
    return 0


def seed_of(run: Path) -> int:
    return int(OmegaConf.load(run / "config.yaml").seed)


def rewards(run: Path) -> list[float]:
    return [record["reward/mean"] for record in read_metrics(run / "metrics.jsonl") if "reward/mean" in record]


def row(run: Path) -> str:
    evaluations = read_evaluations(run / "evaluation.json")
    before, after = evaluations[0].overall, evaluations[-1].overall
    values = rewards(run)
    cells: list[Any] = [
        seed_of(run),
        *(f"{value:.3f}" for value in (before.accuracy_first_turn, after.accuracy_first_turn, after.accuracy)),
        *(f"{sum(part) / len(part):.3f}" for part in (values[:5], values[-5:])),
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def draw(runs: Sequence[Path], picture: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for run in runs:
        evaluations = read_evaluations(run / "evaluation.json")
        steps = [evaluation.global_step for evaluation in evaluations]
        axes.plot(
            steps,
            [evaluation.overall.accuracy_first_turn for evaluation in evaluations],
            marker="o",
            label=f"seed {seed_of(run)}",
        )
    axes.set(xlabel="Step", ylabel="Held-out accuracy, first turn, sampled", ylim=(0, 1.02))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
