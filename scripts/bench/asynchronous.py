"""Measures what rollouts that are made while the learner updates are worth, on the bundled model and problems.

    python scripts/bench/asynchronous.py --check
    python scripts/bench/asynchronous.py --steps 4 --prompts 4 --parts speed      # smaller, quicker

Each turn of an environment sleeps for a time that is drawn log-normally (`--median-s`, `--sigma`) by row, answer and
turn. Runs are made one after the other in this process:

    serial    trainer.max_staleness=0 with one and with two threads; the faster one counts
    stream    trainer.max_staleness=1 with one thread, so that generation and update have a core each

The same is then done without sleep, where both sides want the cores at once: there is little to gain there, and no goal. The
first steps are left out. Beside what was measured stands what a plan makes of the serial run's phases (`plan/time.py`).

What is learnt is then compared on `--seeds` seeds: `--learning-steps` steps of both kinds, with the same sleep, in processes
of their own, all at once, since they sleep most of the time, then the held-out problems. `--check` ends with
status 1 where less than half of the serial step is waiting, a stream makes less than 1.6 times its steps an hour, or the
difference of the mean accuracies is more than twice its standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from skyrl_train.config import Config
from skyrl_train.plan import PhaseTimes, measured_phases
from skyrl_train.rollout.envs import WordProblemsEnv
from skyrl_train.runs import train
from skyrl_train.system import derive_seed
from skyrl_train.telemetry import read_metrics
from skyrl_train.telemetry.records import Line, read_timeline

GOAL = 1.6
"""Steps an hour of a stream, in those of a serial run."""
LEAST_WAITING = 0.5
"""Of the serial step."""
LEARNING_TIMEOUT_S = 1800.0


class SleepyEnv(WordProblemsEnv):
    """The bundled environment, each of whose turns takes its time. Which, is in the environment variable SLEEP."""

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__(env_config, extras)
        self._row, self._turn = str(extras), 0
        self._median_s, self._sigma = map(float, os.environ["SLEEP"].split())

    def step(self, action: str) -> Mapping[str, Any]:
        """Sleeps, then scores."""
        # Samples of a row differ by what they answer, and so do their times.
        draw = random.Random(derive_seed(0, f"{self._row}{action}", self._turn))
        self._turn += 1
        if self._median_s:
            time.sleep(draw.lognormvariate(math.log(self._median_s), self._sigma))
        return super().step(action)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run, its first steps aside."""

    name: str
    num_threads: int
    phases: PhaseTimes
    step_s: float
    """Mean wall time of a step."""
    waiting: float
    """Share of it in which the learner waited for rollouts and the engine computed nothing."""


def measure(name: str, args: argparse.Namespace, *, max_staleness: int, num_threads: int, sleeps: bool) -> Run:
    """Trains for `--steps` steps."""
    os.environ["SLEEP"] = f"{args.median_s if sleeps else 0.0} {args.sigma}"
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        with contextlib.redirect_stdout(nowhere):
            train(make_config(Path(folder), args, max_staleness=max_staleness, num_threads=num_threads))
        records = read_metrics(Path(folder) / "metrics.jsonl")[args.warm_up :]
        lines = read_timeline(Path(folder) / "timeline.jsonl")
        if sleeps and args.timelines:
            args.timelines.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(folder) / "timeline.png", args.timelines / f"timeline_{name}.png")
    step_s = statistics.fmean(record["timing/step"] for record in records)
    waited_s = sum(idle_seconds(line) for line in lines if line.step in {record["step"] for record in records})
    return Run(
        name=name,
        num_threads=num_threads,
        phases=measured_phases(records),
        step_s=step_s,
        waiting=waited_s / sum(record["timing/step"] for record in records),
    )


def idle_seconds(line: Line) -> float:
    """Seconds in which the learner waited for rollouts while the engine computed nothing."""
    waits = [(begin, end) for name, begin, end in line.learner if name == "generate"]
    computed = sum(max(0.0, min(end, e) - max(begin, b)) for begin, end in waits for b, e in line.engine)
    return sum(end - begin for begin, end in waits) - computed


def learn(args: argparse.Namespace, *, seed: int, max_staleness: int) -> float:
    """Trains for `--learning-steps` steps with sleep; the accuracy on the held-out problems after the last one."""
    os.environ["SLEEP"] = f"{args.median_s} {args.sigma}"
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        config = make_config(Path(folder), args, max_staleness=max_staleness, num_threads=1)
        trainer = replace(config.trainer, total_steps=args.learning_steps)
        optimizer = replace(trainer.policy.optimizer, lr=args.lr)
        trainer = replace(trainer, policy=replace(trainer.policy, optimizer=optimizer))
        validation = replace(config.data, validation=("builtin:word_problems/validation",))
        with contextlib.redirect_stdout(nowhere):
            train(replace(config, seed=seed, trainer=trainer, data=validation))
        return float(read_metrics(Path(folder) / "metrics.jsonl")[-1]["eval/accuracy_first_turn"])


