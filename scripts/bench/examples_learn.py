"""How far an example's reward rises: `scripts/bench/examples_learn.py reward_function [--seeds 0 1 2] [KEY=VALUE ...]`.

Runs it once for each seed and prints the mean reward of its first and of its last steps, as `metrics.jsonl` has them, and
how long it took: by the clock, and in CPU time of all its processes, which other work does not lengthen as much.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {
    "curriculum": ("examples/curriculum/train.py", "seed={seed}", "output_dir={folder}/run"),
    "gymnasium_frozenlake": ("examples/gymnasium_frozenlake/train.py", "--seed={seed}", "--output={folder}"),
    "guess_number": ("examples/guess_number.py", "seed={seed}", "output_dir={folder}/run"),
    "reward_function": ("examples/reward_function.py", "seed={seed}", "output_dir={folder}/run"),
    "vlm_colours": ("examples/vlm_colours/train.py", "--seed={seed}", "--output={folder}"),
    "tools": ("examples/tools.py", "--seed={seed}", "--output={folder}"),
}
"""Programs and what they are told of a seed and a folder; the first may be given settings of a run, too."""
STEPS = 3
"""Over which a run's first and last rewards are averaged."""


def rewards_of(name: str, seed: int, overrides: list[str]) -> list[float]:
    """Return the mean reward of each step of one run."""
    with tempfile.TemporaryDirectory() as folder:
        program, *arguments = (part.format(seed=seed, folder=folder) for part in EXAMPLES[name])
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        command = [sys.executable, str(ROOT / program), *arguments, *overrides]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name}, seed {seed}, ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
        last = max(Path(folder).rglob("metrics.jsonl"), key=lambda file: file.stat().st_mtime)
        records = map(json.loads, last.read_text().splitlines())
        return [record["reward/mean"] for record in records if "reward/mean" in record]


def cpu_s() -> float:
    """Return the seconds of CPU that ended processes of this one took."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Print a line for each seed, and the mean of the rises."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(EXAMPLES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    rises = []
    for seed in args.seeds:
        started, cpu_before = time.monotonic(), cpu_s()
        rewards = rewards_of(args.name, seed, args.overrides)
        first, last = statistics.mean(rewards[:STEPS]), statistics.mean(rewards[-STEPS:])
        rises.append(last - first)
        took = f"{len(rewards)} steps, {time.monotonic() - started:.0f} s, {cpu_s() - cpu_before:.0f} s of CPU"
        sys.stdout.write(f"seed {seed}: first {first:.3f}, last {last:.3f}, rise {last - first:+.3f} ({took})\n")
        sys.stdout.flush()
    sys.stdout.write(f"mean rise {statistics.mean(rises):+.3f} over {len(rises)} seeds\n")


if __name__ == "__main__":
    main()
