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

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skyrl_train.telemetry import read_metrics

RUN_TIMEOUT_S = 3600.0
KINDS = {
    "none": [],
    "int8": ["generator.quantization=int8"],
    "fp8": ["generator.quantization=fp8"],
    "int8_uncorrected": ["generator.quantization=int8", "trainer.algorithm.off_policy.weight=none"],
}
LAST_STEPS = 5


def command(folder: Path, kind: str, seed: int, args: argparse.Namespace) -> list[str]:
    """The run, with a smaller batch and a higher learning rate than the experiment's."""
    return [
        *(sys.executable, "-m", "skyrl_train.main", "+experiment=gsm8k_multiturn", "platform=cpu"),
        *KINDS[kind],
        f"hydra.run.dir={folder}",
        f"seed={seed}",
        f"trainer.total_steps={args.steps}",
        "trainer.train_batch_size=16",
        "trainer.policy_mini_batch_size=8",
        "trainer.critic_mini_batch_size=8",
        f"trainer.policy.optimizer.lr={args.lr}",
        f"trainer.eval_interval={args.steps}",
        "trainer.eval_before_train=false",
        "trainer.ckpt_interval=0",
        "trainer.export_hf=false",
        "trainer.dump_rollouts=false",
    ]


def make(folder: Path, kind: str, seed: int, args: argparse.Namespace) -> None:
    """Raises RuntimeError with what a run printed last where it fails, TimeoutExpired."""
    if (folder / "complete.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "printed.log").open("wb") as log:
        words, environment = command(folder, kind, seed, args), {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, check=False, stdout=log, stderr=log, env=environment, timeout=RUN_TIMEOUT_S)
    if done.returncode:
        said = (folder / "printed.log").read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{folder} ended with status {done.returncode}:\n{said}")


def spread(values: Sequence[float]) -> str:
    """`0.912 ± 0.013`: mean and standard deviation."""
    return f"{statistics.fmean(values):.3f}" + (f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else "")


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
        spread([statistics.fmean([r["reward/mean"] for r in run if "reward/mean" in r][-LAST_STEPS:]) for run in runs]),
        spread([run[-1]["eval/accuracy_first_turn"] for run in runs]),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--lr", type=float, default=2e-4)
    args = parser.parse_args(arguments)
    columns = (
        *("weights", "mean size", "largest", "KL", "weights bounded"),
        *(f"reward, last {LAST_STEPS} steps", "held out, last step"),
    )
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for kind in args.kinds:
        folders = [args.folder / f"{kind}_seed_{seed}" for seed in args.seeds]
        for seed, folder in zip(args.seeds, folders):
            make(folder, kind, seed, args)
        cells = row([read_metrics(folder / "metrics.jsonl") for folder in folders])
        print("| " + " | ".join([kind, *cells]) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
