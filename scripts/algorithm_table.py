"""Measures estimators and losses against their formulas and renews the last column of the table in docs/algorithms.md.

    python scripts/algorithm_table.py             # renew the column
    python scripts/algorithm_table.py --time      # also print times for a batch of 500,000 trained tokens

Errors are the largest absolute difference, in float64, between the tensor code and plain loops over the formulas
(`tests/support/advantage_oracles.py`, `tests/support/loss_oracles.py`) over random uneven batches, step-wise and not,
with gradients. The other columns are written there by hand; a new row may have nothing in its last cell.
"""
# ruff: noqa: E402  the repository's root comes first on the path

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from skyrl_train.algorithms import AdvantageInputs
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.parts import POLICY_LOSSES
from tests.support.advantage_oracles import (
    ADVANTAGE_ORACLES,
    Sample,
    Step,
    advantage_error,
    advantage_inputs_of,
    estimator_with_arguments,
)
from tests.support.loss_oracles import LOSS_CASES, loss_error

DOCUMENT = ROOT / "docs" / "algorithms.md"
BEGIN, END = "<!-- table: written by scripts/algorithm_table.py -->", "<!-- end of table -->"
NUM_CASES = 200


ADVANTAGE_CONFIGS = (
    AlgorithmConfig(gamma=0.9),
    AlgorithmConfig(gamma=0.9, step_rewards="turn_return", normalize_by_std=False),
)


def table(rows: str, num_cases: int) -> str:
    """The two tables as Markdown: their rows with the last cell, the largest error, measured anew."""

    def measured(row: re.Match[str]) -> str:
        name, cells = row.groups()
        if name in POLICY_LOSSES:
            errors = (loss_error(name, seed, case) for case in LOSS_CASES for seed in range(num_cases))
        else:
            errors = (advantage_error(name, seed, one) for one in ADVANTAGE_CONFIGS for seed in range(num_cases))
        return f"| `{name}` |{cells}| {max(errors):.1e} |"

    return re.sub(r"^\| `([^`]+)` \|(.*)\| [\d.e+-]* \|$", measured, rows, flags=re.MULTILINE)


def rewrite(document: str, num_cases: int) -> str:
    """`document` with what stands between the marks measured anew."""
    before, _, rest = document.partition(BEGIN)
    rows, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table(rows, num_cases)}{END}{after}"


def timing_samples(num_trajectories: int, num_actions: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number in range(num_trajectories):
        values = torch.randn(num_actions, generator=generator).tolist()
        step = Step(context=16, values=values, reward=float(number % 3), old_logprobs=values, ref_logprobs=values)
        samples.append(Sample(prompt=number // 8, steps=[step]))
    return samples


def print_times() -> None:
    """Processor time for 1,000 trajectories of 500 tokens, best of five, and its ratio to loops over lists."""
    samples = timing_samples(1000, 500)
    inputs: AdvantageInputs = advantage_inputs_of(samples, step_wise=False, dtype=torch.float32)
    config = AlgorithmConfig(gamma=1.0)
    for name in ("gae", "grpo"):
        ours = min(_seconds(lambda: estimator_with_arguments(name)(inputs, config)) for _ in range(5))  # noqa: B023
        loops = _seconds(lambda: ADVANTAGE_ORACLES[name](samples, config))  # noqa: B023
        print(f"{name}: {1000 * ours:.0f} ms, loops {1000 * loops:.0f} ms, ratio {loops / ours:.1f}")


def _seconds(run: object) -> float:
    start = time.process_time()
    run()  # type: ignore[operator]
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", action="store_true", help="also print times for 500,000 trained tokens")
    arguments = parser.parse_args()
    DOCUMENT.write_text(rewrite(DOCUMENT.read_text(encoding="utf-8"), NUM_CASES), encoding="utf-8")
    print(f"wrote {DOCUMENT.relative_to(ROOT)}")
    if arguments.time:
        print_times()


if __name__ == "__main__":
    main()
