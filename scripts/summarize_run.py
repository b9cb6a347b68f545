"""Write `summary.json` and `summary.md` into a run's folder: score, wall time, tokens per second and GPU.

    python scripts/summarize_run.py outputs/gsm8k --num-gpus 8 --wall-s 3600

Everything is read from what the run wrote: `metrics.jsonl` (one record a step) and `evaluation.json`. Rates are over the
time of training steps without evaluations and checkpoints, which come as often as one likes, and without the first step,
in which kernels are compiled, where there are others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_train.errors import DataError
from skyrl_train.system.files import write_atomically, write_json
from skyrl_train.telemetry import RunFolder, phase_seconds, read_metrics
from skyrl_train.trainers.evaluation import read_evaluations

REWARD_STEPS = 10
"""The rewards of so many first and last steps are averaged."""
_BESIDE = ("evaluate", "checkpoint")
"""Phases of a step that are not part of training."""
_TOKENS = "batch/tokens"
_GENERATED = "batch/trained_tokens"


def summarize(folder: Path, *, num_gpus: int, wall_s: float | None = None) -> dict[str, Any]:
    """The summary of the run in `folder`.

    `num_gpus` is 0 for a run on a CPU, whose rates are those of the whole machine. `wall_s` is what the command took in
    all. Raises DataError where the folder holds no step.
    """
    run = RunFolder(folder)
    steps = [record for record in read_metrics(run.metrics_file) if _TOKENS in record]
    if not steps:
        raise DataError(f"{run.metrics_file} holds no training step: nothing to summarize")
    evaluations = read_evaluations(run.evaluation_file)
    timed = steps[1:] or steps
    train_s = _sum(timed, "timing/step") - sum(_sum(timed, f"timing/{name}") for name in _BESIDE)
    rewards = [record["reward/mean"] for record in steps if record.get("reward/mean") is not None]
    return {
        "steps": len(steps),
        "num_gpus": num_gpus,
        "wall_s": wall_s,
        "steps_s": round(_sum(steps, "timing/step"), 3),
        "median_step_s": round(statistics.median(record["timing/step"] for record in timed), 3),
        "accuracy_before": evaluations[0].overall.accuracy if evaluations else None,
        "accuracy_after": evaluations[-1].overall.accuracy if len(evaluations) > 1 else None,
        "accuracy_step": evaluations[-1].global_step if evaluations else None,
        "reward_first_steps": round(statistics.fmean(rewards[:REWARD_STEPS]), 4) if rewards else None,
        "reward_last_steps": round(statistics.fmean(rewards[-REWARD_STEPS:]), 4) if rewards else None,
        "tokens": int(_sum(steps, _TOKENS)),
        "train_s": round(train_s, 3),
        "tokens_per_s": round(_sum(timed, _TOKENS) / train_s, 1),
        "tokens_per_s_per_gpu": round(_sum(timed, _TOKENS) / train_s / num_gpus, 1) if num_gpus else None,
        "generated_tokens_per_s_per_gpu": round(_sum(timed, _GENERATED) / train_s / num_gpus, 1) if num_gpus else None,
        "phase_shares": _phase_shares(timed),
    }


def _sum(records: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(sum(record.get(name) or 0.0 for record in records))


def _phase_shares(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The share of each phase in the time of whole steps, longest first."""
    seconds: Counter[str] = Counter()
    for record in records:
        seconds.update(phase_seconds(record))
    longest_first = sorted(seconds.items(), key=lambda entry: -entry[1])
    return {name: round(value / _sum(records, "timing/step"), 4) for name, value in longest_first}


def markdown(summary: Mapping[str, Any]) -> str:
    """One table, values that are not known left out."""
    rows = [f"| {name} | {value} |" for name, value in summary.items() if name != "phase_shares" and value is not None]
    rows += [f"| share of {name} | {share:.1%} |" for name, share in summary["phase_shares"].items()]
    return "\n".join(["| what | value |", "|---|---|", *rows]) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="output folder of the run")
    parser.add_argument("--num-gpus", type=int, required=True, help="GPUs that the run used; 0 on a CPU")
    parser.add_argument("--wall-s", type=float, help="seconds that the command took, start and evaluations included")
    options = parser.parse_args(argv)
    try:
        summary = summarize(options.folder, num_gpus=options.num_gpus, wall_s=options.wall_s)
    except DataError as error:
        print(error, file=sys.stderr)
        return 2
    write_json(options.folder / "summary.json", summary)
    write_atomically(options.folder / "summary.md", markdown(summary).encode())
    print(json.dumps(summary, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
