"""Simulates serial and asynchronous schedules, and holds the simulation against runs that were made.

    python -m scripts.studies.simulate_schedule --measure outputs/schedules --check     # makes short runs, then compares
    python -m scripts.studies.simulate_schedule --calibrate SERIAL --calibrate-stream STREAM --compare RUN RUN
    python -m scripts.studies.simulate_schedule --gpus 8 64 512 --lengths outputs/RUN

**Against runs.** Rates of engine, environments and learner, and the lengths of samples, come from `--calibrate`: serial
runs with `generator=hf`. For streams, `--calibrate-stream` gives the learner's time for a token and by how much the engine
is slower beside it, since they share an interpreter there. Batch, samples and `max_staleness` of each `--compare`d run come
from its config.yaml, and nothing else of it is read before the prediction. The shape of environments' latencies is stated
(`--sigma`), their mean is measured.

`--measure` makes runs of the bundled model whose environments sleep (`bench/asynchronous.py`), two to calibrate and four to
predict, each kind once in each of `--rounds`, with a seed of its own, so that whatever else the machine does falls on all
kinds alike. Rates and measured steps are medians over the rounds: one that others held up does not decide. `--check` ends
with status 1 where a prediction is off by more than 15 %.

**At scale.** `--gpus` prints steps of 7B to 70B, serial and asynchronous, on so many GPUs whose rates follow from data
sheets (`make_scale_tables.py`). Lengths come from a run's rollouts, from the lines of a file with `question` and `answer`
(GSM8K's), or from the stated long-tailed distribution.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from scripts.studies import make_scale_tables
from scripts.studies.simulated_runs import (
    Latency,
    Lengths,
    RunRates,
    learner_rates,
    recorded_lengths,
    rollouts_of,
    run_rates,
)
from scripts.studies.simulation import LearnerRates, Schedule, Simulated, simulate
from skyrl_train.plan.forms import EngineRates
from skyrl_train.telemetry import read_metrics

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))
import asynchronous
import harness

Rates = TypeVar("Rates", EngineRates, LearnerRates)
TOLERANCE = 0.15
WARM_UP = 2
"""Steps of each run that are left out, of the simulated ones too."""
SEEDS = 20
"""Simulations whose mean is the prediction."""
MOST_SLOWDOWN = 8.0
"""Of an engine beside a learner."""
CALIBRATION, CALIBRATION_STREAM = {"calibrate_serial": (16, 0)}, {"calibrate_stream": (16, 1)}
PREDICTED = {"serial_8": (8, 0), "serial_24": (24, 0), "stream_24": (24, 1), "stream_8": (8, 2)}
"""Prompts and `max_staleness` by name."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Runs that are alike, beside what was said of them."""

    name: str
    schedule: Schedule
    num_samples: int
    measured_s: float
    """Of a step, in the mean; the median over the runs."""
    predicted_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is simulated with, whatever the batch and the staleness."""

    rates: RunRates
    lengths: Lengths
    sigma: float
    """Of the logarithm of what an environment takes."""

    def simulate(self, folder: Path) -> list[Simulated]:
        """Return what comes of the configuration in `folder`, which nothing else is read of. Raises OSError, KeyError."""
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        latency = Latency.of_mean(self.rates.environment_s, self.sigma)
        samples = config["generator"]["n_samples_per_prompt"]
        return [
            simulate(
                schedule_of(config),
                engine=self.rates.engine,
                learner=self.rates.learner,
                make_group=self.lengths.groups(samples=samples, seed=seed, latency=latency),
                num_steps=config["trainer"]["total_steps"],
            )
            for seed in range(SEEDS)
        ]


def schedule_of(config: Mapping[str, Any]) -> Schedule:
    """Return the schedule of a run by its config.yaml. Raises KeyError."""
    names = ("max_staleness", "stale_groups", "take_groups", "oversample")
    return Schedule(
        batch_size=config["trainer"]["train_batch_size"], **{name: config["trainer"][name] for name in names}
    )


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a run's steps, the first ones left out."""
    return [record for record in read_metrics(folder / "metrics.jsonl") if "timing/step" in record][WARM_UP:]


def predict(name: str, folders: Sequence[Path], known: Known) -> Prediction:
    """Simulates the runs of `folders`, which are alike, by their configuration. Raises OSError, KeyError, DataError."""
    config = yaml.safe_load((folders[0] / "config.yaml").read_text(encoding="utf-8"))
    measured = [statistics.fmean(record["timing/step"] for record in steps_of(folder)) for folder in folders]
    return Prediction(
        name=name,
        schedule=schedule_of(config),
        num_samples=config["generator"]["n_samples_per_prompt"],
        measured_s=statistics.median(measured),
        predicted_s=statistics.fmean(each.mean_step_s(WARM_UP) for each in known.simulate(folders[0])),
    )


def serial_rates(folders: Sequence[Path]) -> RunRates:
    """The median of each rate over serial runs."""
    found = [run_rates(folder, warm_up=WARM_UP) for folder in folders]
    return RunRates(
        engine=median_of([each.engine for each in found]),
        learner=median_of([each.learner for each in found]),
        environment_s=statistics.median(each.environment_s for each in found),
        engine_error=statistics.median(each.engine_error for each in found),
    )


