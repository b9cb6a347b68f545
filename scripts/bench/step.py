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

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "bench"))

from update_peers import package_folders  # noqa: E402

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", default="ours;trl;ours, vLLM;trl, vLLM", help="separated by semicolons")
    parser.add_argument("--turns", default="1,2")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--reward", type=float, default=0.6)
    parser.add_argument("--at", action="append", default=[], metavar="PACKAGE=FOLDER", help="where TRL is installed")
    parser.add_argument("--log", help="a file that each run's steps are added to, as JSON lines")
    args = parser.parse_args()
    for turns in map(int, args.turns.split(",")):
        found: dict[str, list[Outcome]] = {name: [] for name in args.trainers.split(";")}
        reasons: dict[str, str] = {}
        for seed in map(int, args.seeds.split(",")):
            for name in found:
                outcome = reasons.get(name) or run(name, turns=turns, seed=seed, steps=args.steps, at=args.at)
                if isinstance(outcome, str):
                    reasons[name] = outcome
                else:
                    found[name].append(outcome)
                    if args.log:
                        with open(args.log, "a", encoding="utf-8") as file:
                            line = {"trainer": name, "turns": turns, "seed": seed, "steps": outcome}
                            file.write(json.dumps(line) + "\n")
        report(turns, found, reasons, goal=args.reward)


def report(turns: int, found: dict[str, list[Outcome]], reasons: dict[str, str], *, goal: float) -> None:
    """Print a table; ratios are to the trainer beside which ours stands: TRL with the same engine."""
    print(f"\n{turns} turn{'s' if turns > 1 else ''}")
    print(
        f"{'':12} {'CPU s a step':>14} {'wall s a step':>14} {'first reward':>13} {'tokens':>7}  CPU s to reward {goal}"
    )
    for name, outcomes in found.items():
        if name in reasons:
            print(f"{name:12} {reasons[name]}")
            continue
        cells = [_step_of(outcomes, "cpu"), _step_of(outcomes, "wall")]
        base = found.get(name.replace("ours", "trl"), []) if name.startswith("ours") else []
        ratios = [f" {_step_of(base, key) / own:4.1f}x" if base else "" for key, own in zip(("cpu", "wall"), cells)]
        first = [statistics.mean(each[0][key] for each in outcomes) for key in ("reward", "tokens")]
        reached = [_seconds_to(goal, each) for each in outcomes]
        print(
            f"{name:12} {cells[0]:8.2f}{ratios[0]:>6} {cells[1]:8.2f}{ratios[1]:>6} {first[0]:13.3f} {first[1]:7.1f}  "
            + ", ".join("not reached" if each is None else f"{each:.0f} (step {step})" for each, step in reached),
            flush=True,
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


def run(name: str, *, turns: int, seed: int, steps: int, at: Sequence[str] = ()) -> Outcome | str:
    """The steps of one run in a process of its own, or why there are none."""
    trainer, further = TRAINERS[name]
    packages = package_folders(at)
    with tempfile.TemporaryDirectory(prefix="bench-step-") as folder:
        clock = Path(folder) / "clock.jsonl"
        environment = {
            **os.environ,
            CLOCK: str(clock),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": os.pathsep.join(
                filter(
                    None,
                    [
                        packages.get("trl", "") if trainer == "trl" else "",
                        str(ROOT / "scripts" / "bench"),
                        os.environ.get("PYTHONPATH", ""),
                    ],
                )
            ),
        }
        command = {
            "ours": [*_our_command(Path(folder) / "run", turns, seed, steps), *further],
            "trl": [sys.executable, str(ROOT / "scripts/bench/step_trl.py"), *map(str, (turns, seed, steps)), *further],
        }[trainer]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600, check=False
        )
        if done.returncode:
            lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
            return next((line for line in reversed(lines) if line.strip()), f"exit status {done.returncode}").strip()
        ticks = [json.loads(line) for line in clock.read_text(encoding="utf-8").splitlines()]
        start, ticks = ticks[0], ticks[1:]
        if trainer == "ours":
            records = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            ticks = [{**_our_facts(json.loads(record)), **tick} for record, tick in zip(records, ticks)]
        return [{**tick, "cpu": tick["cpu"] - start["cpu"], "wall": tick["wall"] - start["wall"]} for tick in ticks]


def _our_command(folder: Path, turns: int, seed: int, steps: int) -> list[str]:
    return [
        *(sys.executable, "-m", "skyrl_train.main", "+experiment=gsm8k_multiturn", "platform=cpu"),
        f"hydra.run.dir={folder}",
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
    main()
