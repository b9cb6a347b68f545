"""Measures what rollouts that are made while the learner updates are worth, on the bundled model and problems.

    python scripts/bench/asynchronous.py --check
    python scripts/bench/asynchronous.py --steps 4 --prompts 4 --parts speed      # smaller, quicker

Each turn of an environment sleeps for a time that is drawn log-normally (`--median-s`, `--sigma`) by row, answer and
turn. Runs are made one after the other:

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
import math
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import harness

from skyrl_train.plan import PhaseTimes, measured_phases
from skyrl_train.rollout.envs import WordProblemsEnv
from skyrl_train.system import derive_seed
from skyrl_train.telemetry.records import Line, read_timeline

GOAL = 1.6
"""Steps an hour of a stream, in those of a serial run."""
LEAST_WAITING = 0.5
"""Of the serial step."""
LEARNING_DEADLINE_S = 1800.0


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
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        settings = [f"trainer.total_steps={args.steps}", f"platform.num_threads={num_threads}", "data.validation=[]"]
        records = train(folder, args, *settings, max_staleness=max_staleness, sleeps=sleeps)[args.warm_up :]
        lines = read_timeline(folder / "timeline.jsonl")
        if sleeps and args.timelines:
            args.timelines.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / "timeline.png", args.timelines / f"timeline_{name}.png")
    waited_s = sum(idle_seconds(line) for line in lines if line.step in {record["step"] for record in records})
    return Run(
        name=name,
        num_threads=num_threads,
        phases=measured_phases(records),
        step_s=statistics.fmean(record["timing/step"] for record in records),
        waiting=waited_s / sum(record["timing/step"] for record in records),
    )


def train(
    folder: Path, args: argparse.Namespace, *settings: str, max_staleness: int, sleeps: bool = True
) -> list[dict[str, Any]]:
    """The metrics of a run that makes no checkpoint and no export, and evaluates at its end alone."""
    return harness.trained(
        folder,
        *("platform=cpu", "tracker.console.enabled=false", "trainer.layout=padded"),
        f"trainer.train_batch_size={args.prompts}",
        f"trainer.policy_mini_batch_size={args.prompts}",
        f"trainer.critic_mini_batch_size={args.prompts}",
        f"trainer.max_staleness={max_staleness}",
        *("trainer.eval_before_train=false", "trainer.ckpt_interval=0", "trainer.export_hf=false"),
        f"environment.env_class={Path(__file__).stem}:SleepyEnv",
        *("environment.isolation=thread", f"environment.num_workers={2 * args.prompts * args.samples}"),
        f"generator.n_samples_per_prompt={args.samples}",
        *settings,
        experiment="",
        packages=[str(harness.FOLDER)],
        SLEEP=f"{args.median_s if sleeps else 0.0} {args.sigma}",
    )


def idle_seconds(line: Line) -> float:
    """Seconds in which the learner waited for rollouts while the engine computed nothing."""
    waits = [(begin, end) for name, begin, end in line.learner if name == "generate"]
    computed = sum(max(0.0, min(end, e) - max(begin, b)) for begin, end in waits for b, e in line.engine)
    return sum(end - begin for begin, end in waits) - computed


def compare_learning(args: argparse.Namespace) -> bool:
    """Prints what both kinds learnt from each seed; whether the means differ by no more than noise."""
    seeds = range(1, args.seeds + 1)

    def learnt(case: tuple[int, int]) -> float:
        """With sleep; the accuracy on the held-out problems after the last step."""
        max_staleness, seed = case
        settings = [f"trainer.total_steps={args.learning_steps}", f"trainer.policy.optimizer.lr={args.lr}"]
        with tempfile.TemporaryDirectory() as place:
            settings += [f"seed={seed}", "platform.num_threads=1"]
            records = train(Path(place) / "run", args, *settings, max_staleness=max_staleness)
        return float(records[-1]["eval/accuracy_first_turn"])

    cases = list(product((0, 1), seeds))
    with ThreadPoolExecutor(len(cases)) as pool:
        accuracies = dict(zip(cases, pool.map(learnt, cases)))
    found = {max_staleness: [accuracies[max_staleness, seed] for seed in seeds] for max_staleness in (0, 1)}
    table = harness.Table(
        *("run", *(f"seed {seed}" for seed in seeds), "mean", "deviation"),
        title=f"held-out accuracy, first turn, after {args.learning_steps} steps",
    )
    for name, values in zip(("serial", "stream"), found.values()):
        table.row(name, *(f"{each:.3f}" for each in (*values, statistics.fmean(values), statistics.stdev(values))))
    difference = statistics.fmean(found[1]) - statistics.fmean(found[0])
    error = math.sqrt(sum(statistics.variance(values) / len(values) for values in found.values()))
    print(f"stream - serial: {difference:+.3f}, standard error {error:.3f}")
    return abs(difference) <= 2 * error


def compare_speed(args: argparse.Namespace, *, sleeps: bool) -> bool:
    """Prints the table of one workload; whether the goals of the one that sleeps are met."""
    serial = [measure("serial", args, max_staleness=0, num_threads=count, sleeps=sleeps) for count in (1, 2)]
    stream = measure("stream", args, max_staleness=1, num_threads=1, sleeps=sleeps)
    best = min(serial, key=lambda run: run.step_s)
    kind = f"sleeps of median {args.median_s:g} s, sigma {args.sigma:g}" if sleeps else "no sleep"
    table = harness.Table(
        *("run", "threads", "step", "steps an hour", "waiting", "engine", "learner"),
        title=f"{args.prompts} prompts x {args.samples} samples, {kind}",
    )
    for run in (*serial, stream):
        seconds = (f"{each:.2f} s" for each in (run.phases.engine_s, run.phases.learner_s + run.phases.sync_s))
        rate = f"{3600 / run.step_s:.0f}"
        table.row(run.name, run.num_threads, f"{run.step_s:.2f} s", rate, f"{run.waiting:.0%}", *seconds)
    ratio = best.step_s / stream.step_s
    print(f"stream / serial: {ratio:.2f}; planned from the serial run: {best.phases.step_s(1):.2f} s a step")
    return best.waiting >= LEAST_WAITING and ratio >= GOAL


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    parser = harness.arguments(__doc__)
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
    args = parser.parse_args(argv)
    met = True
    if "speed" in args.parts:
        met = compare_speed(args, sleeps=True)
        compare_speed(args, sleeps=False)
    if "learning" in args.parts:
        met = compare_learning(args) and met
    return int(args.check and not met)


if __name__ == "__main__":
    harness.run(main)
