"""Whole steps of GRPO beside TRL's: rollouts, rewards, scoring, update and weight sync, each trainer with its own code.

    python scripts/bench/step.py        # both turns, three seeds; TRL as `update.py peers` installs it
    python scripts/bench/step.py --at trl=FOLDER --turns 1 --seeds 0 --steps 4 --trainers "ours;trl"

A step is 32 prompts of the bundled word problems, 8 samples each, at most 64 tokens a turn, and two optimizer steps of half
the batch; bundled model, float32, one thread. Both sample from the model alone (temperature 1, no truncation), take GRPO's
advantages (a group's mean and deviation), clip at 0.2, average over the batch's tokens and step with AdamW at 5e-5. With two
turns a wrong answer is told so and tried again for half the reward. Ours is `python -m skyrl_train.main`, with its logs,
metrics and rollout files; TRL's is an unmodified GRPOTrainer (`step_trl.py`) that logs numbers and saves nothing.

What differs: the order of prompts (each trainer's own shuffle), random numbers of samples, and the clock's end: ours counts
what the step's record and rollout file cost. The first step's mean reward and lengths are printed, which must be near each
other. CPU seconds are of the process and its children between the ends of two steps, medians over all but the first; both
trainers run in turn. Seconds to a reward are from the first step's start, imports and loading left out, to the end of the
first step whose 256 rollouts average so much.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import harness
from update_peers import package_folders

PROMPTS, SAMPLES, MOST_TOKENS, LEARNING_RATE = 32, 8, 64, 5e-5
CLOCK = "SKYRL_TRAIN_BENCH_CLOCK"
"""The variable that names the file of the clock."""
TRAINERS = {
    "ours": ("ours", ()),
    "trl": ("trl", ()),
    "ours, vLLM": ("ours", ("generator=vllm",)),
    "trl, vLLM": ("trl", ("vllm",)),
}
Outcome = list[dict[str, float]]
"""A line for each step: CPU and wall seconds since the start, the mean reward, tokens sampled for each trajectory."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--trainers", default="ours;trl;ours, vLLM;trl, vLLM", help="separated by semicolons")
    parser.add_argument("--turns", default="1,2")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--reward", type=float, default=0.6)
    parser.add_argument("--at", action="append", default=[], metavar="PACKAGE=FOLDER", help="where TRL is installed")
    args = parser.parse_args(argv)
    trl = package_folders(args.at).get("trl", "")
    for turns in map(int, args.turns.split(",")):
        measure = partial(run, turns=turns, steps=args.steps, trl=trl)
        found, failed = harness.in_turns(args.trainers.split(";"), map(int, args.seeds.split(",")), measure)
        report(turns, found, goal=args.reward)
        for name, reason in failed.items():
            print(f"{name}: {reason}")


def report(turns: int, found: dict[str, list[Outcome]], *, goal: float) -> None:
    """Print a table; ratios are to the trainer beside which ours stands: TRL with the same engine."""
    table = harness.Table(
        *("", "CPU s a step", "wall s a step", "first reward", "tokens", f"CPU s to reward {goal}"),
        title=f"{turns} turn{'s' if turns > 1 else ''}",
    )
    for name, outcomes in found.items():
        base = found.get(name.replace("ours", "trl"), []) if name.startswith("ours") else []
        seconds = {key: _step_of(outcomes, key) for key in ("cpu", "wall")}
        ratios = {key: f" {_step_of(base, key) / own:.1f}x" if base else "" for key, own in seconds.items()}
        reached = [_seconds_to(goal, each) for each in outcomes]
        table.row(
            name,
            *(f"{own:.2f}{ratios[key]}" for key, own in seconds.items()),
            f"{statistics.mean(each[0]['reward'] for each in outcomes):.3f}",
            f"{statistics.mean(each[0]['tokens'] for each in outcomes):.1f}",
            ", ".join("not reached" if each is None else f"{each:.0f} (step {step})" for each, step in reached),
        )


def _step_of(outcomes: Sequence[Outcome], key: str) -> float:
    """Median seconds of a step, over all steps of all runs but the first of each."""
    return statistics.median(
        after[key] - before[key] for outcome in outcomes for before, after in itertools.pairwise(outcome)
    )


def _seconds_to(goal: float, outcome: Outcome) -> tuple[float | None, int]:
    for number, line in enumerate(outcome):
        if line["reward"] >= goal:
            return line["cpu"], number + 1
    return None, len(outcome)


def run(name: str, seed: int, *, turns: int, steps: int, trl: str) -> Outcome:
    """The steps of one run in a process of its own. Raises MeasurementError."""
    trainer, further = TRAINERS[name]
    with tempfile.TemporaryDirectory(prefix="bench-step-") as place:
        folder, records = Path(place) / "run", list[dict[str, Any]]()
        clock = Path(place) / "clock.jsonl"
        packages = [str(harness.FOLDER)]
        if trainer == "trl":
            command = [harness.FOLDER / "step_trl.py", str(turns), str(seed), str(steps), *further]
            harness.apart(command, packages=[trl, *packages], **{CLOCK: str(clock)})
        else:
            settings = [*_our_settings(turns, seed, steps), *further]
            records = harness.trained(folder, *settings, packages=packages, **{CLOCK: str(clock)})
        start, *ticks = (json.loads(line) for line in clock.read_text(encoding="utf-8").splitlines())
    facts = map(_our_facts, records) if records else [{}] * len(ticks)
    since = [{key: tick[key] - start[key] for key in ("cpu", "wall")} for tick in ticks]
    found = [{**fact, **tick, **own} for fact, tick, own in zip(facts, ticks, since)]
    harness.log({"trainer": name, "turns": turns, "seed": seed, "steps": found})
    return found


def _our_settings(turns: int, seed: int, steps: int) -> list[str]:
    return [
        "platform=cpu",
        f"seed={seed}",
        f"generator.max_turns={turns}",
        f"trainer.total_steps={steps}",
        f"trainer.train_batch_size={PROMPTS}",
        f"generator.n_samples_per_prompt={SAMPLES}",
        f"generator.sampling.max_generate_length={MOST_TOKENS}",
        f"trainer.policy.optimizer.lr={LEARNING_RATE}",
        "trainer.policy.optimizer.weight_decay=0",
        "trainer.eval_before_train=false",
        "trainer.eval_interval=0",
        "data.validation=[]",
        "trainer.ckpt_interval=0",
        "trainer.export_hf=false",
        "trainer.callbacks=[step:tick_on_event]",
    ]


def _our_facts(record: dict[str, Any]) -> dict[str, float]:
    return {"reward": record["reward/mean"], "tokens": record["response_length/mean"]}


def tick_on_event(event: Any) -> None:
    """A callback of our trainer: notes CPU and wall seconds as it starts and after each step."""
    if event.kind in ("start", "step"):
        tick()


def tick(**facts: float) -> None:
    """Add a line to the clock's file: seconds of this process and its children until now."""
    import psutil  # type: ignore[import-untyped]

    own = psutil.Process()
    each = [own.cpu_times(), *(child.cpu_times() for child in own.children(recursive=True))]
    cpu = sum(times.user + times.system for times in each) + each[0].children_user + each[0].children_system
    with open(os.environ[CLOCK], "a", encoding="utf-8") as file:
        file.write(json.dumps({"cpu": cpu, "wall": time.time(), **facts}) + "\n")


if __name__ == "__main__":
    harness.run(main)
