"""How far an example's reward rises: `scripts/bench/examples_learn.py reward_function [--seeds 0 1 2] [KEY=VALUE ...]`.

Runs it once for each seed and prints the mean reward of its first and of its last steps, as `metrics.jsonl` has them, and
how long it took: by the clock, and in CPU time of all its processes, which other work does not lengthen as much.
"""

from __future__ import annotations

import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import harness

from skyrl_train.telemetry import read_metrics

EXAMPLES = {
    "curriculum": ("examples/curriculum/train.py", "seed={seed}", "output_dir={folder}/run"),
    "gymnasium_frozenlake": ("examples/gymnasium_frozenlake/train.py", "--seed={seed}", "--output={folder}"),
    "guess_number": ("examples/guess_number.py", "seed={seed}", "output_dir={folder}/run"),
    "reward_function": ("examples/reward_function.py", "seed={seed}", "output_dir={folder}/run"),
    "vlm_colours": ("examples/vlm_colours/train.py", "--seed={seed}", "--output={folder}"),
    "tools": ("examples/tools.py", "--seed={seed}", "--output={folder}"),
}
"""Programs and what they are told of a seed and a folder; the first may be given settings of a run, too."""
DEADLINE_S = 7200.0
STEPS = 3
"""Over which a run's first and last rewards are averaged."""


def rewards_of(name: str, seed: int, overrides: Sequence[str]) -> list[float]:
    """Return the mean reward of each step of one run."""
    with tempfile.TemporaryDirectory() as folder:
        program, *words = (part.format(seed=seed, folder=folder) for part in EXAMPLES[name])
        harness.apart([harness.ROOT / program, *words, *overrides], deadline_s=DEADLINE_S, cwd=folder)
        last = max(Path(folder).rglob("metrics.jsonl"), key=lambda file: file.stat().st_mtime)
        return [record["reward/mean"] for record in read_metrics(last) if "reward/mean" in record]


def cpu_s() -> float:
    """Return the seconds of CPU that ended processes of this one took."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each seed, and the mean of the rises."""
    parser = harness.arguments(__doc__)
    parser.add_argument("name", choices=sorted(EXAMPLES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args(argv)
    rises = []
    for seed in args.seeds:
        started, cpu_before = time.monotonic(), cpu_s()
        rewards = rewards_of(args.name, seed, args.overrides)
        first, last = statistics.mean(rewards[:STEPS]), statistics.mean(rewards[-STEPS:])
        rises.append(last - first)
        took = f"{len(rewards)} steps, {time.monotonic() - started:.0f} s, {cpu_s() - cpu_before:.0f} s of CPU"
        print(f"seed {seed}: first {first:.3f}, last {last:.3f}, rise {last - first:+.3f} ({took})", flush=True)
    print(f"mean rise {statistics.mean(rises):+.3f} over {len(rises)} seeds")


if __name__ == "__main__":
    harness.run(main)
