"""How many rollouts a curriculum saves: the quickstart, and smaller steps with and without a curriculum.

python scripts/bench/curriculum.py --seeds 0 1 2 --prompts 16 --steps 56 --folder outputs/curriculum

Each seed is trained three times on the bundled word problems: with the quickstart's 40 steps of 32 prompts; with `--steps`
of `--prompts` chosen by the curriculum; and with as many that are not chosen, which shows what smaller steps do by
themselves. Prints rollouts and held-out accuracy of each, and their ratios to the quickstart's. Finished runs are not made
again.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import harness

from skyrl_train.trainers.evaluation import read_evaluations


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--prompts", type=int, default=16, help="a step's prompts with the curriculum; even")
    parser.add_argument("--steps", type=int, default=56, help="steps of so many prompts")
    parser.add_argument("--folder", type=Path, default=Path("outputs/curriculum"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for all runs")
    args = parser.parse_args(argv)
    small = [
        f"trainer.total_steps={args.steps}",
        f"trainer.train_batch_size={args.prompts}",
        f"trainer.micro_train_batch_size_per_gpu={args.prompts}",
    ]
    small += [f"trainer.{model}_mini_batch_size={args.prompts // 2}" for model in ("policy", "critic")]
    arms = {
        "quickstart": [],
        f"curriculum, {args.steps} steps of {args.prompts} prompts": [*small, "data.curriculum.enabled=true"],
        f"no curriculum, {args.steps} steps of {args.prompts} prompts": small,
    }
    table = harness.Table(
        *("", "rollouts", "of the quickstart's", "held-out accuracy, mean of seeds", "least of seeds")
    )
    whole = 0.0
    for name, settings in arms.items():
        arm = name.replace(", ", "_").replace(" ", "_")
        found = [
            train(args.folder / f"{arm}_seed_{seed}", *settings, f"seed={seed}", *args.overrides) for seed in args.seeds
        ]
        rollouts = statistics.mean(each for each, _ in found)
        accuracies = [accuracy for _, accuracy in found]
        whole = whole or rollouts
        mean, least = statistics.mean(accuracies), min(accuracies)
        table.row(name, f"{rollouts:,.0f}", f"{rollouts / whole:.2f}", f"{mean:.3f}", f"{least:.3f}")


def train(folder: Path, *settings: str) -> tuple[float, float]:
    """Return the rollouts that a run took, and its accuracy on held-out problems at its end."""
    records = harness.trained(folder, *harness.STEPS_ALONE, *settings)
    accuracy = read_evaluations(folder / "evaluation.json")[-1].overall.accuracy
    assert accuracy is not None, f"{folder}: nothing was evaluated"
    return float(records[-1]["total/trajectories"]), accuracy


if __name__ == "__main__":
    harness.run(main)
