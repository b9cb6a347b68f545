"""Measures rollouts of engines with 8-bit weights: how far log-probabilities are from the trainer's, and what is learnt.

    python scripts/bench/quantization.py outputs/quantization --seeds 1 2 3 --steps 24

Runs of the bundled experiment (16 prompts a step, two optimizer steps each, `--lr`), one after the other, for each of:

    none                 the engine has the trainer's weights
    int8, fp8            its matrices are rounded at each sync, and losses are weighted by token (the default then)
    int8_uncorrected     rounded, with trainer.algorithm.off_policy.weight=none

Differences are those that runs record (`off_policy/numerics_...`), of sampled tokens before each step's first update: mean
and largest size, and the mean itself, which estimates KL(engine || trainer). A run that is complete is not made again.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness

KINDS = {
    "none": [],
    "int8": ["generator.quantization=int8"],
    "fp8": ["generator.quantization=fp8"],
    "int8_uncorrected": ["generator.quantization=int8", "trainer.algorithm.off_policy.weight=none"],
}
LAST_STEPS = 5


def row(runs: Sequence[Sequence[dict[str, Any]]]) -> list[str]:
    """Cells of one kind, of the records of its runs."""
    steps = [record for run in runs for record in run if "reward/mean" in record]

    def of(name: str) -> list[float]:
        return [record[name] for record in steps if name in record]

    corrected = of("off_policy/weights_bounded_fraction")
    return [
        f"{statistics.fmean(of('off_policy/numerics_abs_mean')):.1e}",
        f"{max(of('off_policy/numerics_abs_max')):.2g}",
        f"{-statistics.fmean(of('off_policy/numerics_mean')):.1e}",
        f"{statistics.fmean(corrected):.1e}" if corrected else "",
        harness.spread(
            [statistics.fmean([r["reward/mean"] for r in run if "reward/mean" in r][-LAST_STEPS:]) for run in runs]
        ),
        harness.spread([run[-1]["eval/accuracy_first_turn"] for run in runs]),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--lr", type=float, default=2e-4)
    args = parser.parse_args(argv)
    table = harness.Table(
        *("weights", "mean size", "largest", "KL", "weights bounded"),
        *(f"reward, last {LAST_STEPS} steps", "held out, last step"),
    )
    # A smaller batch and a higher learning rate than the experiment's.
    common = [
        *("platform=cpu", "trainer.train_batch_size=16", "trainer.policy_mini_batch_size=8"),
        *("trainer.critic_mini_batch_size=8", "trainer.eval_before_train=false"),
        f"trainer.total_steps={args.steps}",
        f"trainer.policy.optimizer.lr={args.lr}",
        f"trainer.eval_interval={args.steps}",
        *harness.STEPS_ALONE,
    ]
    for kind in args.kinds:
        runs = [
            harness.trained(args.folder / f"{kind}_seed_{seed}", *KINDS[kind], f"seed={seed}", *common)
            for seed in args.seeds
        ]
        table.row(kind, *row(runs))


if __name__ == "__main__":
    harness.run(main)