def stream_rates(folders: Sequence[Path], known: Known) -> tuple[RunRates, float]:
    """The rates of engine and learner beside each other, and by how much the engine is slower there: as much as makes a
    simulation of these runs find it busy for the share of the time that it was."""
    learner = median_of([learner_rates(folder, warm_up=WARM_UP) for folder in folders])
    learner = replace(learner, sync_s=known.rates.learner.sync_s)  # theirs hold the wait for the engine
    busy = statistics.median(
        sum(record["timing/engine/busy"] for record in steps) / sum(record["timing/step"] for record in steps)
        for steps in map(steps_of, folders)
    )
    low, high = 1.0, MOST_SLOWDOWN
    while high - low > 0.02:
        factor = (low + high) / 2
        rates = replace(known.rates, engine=scaled(known.rates.engine, factor), learner=learner)
        simulated = replace(known, rates=rates).simulate(folders[0])
        is_less = statistics.fmean(each.engine_busy for each in simulated) < busy
        low, high = (factor, high) if is_less else (low, factor)
    return replace(known.rates, engine=scaled(known.rates.engine, low), learner=learner), low


def scaled(engine: EngineRates, factor: float) -> EngineRates:
    """An engine that takes so many times as long for everything."""
    names = [each.name for each in fields(engine) if isinstance(getattr(engine, each.name), float)]
    return replace(engine, **{name: factor * getattr(engine, name) for name in names})


def median_of(rates: Sequence[Rates]) -> Rates:
    """The median of each number of the same rates."""
    names = [each.name for each in fields(rates[0]) if isinstance(getattr(rates[0], each.name), float)]
    return replace(rates[0], **{name: statistics.median(getattr(each, name) for each in rates) for name in names})


def compare(
    calibration: Sequence[Path],
    calibration_stream: Sequence[Path],
    runs: Mapping[str, Sequence[Path]],
    sigma: float,
) -> bool:
    """Prints measured and predicted steps an hour; whether all are within the tolerance."""
    rates = serial_rates(calibration)
    rollouts = [batch for folder in calibration for batch in rollouts_of(folder, slice(WARM_UP, None))]
    lengths = recorded_lengths(rollouts, source=", ".join(map(str, calibration)))
    serial = stream = Known(rates=rates, lengths=lengths, sigma=sigma)
    print(
        f"rates of {len(calibration)} serial runs: a step of decoding {rates.engine.step_s * 1e3:.3g} ms and "
        f"{rates.engine.sequence_s * 1e6:.3g} us a sequence, a prompt's token {rates.engine.prompt_token_s * 1e6:.3g} us "
        f"(waves within {rates.engine_error:.0%}), an answer of the environment {rates.environment_s:.3g} s, a token of the "
        f"learner {rates.learner.token_s * 1e6:.3g} us"
    )
    if calibration_stream:
        beside, factor = stream_rates(calibration_stream, serial)
        stream = replace(serial, rates=beside)
        print(
            f"rates of {len(calibration_stream)} runs with a stream: the engine takes {factor:.2f} times as long, a token "
            f"of the learner {beside.learner.token_s * 1e6:.3g} us"
        )
    columns = ("run", "prompts", "samples", "max_staleness", "measured", "predicted", "error")
    table, found = harness.Table(*columns, title="steps an hour"), []
    for name, folders in runs.items():
        config = yaml.safe_load((folders[0] / "config.yaml").read_text(encoding="utf-8"))
        each = predict(name, folders, stream if config["trainer"]["max_staleness"] else serial)
        numbers = each.schedule.batch_size, each.num_samples, each.schedule.max_staleness
        rate = (f"{3600 / seconds:,.0f}" for seconds in (each.measured_s, each.predicted_s))
        table.row(each.name, *numbers, *rate, f"{each.error:+.1%}")
        found.append(each)
    return all(abs(each.error) <= TOLERANCE for each in found)


def measure(root: Path, args: argparse.Namespace) -> None:
    """Makes the runs that are not there yet, one after the other, each in a folder of its own."""
    kinds = {**CALIBRATION, **CALIBRATION_STREAM, **PREDICTED}
    for number, (name, (prompts, max_staleness)) in itertools.product(range(args.rounds), kinds.items()):
        args.prompts = prompts
        settings = [f"trainer.total_steps={args.steps}", f"seed={number}", "platform.num_threads=1"]
        folder = root / f"round_{number}" / name
        asynchronous.train(folder, args, *settings, "data.validation=[]", max_staleness=max_staleness)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--measure", type=Path, metavar="FOLDER", help="make the runs, then compare them")
    parser.add_argument("--rounds", type=int, default=3, help="in each of which each kind of run is made once")
    parser.add_argument("--steps", type=int, default=12, help="of each run that is made")
    parser.add_argument("--samples", type=int, default=8, help="of a prompt, in the runs that are made")
    parser.add_argument("--median-s", type=float, default=0.3, help="of what an environment sleeps there")
    parser.add_argument("--sigma", type=float, default=0.5, help="of its logarithm")
    parser.add_argument("--calibrate", type=Path, nargs="+", metavar="RUN", default=[], help="serial runs")
    parser.add_argument("--calibrate-stream", type=Path, nargs="+", metavar="RUN", default=[], help="with a stream")
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
    calibration, streams = args.calibrate, args.calibrate_stream
    runs = {folder.name: [folder] for folder in args.compare}
    if args.measure:
        measure(args.measure, args)
        rounds = [args.measure / f"round_{number}" for number in range(args.rounds)]
        calibration = [folder / name for folder in rounds for name in CALIBRATION]
        streams = [folder / name for folder in rounds for name in CALIBRATION_STREAM]
        runs = {name: [folder / name for folder in rounds] for name in PREDICTED}
    if not calibration or not runs:
        parser.error("--compare needs the runs of --calibrate, or --measure makes both")
    met = compare(calibration, streams, runs, args.sigma)
    return int(args.check and not met)


if __name__ == "__main__":
    harness.run(main)
