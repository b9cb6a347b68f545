"""Whether a model learns that `skyrl-serve` serves: its reward while the cookbook's own recipe trains it to add two numbers.

    python scripts/bench/serve_learns.py                        # SmolLM2 135M, at most 20 minutes
    python scripts/bench/serve_learns.py --steps 3 --at-least -1 model.path=...

The recipe is `tinker_cookbook.recipes.math_rl.train env=arithmetic`, unmodified, in the environment of
`scripts/client_env.sh cookbook`. It gives a sample 1 for the right sum, and takes 0.1 where it does not end within
`--max-tokens`. The exit status is 1 where the mean of the last steps is not `--at-least` above that of the first ones.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness

from tests.support.served_command import SERVED_AS, Command, client_environment, place_tokenizer

FIRST, LAST = 3, 10
"""Steps over which rewards are averaged."""


def main(words: Sequence[str]) -> int:
    """Serve, train, and print one row."""
    parser = harness.arguments(__doc__)
    parser.add_argument("settings", nargs="*", default=["model=smollm2_135m"], metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=100, help="at most; the recipe has 100")
    parser.add_argument("--time-limit-s", type=float, default=1200.0, help="after which the recipe is ended")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--max-tokens", type=int, default=5)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--at-least", type=float, default=0.3, help="that the reward must rise")
    args = parser.parse_intermixed_args(words)
    with tempfile.TemporaryDirectory() as name:
        rewards, seconds, of_server, of_client = _trained(Path(name), args)
    first, last = statistics.fmean(rewards[:FIRST]), statistics.fmean(rewards[-LAST:])
    title = f"{args.groups} groups of {args.group_size}, learning rate {args.learning_rate:g}, rank {args.rank}"
    columns = ["steps", f"reward of the first {FIRST}", f"of the last {LAST}", "rise", "seconds"]
    table = harness.Table(*columns, "CPU s of the server", "CPU s of the client", title=title)
    rise = last - first
    table.row(
        len(rewards),
        f"{first:.3f}",
        f"{last:.3f}",
        f"{rise:+.3f}",
        *(f"{each:.0f}" for each in (seconds, of_server, of_client)),
    )
    return int(rise < args.at_least)


def _trained(folder: Path, args: Any) -> tuple[list[float], float, float, float]:
    """Return the mean reward of each step, seconds of the recipe, and CPU seconds of the server and of the recipe."""
    from skyrl_train import load_config
    from skyrl_train.model import resolve_model_path

    python = _python()
    place_tokenizer(folder, resolve_model_path(load_config(*args.settings).model.path))
    before = _cpu_s()
    command = Command(folder / "served", "--name", SERVED_AS, *args.settings)
    try:
        began = time.monotonic()
        status = _recipe(python, command, folder, args)
        seconds = time.monotonic() - began
        of_client = _cpu_s() - before
    finally:
        command.stop()
    said = (folder / "recipe.log").read_text(errors="replace")
    if status:
        raise harness.MeasurementError(said[-3000:])
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().split("\n")[:-1]]
    rewards = [record["env/all/reward/total"] for record in records if "env/all/reward/total" in record]
    for step, reward in enumerate(rewards):
        harness.log({"step": step, "reward": reward})
    return rewards, seconds, _cpu_s() - before - of_client, of_client


def _recipe(python: str, command: Command, folder: Path, args: Any) -> int:
    """Run the recipe until it ends or its time is over; return its exit status, 0 where its time was over."""
    settings = {
        "env": "arithmetic",
        "loss_fn": "importance_sampling",
        "model_name": SERVED_AS,
        "log_path": folder / "run",
        "group_size": args.group_size,
        "groups_per_batch": args.groups,
        "max_tokens": args.max_tokens,
        "learning_rate": args.learning_rate,
        "lora_rank": args.rank,
        "max_steps": args.steps,
        "eval_every": 0,
        "save_every": 0,
    }
    words = [
        python,
        "-m",
        "tinker_cookbook.recipes.math_rl.train",
        *(f"{key}={value}" for key, value in settings.items()),
    ]
    with (folder / "recipe.log").open("wb") as log:
        recipe = subprocess.Popen(words, cwd=folder, env=client_environment(command), stdout=log, stderr=log)
        try:
            return recipe.wait(args.time_limit_s)
        except subprocess.TimeoutExpired:
            recipe.kill()
            recipe.wait()
            return 0


def _python() -> str:
    """Return the interpreter of the cookbook's environment, which is made where there is none."""
    script = harness.ROOT / "scripts" / "client_env.sh"
    environment = {**os.environ, "SKYRL_TRAIN_PYTHON": sys.executable}
    made = subprocess.run([script, "cookbook"], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return made.stdout.strip().splitlines()[-1]


def _cpu_s() -> float:
    """Return the CPU seconds of processes of this one that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    harness.run(main)
