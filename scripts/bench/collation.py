"""How much of a supervised step is spent waiting for its batch, with batches made in the loop and made one ahead.

    python scripts/bench/collation.py [--steps 30] [--step-ms 60]

The loader, the collator and the waiting are the real ones; the train step is matrix products that take a stated time, and
collation is made dearer in steps: by waiting, as for a disk, or by computing, as a tokenizer would. Prints one line for
each cost: seconds a step, share of it spent waiting, and how many times fewer seconds are waited.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import harness
import numpy as np
import torch

from skyrl_train.batch.steps import MiniBatch
from skyrl_train.data import BatchLoader
from skyrl_train.data.sft import (
    Collator,
    EpochOrder,
    ExampleSet,
    Ints,
    PackedDataCollator,
    SourcePart,
    StepStream,
    by_rows,
    store_of,
)

NUM_EXAMPLES = 4096
EXAMPLES_PER_STEP = 64
SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
"""Costs of collation, as shares of the train step."""


Measured = tuple[float, float]
"""Mean time of a step, and how much of it was spent waiting for its batch, in seconds."""


def make_examples() -> ExampleSet:
    """Random tokens, long-tailed lengths."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(4.5, 0.7, NUM_EXAMPLES), 8, 1024).astype(int)
    store = store_of((rng.integers(0, 1000, n), np.arange(n) > n // 3) for n in lengths)
    return ExampleSet([SourcePart(name="bench", store=store, rows=np.arange(NUM_EXAMPLES), max_length=1024)])


class DearCollator:
    """The packed collator, and `extra_s` on top."""

    def __init__(self, collate: Collator, spend: Callable[[float], None], extra_s: float) -> None:
        self._collate = collate
        self._spend = spend
        self._extra_s = extra_s

    def __call__(self, indices: Ints, step: int) -> MiniBatch:
        self._spend(self._extra_s)
        return self._collate(indices, step)


def compute_for(seconds: float) -> None:
    """Matrix products, which let other threads run meanwhile."""
    matrix = torch.ones(192, 192)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        matrix = (matrix @ matrix).clamp(max=1.0)


def run(examples: ExampleSet, collate: Collator, *, is_async: bool, num_steps: int, step_s: float) -> Measured:
    """The loop of `trainers/sft.py` around a train step of `step_s`; its first step is not counted."""
    order = EpochOrder([NUM_EXAMPLES], weights=[1.0], shuffle=True, seed=0)
    stream = StepStream(examples.lengths, order, by_rows(EXAMPLES_PER_STEP), "wrap")
    waited = 0.0
    with BatchLoader(stream, examples, collate, is_async=is_async) as loader:
        loader.seek(0)
        for step in range(num_steps + 1):
            if step == 1:
                begun, waited = time.perf_counter(), 0.0
            before = time.perf_counter()
            loader.get(step)
            waited += time.perf_counter() - before
            loader.prefetch(step + 1)
            compute_for(step_s)
        return (time.perf_counter() - begun) / num_steps, waited / num_steps


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--steps", type=int, default=30, help="steps of each measurement")
    parser.add_argument("--step-ms", type=float, default=60.0, help="time of one train step")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each, interleaved; the median is shown")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    examples, step_s = make_examples(), args.step_ms / 1000
    plain = PackedDataCollator(examples, max_tokens_per_row=4096)
    begun = time.perf_counter()
    for step in range(10):
        plain(np.arange(step * EXAMPLES_PER_STEP, (step + 1) * EXAMPLES_PER_STEP), step)
    own_ms = (time.perf_counter() - begun) / 10 * 1000
    print(f"train step {args.step_ms:.0f} ms; collating {EXAMPLES_PER_STEP} examples takes {own_ms:.2f} ms by itself")
    table = harness.Table(
        "collation", "off: ms a step", "waiting", "on: ms a step", "waiting", "speed", "waiting, off/on"
    )
    for name, spend in (("waits", time.sleep), ("computes", compute_for)):
        for share in SHARES:
            collate = DearCollator(plain, spend, share * step_s)

            def measure(side: str, _: int, collate: Collator = collate) -> Measured:
                return run(examples, collate, is_async=side == "on", num_steps=args.steps, step_s=step_s)

            found, _ = harness.in_turns(("off", "on"), range(args.rounds), measure)
            (off_s, off_wait_s), (on_s, on_wait_s) = (sorted(runs)[len(runs) // 2] for runs in found.values())
            table.row(
                f"{name} {share:.0%} of a step",
                *(f"{off_s * 1000:.1f}", f"{off_wait_s / off_s:.1%}"),
                *(f"{on_s * 1000:.1f}", f"{on_wait_s / on_s:.1%}"),
                f"{off_s / on_s:.2f}x",
                f"{off_wait_s / max(on_wait_s, 1e-9):.0f}x less",
            )


if __name__ == "__main__":
    harness.run(main)
