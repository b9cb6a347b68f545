"""GFLOP/s of one core in float32: torch's own products, and those of `skyrl_train/model/linear.py`.

    python scripts/bench/products.py

Of a linear layer's three products: the output, the gradient of the input, and that of the weight. The least of five CPU
times each, on one thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from skyrl_train.model.linear import product

LAYERS = ((2048, 128, 384), (2048, 256, 704), (2048, 704, 256), (2048, 1024, 1024))
"""(positions, inputs, outputs)."""


Multiply = Callable[[Tensor, Tensor], Tensor]
"""`left @ right.T`."""


def rate(multiply: Multiply, left: Tensor, right: Tensor) -> float:
    """GFLOP/s of the fastest of five calls, after one that is not counted."""
    seconds = []
    multiply(left, right)
    for _ in range(5):
        start = time.process_time()
        multiply(left, right)
        seconds.append(time.process_time() - start)
    return 2 * left.numel() * right.shape[0] / min(seconds) / 1e9


def main() -> None:
    torch.set_num_threads(1)
    print("| positions x in x out | torch: output | by input | by weight | here: output | by input | by weight |")
    print("|---|---|---|---|---|---|---|")
    ways: tuple[Multiply, ...] = (lambda left, right: left @ right.T, product)
    for positions, size, out in LAYERS:
        inputs, weight, by_output = torch.randn(positions, size), torch.randn(out, size), torch.randn(positions, out)
        operands = ((inputs, weight), (by_output, weight.T), (by_output.T, inputs.T))
        cells = [f"{rate(way, left, right):.0f}" for way in ways for left, right in operands]
        print(f"| {positions} x {size} x {out} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
