"""What one core does at most: products of matrices in float32 and bfloat16, and bytes of memory read and written a second.

    python scripts/bench/core_rates.py            # measures, keeps the best that was ever seen on this kind of processor
    python scripts/bench/core_rates.py --rounds 9

These are what shares are taken of (`update.py bound`). They come from the largest products that a core is good at and from
copies of memory beyond its caches, never from shapes that a trainer has. CPU seconds of one thread; the best of several
rounds, of both libraries that torch can be brought to take (MKL and oneDNN). bfloat16 may be multiplied in either type,
as float32 holds each of its numbers, so that its rate is never below that of float32.

Kept as `core-NAME.json` in `~/.cache/skyrl_train/bench`, by the processor's name. Another load, another neighbour of a
shared processor or another clock makes other rates: a benchmark that takes shares measures them again beside its sides
(`measured_now`), and says how far they are from the best.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import harness

from skyrl_train.system.files import cache_folder

SIDES = (1024, 2048, 3072)
"""Sides of the square matrices that are multiplied."""
BUFFER_BYTES = 1 << 29
"""Of the memory that is copied: more than any cache holds."""


@dataclass(frozen=True, kw_only=True)
class CoreRates:
    """Of one core."""

    float32: float
    """Floating-point operations a second of products of float32 matrices."""
    bfloat16: float
    """The same of bfloat16 matrices, in whichever type they are multiplied fastest."""
    bytes: float
    """Bytes a second, those read and those written together."""

    def best(self, other: CoreRates) -> CoreRates:
        """Return the larger of each rate."""
        ours, theirs = asdict(self), asdict(other)
        return CoreRates(**{name: max(rate, theirs[name]) for name, rate in ours.items()})

    def flops(self, dtype: str) -> float:
        """Return the rate of products of this type, "float32" or "bfloat16"."""
        return self.float32 if dtype == "float32" else self.bfloat16

    def line(self) -> str:
        """Return them for people."""
        return (
            f"{self.float32 / 1e9:.0f} GFLOP/s float32, {self.bfloat16 / 1e9:.0f} bfloat16, {self.bytes / 1e9:.1f} GB/s"
        )


def rates_file() -> Path:
    """Return where the best rates of this kind of processor are kept."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", harness.machine().partition(",")[0].partition(" of ")[2])
    return cache_folder("bench") / f"core-{name}.json"


def kept() -> CoreRates | None:
    """Return the best rates that were seen; None where none were, or the file is not one of these."""
    with suppress(OSError, ValueError, TypeError):
        return CoreRates(**json.loads(rates_file().read_text(encoding="utf-8")))
    return None


def measured_now(rounds: int = 3) -> CoreRates:
    """Measure in a process of its own, and keep what is better than was ever seen. Raises MeasurementError."""
    said = harness.answer(harness.apart([__file__, "--one", "--rounds", str(rounds)]))
    now = CoreRates(**said)
    best = now.best(before) if (before := kept()) else now
    file = rates_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(asdict(best)), encoding="utf-8")
    part.replace(file)
    return now


def measure(rounds: int) -> CoreRates:
    """Measure in this process, on one thread."""
    import torch

    from skyrl_train.model.layers import product

    torch.set_num_threads(1)

    def rate(call: Callable[[], object], amount: float) -> float:
        call()
        best = 0.0
        for _ in range(rounds):
            start, calls = time.thread_time(), 0
            while (spent := time.thread_time() - start) < 0.1:
                call()
                calls += 1
            best = max(best, calls * amount / spent)
        return best

    float32 = bfloat16 = 0.0
    for side in SIDES:
        operations = 2.0 * side**3
        left, right = torch.randn(2, side, side)
        ways = (partial(torch.mm, left, right.T), partial(product, left, right))
        float32 = max(float32, *(rate(way, operations) for way in ways))
        if side == SIDES[0] or bfloat16 > 0.5 * float32:  # without instructions for it, larger ones take minutes
            bfloat16 = max(bfloat16, rate(partial(torch.mm, left.bfloat16(), right.bfloat16().T), operations))
    source = torch.ones(BUFFER_BYTES // 4)
    target = torch.empty_like(source)
    copied = rate(lambda: target.copy_(source), 2.0 * BUFFER_BYTES)
    read = rate(lambda: torch.dot(source, target), 2.0 * BUFFER_BYTES)
    return CoreRates(float32=float32, bfloat16=max(float32, bfloat16), bytes=max(copied, read))


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", action="store_true", help="measure here, and print JSON")
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(asdict(measure(args.rounds))))
        return
    now = measured_now(args.rounds)
    best = kept() or now
    table = harness.Table("one core", "float32, GFLOP/s", "bfloat16, GFLOP/s", "memory, GB/s")
    for name, rates in (("now", now), ("best seen", best)):
        table.row(name, f"{rates.float32 / 1e9:.1f}", f"{rates.bfloat16 / 1e9:.1f}", f"{rates.bytes / 1e9:.1f}")
    print(f"kept in {rates_file()}")


if __name__ == "__main__":
    harness.run(main)
