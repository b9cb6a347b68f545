"""Memory of passes over micro-batches: predicted against measured; the budget that is found, and what it gives.

    python scripts/bench/memory.py predict                # four models at three numbers of rows, training and scoring
    python scripts/bench/memory.py budget                 # the budget, 1,000 micro-batches under it, throughput
    python scripts/bench/memory.py budget --layout packed --micro-batches 200 --check

Measured is what `learner/memory/meter.py` sees of the real engine's passes on a CPU, tensor by tensor.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("predict", help="predicted against measured peaks")
    budget = commands.add_parser("budget", help="what a byte limit gives")
    budget.add_argument("--limit-mib", type=float, default=32.0)
    budget.add_argument("--layout", choices=("padded", "packed", "prefix_shared"), default="padded")
    budget.add_argument("--micro-batches", type=int, default=1000)
    budget.add_argument("--steps", type=int, default=4, help="steps whose throughput is measured")
    budget.add_argument("--rounds", type=int, default=3)
    budget.add_argument("--check", action="store_true", help="exit with status 1 where a promise is broken")
    args = parser.parse_args()
    {"predict": run_predict, "budget": run_budget}[args.command](args)


def run_predict(args: argparse.Namespace) -> None:  # noqa: ARG001
    """A line for each model and number of rows, and the largest and mean error."""
    from memory_predict import CASES, predictions

    print("| model | pass | rows | measured MB | predicted MB | error |\n|---|---|--:|--:|--:|--:|")
    errors: list[float] = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            for found in predictions(case, Path(folder)):
                errors.append(abs(found.error))
                print(
                    f"| {case.name} | {found.phase} | {found.rows} | {found.measured_bytes / 1e6:.1f} | "
                    f"{found.predicted_bytes / 1e6:.1f} | {found.error:+.1%} |",
                    flush=True,
                )
    print(f"\n{len(errors)} passes: largest error {max(errors):.1%}, mean {sum(errors) / len(errors):.1%}")


def run_budget(args: argparse.Namespace) -> None:
    """Probes, the budget, peaks of random micro-batches under it, and tokens a second against fixed sizes."""
    from memory_budget import BudgetCase, random_step

    case = BudgetCase(limit_bytes=int(args.limit_mib * (1 << 20)), layout=args.layout)
    report = case.size()
    assert report.training is not None
    print(report.line(), "\n\n| rows | length | positions | peak MiB | of the limit |\n|--:|--:|--:|--:|--:|")
    for probe in report.training.probes:
        print(
            f"| {probe.rows} | {probe.longest} | {probe.positions} | {probe.peak_bytes / (1 << 20):.2f} | "
            f"{probe.peak_bytes / case.limit_bytes:.1%} |"
        )
    peaks = case.peaks(args.micro_batches)
    above = sum(share > 1 for share in peaks.shares)
    print(
        f"\n{len(peaks.shares)} random micro-batches: {above} above the limit, largest {peaks.largest:.1%}, "
        f"mean {peaks.mean:.1%} of it"
    )
    steps = [random_step(10_000 + seed) for seed in range(args.steps)]
    fitting = [rows for rows in (1, 2, 4, 8, 16, 32, 64) if case.fits(rows, steps)]
    speeds = case.tokens_per_cpu_s(steps, fitting, args.rounds)
    for rows, speed in speeds.items():
        print(f"{f'{rows} rows' if rows else 'budget':>10}: {speed:8.0f} tokens per CPU second")
    best = max(speeds[rows] for rows in fitting)
    print(f"against the best fixed size that fits: {speeds[0] / best:.2f}; against 1 row: {speeds[0] / speeds[1]:.2f}")
    if args.check and (above or peaks.mean <= 0.8 or speeds[0] < best):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