def compare_learning(args: argparse.Namespace, console: Console) -> bool:
    """Prints what both kinds learnt from each seed; whether the means differ by no more than noise."""
    words = [sys.executable, __file__, *sys.argv[1:]]
    started = {
        (max_staleness, seed): subprocess.Popen(
            [*words, f"--learn={max_staleness}", f"--seed={seed}"], stdout=subprocess.PIPE, text=True
        )
        for seed in range(1, args.seeds + 1)
        for max_staleness in (0, 1)
    }
    found: dict[int, list[float]] = {0: [], 1: []}
    for (max_staleness, _), process in started.items():
        printed, _ = process.communicate(timeout=LEARNING_TIMEOUT_S)
        if process.returncode:
            raise SystemExit(process.returncode)
        found[max_staleness].append(float(printed.split()[-1]))
    table = Table(title=f"held-out accuracy, first turn, after {args.learning_steps} steps")
    for column in ("run", *(f"seed {seed}" for seed in range(1, args.seeds + 1)), "mean", "deviation"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for name, values in zip(("serial", "stream"), found.values()):
        cells = [*values, statistics.fmean(values), statistics.stdev(values)]
        table.add_row(name, *(f"{value:.3f}" for value in cells))
    console.print(table)
    difference = statistics.fmean(found[1]) - statistics.fmean(found[0])
    error = math.sqrt(sum(statistics.variance(values) / len(values) for values in found.values()))
    console.print(f"stream - serial: {difference:+.3f}, standard error {error:.3f}")
    return abs(difference) <= 2 * error


def make_config(folder: Path, args: argparse.Namespace, *, max_staleness: int, num_threads: int) -> Config:
    """Steps alone: no evaluation, checkpoint or export."""
    config = Config(output_dir=str(folder))
    trainer = replace(
        config.trainer,
        total_steps=args.steps,
        train_batch_size=args.prompts,
        policy_mini_batch_size=args.prompts,
        critic_mini_batch_size=args.prompts,
        max_staleness=max_staleness,
        eval_before_train=False,
        ckpt_interval=0,
        export_hf=False,
    )
    environment = replace(
        config.environment,
        env_class=f"{Path(__file__).stem}:SleepyEnv",
        isolation="thread",
        num_workers=2 * args.prompts * args.samples,
    )
    return replace(
        config,
        platform=replace(config.platform, num_threads=num_threads),
        data=replace(config.data, validation=()),
        environment=environment,
        generator=replace(config.generator, n_samples_per_prompt=args.samples),
        trainer=trainer,
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="of each run that is timed")
    parser.add_argument("--warm-up", type=int, default=2, help="steps of each run that are left out")
    parser.add_argument("--prompts", type=int, default=8, help="of a step")
    parser.add_argument("--samples", type=int, default=4, help="of a prompt")
    parser.add_argument("--median-s", type=float, default=0.5, help="of the time that a turn of an environment takes")
    parser.add_argument("--sigma", type=float, default=1.0, help="of its logarithm")
    parser.add_argument("--parts", nargs="+", choices=("speed", "learning"), default=("speed", "learning"))
    parser.add_argument("--seeds", type=int, default=5, help="of what is learnt; two at least")
    parser.add_argument("--learning-steps", type=int, default=30, help="of each seed")
    parser.add_argument("--lr", type=float, default=2e-4, help="of what is learnt")
    parser.add_argument("--timelines", type=Path, help="a folder for pictures of what ran when, with sleep")
    parser.add_argument("--check", action="store_true", help="exit with status 1 where the goals are missed")
    parser.add_argument("--learn", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def compare_speed(args: argparse.Namespace, console: Console, *, sleeps: bool) -> bool:
    """Prints the table of one workload; whether the goals of the one that sleeps are met."""
    serial = [measure("serial", args, max_staleness=0, num_threads=count, sleeps=sleeps) for count in (1, 2)]
    stream = measure("stream", args, max_staleness=1, num_threads=1, sleeps=sleeps)
    best = min(serial, key=lambda run: run.step_s)
    kind = f"sleeps of median {args.median_s:g} s, sigma {args.sigma:g}" if sleeps else "no sleep"
    table = Table(title=f"{args.prompts} prompts x {args.samples} samples, {kind}")
    for column in ("run", "threads", "step", "steps an hour", "waiting", "engine", "learner"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for run in (*serial, stream):
        seconds = (f"{each:.2f} s" for each in (run.phases.engine_s, run.phases.learner_s + run.phases.sync_s))
        rate = f"{3600 / run.step_s:.0f}"
        table.add_row(run.name, str(run.num_threads), f"{run.step_s:.2f} s", rate, f"{run.waiting:.0%}", *seconds)
    console.print(table)
    ratio = best.step_s / stream.step_s
    console.print(f"stream / serial: {ratio:.2f}; planned from the serial run: {best.phases.step_s(1):.2f} s a step")
    return best.waiting >= LEAST_WAITING and ratio >= GOAL


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    args = parse(arguments)
    if args.learn is not None:
        print(learn(args, seed=args.seed, max_staleness=args.learn))
        return 0
    console = Console()
    met = True
    if "speed" in args.parts:
        met = compare_speed(args, console, sleeps=True)
        compare_speed(args, console, sleeps=False)
    if "learning" in args.parts:
        met = compare_learning(args, console) and met
    return int(args.check and not met)


if __name__ == "__main__":
    raise SystemExit(main())
