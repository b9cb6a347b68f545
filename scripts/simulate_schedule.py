"""Simulates serial and asynchronous schedules, and holds the simulation against runs that were made.

    python scripts/simulate_schedule.py --measure outputs/schedules --check     # makes short runs, then compares
    python scripts/simulate_schedule.py --calibrate SERIAL STREAM --compare RUN RUN
    python scripts/simulate_schedule.py --gpus 8 64 512 --lengths outputs/RUN

**Against runs.** Rates of engine, environments and learner, and the lengths of samples, come from `--calibrate`: a serial
run with `generator=hf` and, for streams, the learner of one with a stream, since engine and learner share an interpreter
there. Batch, samples and `max_staleness` of each `--compare`d run come from its config.yaml, and nothing else of it is
read before the prediction. The shape of environments' latencies is stated (`--sigma`), their mean is measured.
`--measure` makes runs of the bundled model whose environments sleep (`bench/asynchronous.py`), two to calibrate and four to
predict. `--check` ends with status 1 where a prediction is off by more than 15 %.

**At scale.** `--gpus` prints steps of 7B to 70B, serial and asynchronous, on so many GPUs whose rates follow from data
sheets (`make_scale_tables.py`). Lengths come from a run's rollouts, from the lines of a file with `question` and `answer`
(GSM8K's), or from the stated long-tailed distribution.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import make_scale_tables
import yaml
from rich.console import Console
from rich.table import Table

from skyrl_train.plan.simulated_runs import (
    Latency,
    Lengths,
    RunRates,
    learner_rates,
    recorded_lengths,
    rollouts_of,
    run_rates,
)
from skyrl_train.plan.simulation import LearnerRates, Schedule, simulate
from skyrl_train.runs.rl import train
from skyrl_train.telemetry.metrics_log import read_metrics

sys.path.append(str(Path(__file__).resolve().parent / "bench"))
import asynchronous

TOLERANCE = 0.15
WARM_UP = 2
"""Steps of each run that are left out, of the simulated ones too."""
SEEDS = 20
"""Simulations whose mean is the prediction."""
CALIBRATION = {"calibrate_serial": (16, 0), "calibrate_stream": (16, 1)}
PREDICTED = {"serial_8": (8, 0), "serial_24": (24, 0), "stream_24": (24, 1), "stream_8": (8, 2)}
"""Prompts and `max_staleness` by name."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One run, beside what was said of it."""

    name: str
    schedule: Schedule
    num_samples: int
    measured_s: float
    """Mean of its steps."""
    predicted_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def predict(folder: Path, rates: RunRates, stream: LearnerRates | None, lengths: Lengths, sigma: float) -> Prediction:
    """Simulates the run of `folder` by its configuration. Raises OSError, KeyError, DataError."""
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    trainer, num_samples = config["trainer"], config["generator"]["n_samples_per_prompt"]
    schedule = Schedule(
        batch_size=trainer["train_batch_size"],
        max_staleness=trainer["max_staleness"],
        stale_groups=trainer["stale_groups"],
        take_groups=trainer["take_groups"],
        oversample=trainer["oversample"],
    )
    measured = [record["timing/step"] for record in read_metrics(folder / "metrics.jsonl") if "timing/step" in record]
    learner = rates.learner
    if schedule.max_staleness and stream is not None:
        learner = LearnerRates(token_s=stream.token_s, step_s=stream.step_s, sync_s=learner.sync_s)
    simulated = [
        simulate(
            schedule,
            engine=rates.engine,
            learner=learner,
            make_group=lengths.groups(
                samples=num_samples, seed=seed, latency=Latency.of_mean(rates.environment_s, sigma)
            ),
            num_steps=len(measured),
        ).mean_step_s(WARM_UP)
        for seed in range(SEEDS)
    ]
    return Prediction(
        name=folder.name,
        schedule=schedule,
        num_samples=num_samples,
        measured_s=statistics.fmean(measured[WARM_UP:]),
        predicted_s=statistics.fmean(simulated),
    )


