"""Trains the bundled model with tokens of different ages, with and without a correction for them, and draws what is learnt.

    python scripts/bench/staleness.py outputs/staleness --picture docs/images/staleness.png
    python scripts/bench/staleness.py outputs/staleness --staleness 0 8 --seeds 1 --steps 8      # smaller, quicker

One run of the bundled experiment for each seed, staleness and correction, `--jobs` at a time, each in a process of its own
with one thread. Runs that are in the folder already are not made again. The correction is
`trainer.algorithm.off_policy.weight=token`, which with this experiment is what `algorithm=tis` adds; clipping is around the
policy that the learner has when the batch closes (`trainer.algorithm.proximal=recompute`) in all of them. The engine and
the learner take seconds for a step, so that groups are done long before their batch is due: admission alone makes tokens
old, and the table has the mean age that was trained on. The first steps of a run have younger ones.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
from harness import spread

from skyrl_train.telemetry.trackers import new_figure, save_figure

RUN_DEADLINE_S = 1800.0
CORRECTIONS = ("none", "token")
"""Values of `trainer.algorithm.off_policy.weight`."""
LAST_STEPS = 5
"""Rewards of so many last steps are averaged."""
_ACCURACY = "eval/accuracy_first_turn"
_COLOURS = ("#1f5fa8", "#2e7d5b", "#c9822b", "#d1495b", "#8a6fb3")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the runs of one curve have in common."""

    staleness: int
    correction: str

    @property
    def name(self) -> str:
        return f"staleness_{self.staleness}_{self.correction}"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What the runs of a setting, of several seeds, gave."""

    setting: Setting
    steps: list[int]
    """At which the held-out prompts were answered."""
    accuracies: list[list[float]]
    """At each of these, of each seed."""
    rewards: list[float]
    """Mean of the last steps, of each seed."""
    ages: list[float]
    """Mean age of the trained tokens, in versions, of each seed; the first `staleness` steps aside."""


def settings(staleness: Sequence[int]) -> Iterator[Setting]:
    """Tokens of age 0 have nothing to be corrected."""
    for each in staleness:
        for correction in CORRECTIONS[: 1 if each == 0 else None]:
            yield Setting(staleness=each, correction=correction)


def overrides(setting: Setting, seed: int, args: argparse.Namespace) -> list[str]:
    """Of a run with half the experiment's batch and a higher learning rate: more updates, which differ more."""
    return [
        "platform=cpu",
        f"seed={seed}",
        f"trainer.max_staleness={setting.staleness}",
        f"trainer.algorithm.off_policy.weight={setting.correction}",
        f"trainer.total_steps={args.steps}",
        f"trainer.train_batch_size={args.prompts}",
        f"trainer.policy_mini_batch_size={args.prompts // 2}",
        f"trainer.critic_mini_batch_size={args.prompts // 2}",
        f"trainer.policy.optimizer.lr={args.lr}",
        f"trainer.eval_interval={args.eval_interval}",
        f"data.max_validation_prompts={args.held_out}",
        *harness.STEPS_ALONE,
    ]


def curve_of(setting: Setting, runs: Sequence[Sequence[dict[str, Any]]]) -> Curve:
    """Of the metrics of a setting's runs."""
    evaluated = [[record for record in records if _ACCURACY in record] for records in runs]
    trained = [[record for record in records if "reward/mean" in record] for records in runs]
    return Curve(
        setting=setting,
        steps=[record["step"] for record in evaluated[0]],
        accuracies=[list(column) for column in zip(*([record[_ACCURACY] for record in run] for run in evaluated))],
        rewards=[statistics.fmean(record["reward/mean"] for record in run[-LAST_STEPS:]) for run in trained],
        ages=[
            statistics.fmean(record.get("off_policy/age/mean", 0.0) for record in run[setting.staleness :] or run)
            for run in trained
        ],
    )


def show(curves: Sequence[Curve]) -> None:
    table = harness.Table(
        "staleness", "weight", "mean age", "held out, half way", "held out, end", "reward, last steps"
    )
    for curve in curves:
        half = curve.accuracies[len(curve.accuracies) // 2]
        found = (spread(each) for each in (half, curve.accuracies[-1], curve.rewards))
        table.row(curve.setting.staleness, curve.setting.correction, f"{statistics.fmean(curve.ages):.2f}", *found)


def draw(curves: Sequence[Curve], picture: Path) -> None:
    """Held-out accuracy over steps, a panel for each correction, with the lowest and the highest seed as an area."""
    figure = new_figure((10.0, 4.6), "Held-out accuracy with tokens of different ages")
    panels = figure.subplots(1, len(CORRECTIONS), sharey=True)
    staleness = sorted({curve.setting.staleness for curve in curves})
    for axes, correction in zip(panels, CORRECTIONS):
        for curve in curves:
            if curve.setting.staleness and curve.setting.correction != correction:
                continue
            colour = _COLOURS[staleness.index(curve.setting.staleness) % len(_COLOURS)]
            mean = [statistics.fmean(column) for column in curve.accuracies]
            label = f"max_staleness={curve.setting.staleness}"
            axes.plot(curve.steps, mean, color=colour, marker="o", markersize=3, label=label)
            low, high = ([pick(column) for column in curve.accuracies] for pick in (min, max))
            axes.fill_between(curve.steps, low, high, color=colour, alpha=0.12, linewidth=0)
        axes.set_title("no correction" if correction == "none" else f"off_policy.weight={correction}", fontsize=11)
        axes.set_xlabel("Step")
        axes.set_ylim(0.0, 1.02)
        axes.grid(visible=True, alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].legend(frameon=False, fontsize=9, loc="lower right")
    panels[0].set_ylabel("Accuracy, first turn, sampled")
    picture.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, panels[0], picture)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = harness.arguments(__doc__)
    parser.add_argument("folder", type=Path, help="where the runs are, or will be")
    parser.add_argument("--picture", type=Path, help="where to draw the curves")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=16, help="of a step, of eight samples each")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--eval-interval", type=int, default=4, help="steps")
    parser.add_argument("--held-out", type=int, default=64, help="prompts")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Makes the runs that are missing; prints the table and draws the picture."""
    args = parse(argv)
    all_settings = list(settings(args.staleness))
    with ThreadPoolExecutor(args.jobs) as pool:
        # Seed after seed: where it is broken off, whole curves are there.
        made = {
            (setting, seed): pool.submit(
                harness.trained,
                args.folder / f"{setting.name}_seed_{seed}",
                *overrides(setting, seed, args),
                deadline_s=RUN_DEADLINE_S,
            )
            for seed in range(1, args.seeds + 1)
            for setting in all_settings
        }
        found = {key: future.result() for key, future in made.items()}
    curves = [
        curve_of(each, [runs for (setting, _), runs in found.items() if setting == each]) for each in all_settings
    ]
    show(curves)
    if args.picture:
        draw(curves, args.picture)


if __name__ == "__main__":
    harness.run(main)
