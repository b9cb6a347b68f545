"""GFLOP/s of one core in float32: of linear layers, and of attention.

    python scripts/bench/products.py

Of a linear layer's three products, the output, the gradient of the input, and that of the weight: torch's own, and those of
`skyrl_train/model/layers/linear.py`. Of attention, forward and backward: torch's kernel for CPUs, which
`joined_attention.py` calls for each part, and the same written as products of matrices with a softmax between them.
Pairs that a causal call computes in vain count. The least of five CPU times each, on one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product as product_of
from typing import Any

import harness
import torch
from torch import Tensor

from skyrl_train.model.layers import product

LAYERS = ((2048, 128, 384), (2048, 256, 704), (2048, 704, 256), (2048, 1024, 1024))
"""(positions, inputs, outputs)."""
PARTS = ((96, 96, True), (200, 200, False), (800, 200, False), (2000, 400, False))
"""(queries, keys, whether causal), as parts of rows are; with each of HEADS."""
HEADS = ((8, 32), (8, 64))
"""(heads, size)."""


FLASH: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
Multiply = Callable[[Tensor, Tensor], Tensor]
"""`left @ right.T`."""


def rate(call: Callable[[], object], operations: float) -> float:
    """GFLOP/s of the fastest of five calls, after one that is not counted."""
    call()
    return operations / harness.timed(call, 5)[0] / 1e9


def attention_by_products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp `[heads, queries, 1]`, of `[heads, positions, size]`; in place where that can be."""
    scores = torch.bmm(query * query.shape[-1] ** -0.5, key.mT)
    if mask is not None:
        scores += mask
    largest = scores.amax(-1, keepdim=True)
    total = scores.sub_(largest).exp_().sum(-1, keepdim=True)
    return torch.bmm(scores, value).div_(total), largest.add_(total.log())


def gradients_by_products(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, from what `attention_by_products` gave."""
    scale = query.shape[-1] ** -0.5
    weights = torch.baddbmm(sums, query * scale, key.mT, beta=-1)
    if mask is not None:
        weights += mask
    by_value = torch.bmm(weights.exp_().mT, grad)
    by_scores = weights.mul_(torch.baddbmm((grad * out).sum(-1, keepdim=True), grad, value.mT, beta=-1))
    return torch.bmm(by_scores, key).mul_(scale), torch.bmm(by_scores.mT, query).mul_(scale), by_value


def attention_rates(heads: int, size: int, queries: int, keys: int, *, causal: bool) -> list[float]:
    """GFLOP/s of the kernel, forward and backward, and of products of matrices. Raises AssertionError where they differ."""
    query, grad = torch.randn(2, heads, queries, size)
    key, value = torch.randn(2, heads, keys, size)
    mask = torch.full((queries, keys), -torch.inf).triu(1) if causal else None
    scale, pairs = size**-0.5, heads * queries * keys
    rows = [each.unsqueeze(0) for each in (query, key, value)]
    out, sums = FLASH(*rows, 0.0, causal, scale=scale)
    found, found_sums = attention_by_products(query, key, value, mask)
    kernels = FLASH_BACKWARD(grad.unsqueeze(0), *rows, out, sums, 0.0, causal, scale=scale)
    own = gradients_by_products(grad, query, key, value, found, found_sums, mask)
    for theirs, ours in zip((out, *kernels), (found, *own)):
        torch.testing.assert_close(theirs.squeeze(0), ours, rtol=1e-4, atol=1e-4)
    return [
        rate(lambda: FLASH(*rows, 0.0, causal, scale=scale), 4 * size * pairs),
        rate(lambda: FLASH_BACKWARD(grad.unsqueeze(0), *rows, out, sums, 0.0, causal, scale=scale), 10 * size * pairs),
        rate(lambda: attention_by_products(query, key, value, mask), 4 * size * pairs),
        rate(lambda: gradients_by_products(grad, query, key, value, found, found_sums, mask), 10 * size * pairs),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    harness.arguments(__doc__).parse_args(argv)
    torch.set_num_threads(1)
    parts = ("output", "by input", "by weight")
    table = harness.Table("positions x in x out", *(f"{who}: {part}" for who in ("torch", "here") for part in parts))
    ways: tuple[Multiply, ...] = (lambda left, right: left @ right.T, product)
    for positions, size, out in LAYERS:
        inputs, weight, by_output = torch.randn(positions, size), torch.randn(out, size), torch.randn(positions, out)
        operands = ((inputs, weight), (by_output, weight.T), (by_output.T, inputs.T))
        cells = [
            f"{rate(partial(way, left, right), 2 * left.numel() * right.shape[0]):.0f}"
            for way in ways
            for left, right in operands
        ]
        table.row(f"{positions} x {size} x {out}", *cells)
    ways_there = [f"{who}: {part}" for who in ("kernel", "products") for part in ("forward", "backward")]
    table = harness.Table("queries x keys, heads x size", *ways_there, title="Attention")
    for (heads, size), (queries, keys, causal) in product_of(HEADS, PARTS):
        cells = [f"{each:.0f}" for each in attention_rates(heads, size, queries, keys, causal=causal)]
        name = f"{queries} x {keys}{', causal' if causal else ''}, {heads} x {size}"
        table.row(name, *cells)


if __name__ == "__main__":
    harness.run(main)
