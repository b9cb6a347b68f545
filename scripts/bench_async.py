"""Measures what rollouts that are made while the learner updates are worth, on the bundled model and problems.

    python scripts/bench_async.py
    python scripts/bench_async.py --steps 4 --prompts 4      # smaller, quicker

Each turn of an environment sleeps for a time that is drawn log-normally (`--median-s`, `--sigma`) by row, answer and
turn. Runs are made one after the other in this process:

    serial    trainer.max_staleness=0 with one and with two threads; the faster one counts
    stream    trainer.max_staleness=1 with one thread, so that generation and update have a core each

The same is then done without sleep, where both sides want the cores at once: there is little to gain there, and no goal. The
first steps are left out. What is compared is steps an hour; what the two learn is not measured here.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from skyrl_train.config.schema import Config
from skyrl_train.rollout.envs.word_problems import WordProblemsEnv
from skyrl_train.runs.rl import train
from skyrl_train.seeding import derive_seed
from skyrl_train.telemetry.metrics_log import read_metrics


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
    step_s: float
    """Mean wall time of a step."""
    idle: float
    """1 - CPU seconds / wall seconds of the whole run: sleep, and on a busy machine the wait for a core."""


def measure(name: str, args: argparse.Namespace, *, max_staleness: int, num_threads: int, sleeps: bool) -> Run:
    """Trains for `--steps` steps."""
    os.environ["SLEEP"] = f"{args.median_s if sleeps else 0.0} {args.sigma}"
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        cpu_s, wall_s = time.process_time(), time.monotonic()
        with contextlib.redirect_stdout(nowhere):
            train(make_config(Path(folder), args, max_staleness=max_staleness, num_threads=num_threads))
        cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
        records = read_metrics(Path(folder) / "metrics.jsonl")[args.warm_up :]
    mean_s = math.fsum(record["timing/step"] for record in records) / len(records)
    return Run(name=name, num_threads=num_threads, step_s=mean_s, idle=max(0.0, 1 - cpu_s / wall_s))


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
    parser.add_argument("--steps", type=int, default=10, help="of each run")
    parser.add_argument("--warm-up", type=int, default=2, help="steps of each run that are left out")
    parser.add_argument("--prompts", type=int, default=8, help="of a step")
    parser.add_argument("--samples", type=int, default=4, help="of a prompt")
    parser.add_argument("--median-s", type=float, default=0.5, help="of the time that a turn of an environment takes")
    parser.add_argument("--sigma", type=float, default=1.0, help="of its logarithm")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table."""
    args = parse(arguments)
    console = Console()
    for sleeps in (True, False):
        serial = [measure("serial", args, max_staleness=0, num_threads=count, sleeps=sleeps) for count in (1, 2)]
        stream = measure("stream", args, max_staleness=1, num_threads=1, sleeps=sleeps)
        best = min(serial, key=lambda run: run.step_s)
        kind = f"sleeps of median {args.median_s:g} s, sigma {args.sigma:g}" if sleeps else "no sleep"
        table = Table(title=f"{args.prompts} prompts x {args.samples} samples, {kind}")
        for column in ("run", "threads", "step", "steps an hour", "off the cores"):
            table.add_column(column, justify="left" if column == "run" else "right")
        for run in (*serial, stream):
            rate = 3600 / run.step_s
            table.add_row(run.name, str(run.num_threads), f"{run.step_s:.2f} s", f"{rate:.0f}", f"{run.idle:.0%}")
        console.print(table)
        console.print(f"stream / serial: {best.step_s / stream.step_s:.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
