"""The runs of a sweep side by side: a table of before and after, and their held-out curves in one picture.

python -m skyrl_train.main -m +experiment=gsm8k_multiturn seed=1,2,3,4,5 hydra.sweep.dir=outputs/seeds
python scripts/compare_seeds.py outputs/seeds --picture docs/images/five_seeds.png

With `--gain` instead the gain on the held-out questions with its 95 % interval (of the differences question by question),
and the share of answers in the form asked for, where a reward or the environment measures `format`. Of single-turn runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from skyrl_train.telemetry import read_metrics
from skyrl_train.telemetry.records import read_rollouts
from skyrl_train.trainers.evaluation import read_evaluations

HEADER = (
    "| seed | first turn, before | first turn, after | any turn, after | reward, first 5 steps | reward, last 5 steps |"
)
GAIN_HEADER = "| seed | held-out, before | held-out, after | gain, 95 % interval | format, before | format, after |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="folder whose sub-folders are finished runs")
    parser.add_argument("--picture", type=Path, help="where to write the curves")
    parser.add_argument("--gain", action="store_true", help="gains with their intervals, and formats")
    args = parser.parse_args(argv)
    runs = sorted(path.parent for path in args.sweep.glob("*/complete.json"))
    if not runs:
        sys.stderr.write(f"{args.sweep} holds no finished run (a folder with complete.json)\n")
        return 2
    header = GAIN_HEADER if args.gain else HEADER
    print(header)
    print("|" + "---|" * (header.count("|") - 1))
    for run in runs:
        print(gain_row(run) if args.gain else row(run))
    if args.picture:
        draw(runs, args.picture, "Held-out accuracy" + ("" if args.gain else ", first turn, sampled"))
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


def gain_row(run: Path) -> str:
    steps = [evaluation.global_step for evaluation in read_evaluations(run / "evaluation.json")]
    before, after = (held_out(run / "rollouts" / f"eval_step_{step:06d}.parquet") for step in (steps[0], steps[-1]))
    gains = [after[uid]["reward"] - before[uid]["reward"] for uid in before]
    mean = sum(gains) / len(gains)
    half = 1.96 * (sum((each - mean) ** 2 for each in gains) / (len(gains) - 1) / len(gains)) ** 0.5
    cells = [
        str(seed_of(run)),
        *(f"{mean_of(each, 'reward'):.3f}" for each in (before, after)),
        f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})",
        *(f"{mean_of(each, 'format'):.3f}" for each in (before, after)),
    ]
    return "| " + " | ".join(cells) + " |"


def held_out(file: Path) -> dict[str, Mapping[str, float]]:
    """By question the reward, and what else was measured of its answer."""
    (batch,) = read_rollouts(file).values()
    return {each.prompt_uid: {**each.metrics, **each.rewards, "reward": each.reward} for each in batch.trajectories}


def mean_of(rows: Mapping[str, Mapping[str, float]], name: str) -> float:
    values = [row.get(name, float("nan")) for row in rows.values()]
    return sum(values) / len(values)


def draw(runs: Sequence[Path], picture: Path, ylabel: str) -> None:
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
    axes.set(xlabel="Step", ylabel=ylabel, ylim=(0, 1.02))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