def compare(calibration: Sequence[Path], runs: Sequence[Path], sigma: float, console: Console) -> bool:
    """Prints measured and predicted steps an hour; whether all are within the tolerance."""
    rates = run_rates(calibration[0], warm_up=WARM_UP)
    stream = learner_rates(calibration[1], warm_up=WARM_UP) if len(calibration) > 1 else None
    lengths = recorded_lengths(rollouts_of(calibration[0], slice(WARM_UP, None)), source=str(calibration[0]))
    console.print(
        f"rates of {calibration[0].name}: a step of decoding {rates.engine.step_s * 1e3:.3g} ms and "
        f"{rates.engine.sequence_s * 1e6:.3g} us a sequence, a prompt's token {rates.engine.prompt_token_s * 1e6:.3g} us "
        f"(waves within {rates.engine_error:.0%}), an answer of the environment {rates.environment_s:.3g} s, a token of the "
        f"learner {rates.learner.token_s * 1e6:.3g} us"
        + ("" if stream is None else f", with a stream {stream.token_s * 1e6:.3g} us ({calibration[1].name})")
    )
    table = Table(title="steps an hour")
    for column in ("run", "prompts", "samples", "max_staleness", "measured", "predicted", "error"):
        table.add_column(column, justify="left" if column == "run" else "right")
    found = [predict(folder, rates, stream, lengths, sigma) for folder in runs]
    for each in found:
        numbers = each.schedule.batch_size, each.num_samples, each.schedule.max_staleness
        rate = (f"{3600 / seconds:,.0f}" for seconds in (each.measured_s, each.predicted_s))
        table.add_row(each.name, *map(str, numbers), *rate, f"{each.error:+.1%}")
    console.print(table)
    return all(abs(each.error) <= TOLERANCE for each in found)


def measure(root: Path, args: argparse.Namespace) -> None:
    """Makes the runs that are not there yet, one after the other, each in a folder of its own."""
    os.environ["SLEEP"] = f"{args.median_s} {args.sigma}"
    for name, (prompts, max_staleness) in {**CALIBRATION, **PREDICTED}.items():
        folder = root / name
        if (folder / "complete.json").exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        words = ["--steps", args.steps, "--prompts", prompts, "--samples", args.samples]
        config = asynchronous.make_config(
            folder, asynchronous.parse([str(word) for word in words]), max_staleness=max_staleness, num_threads=1
        )
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            train(config)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, metavar="FOLDER", help="make the runs, then compare them")
    parser.add_argument("--steps", type=int, default=16, help="of each run that is made")
    parser.add_argument("--samples", type=int, default=8, help="of a prompt, in the runs that are made")
    parser.add_argument("--median-s", type=float, default=0.3, help="of what an environment sleeps there")
    parser.add_argument("--sigma", type=float, default=0.5, help="of its logarithm")
    parser.add_argument("--calibrate", type=Path, nargs="+", metavar="RUN", default=[], help="SERIAL [STREAM]")
    parser.add_argument("--compare", type=Path, nargs="+", metavar="RUN", default=[])
    parser.add_argument("--gpus", type=int, nargs="+", default=[], help="simulate so many, with no run to compare")
    parser.add_argument("--lengths", default="", metavar="RUN_OR_FILE", help="of the samples there")
    parser.add_argument("--check", action="store_true", help="exit with status 1 where a prediction is off by more")
    args = parser.parse_args(arguments)
    for count in args.gpus:
        print(
            f"{count} GPUs\n\n{make_scale_tables.schedule_table(make_scale_tables.lengths_of(args.lengths), count)}\n"
        )
    if args.gpus:
        return 0
    calibration, runs = list(args.calibrate), list(args.compare)
    if args.measure:
        measure(args.measure, args)
        calibration = calibration or [args.measure / name for name in CALIBRATION]
        runs = runs or [args.measure / name for name in PREDICTED]
    if not calibration or not runs:
        parser.error("--compare needs the runs of --calibrate, or --measure makes both")
    met = compare(calibration, runs, args.sigma, Console(width=120))
    return int(args.check and not met)


if __name__ == "__main__":
    sys.exit(main())
