"""What a device computes in a second: the rates by which rows are dealt to ranks and layouts are chosen.

    python scripts/bench/device_rates.py                  # one core, float32
    python scripts/bench/device_rates.py --device cuda    # bfloat16

Prints a row for the table of `skyrl_train/batch/cost.py`: a large matrix product, causal attention, starting a kernel, and
reading memory. The best of several rounds counts: what a device reaches where nothing disturbs it. Rates stand in the
table, and are not measured in a run, because a resumed run must cut its rows as it did before.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from skyrl_train.batch.cost import DeviceRates, rates_of

ROUNDS = 7
SIDE = {"cpu": 1024, "cuda": 8192}
"""Of the square matrices."""
TOKENS = {"cpu": 2048, "cuda": 16384}
"""Of the row that attends to itself, in 8 heads of 64 numbers on a CPU and 16 of 128 on a GPU."""
HEADS = {"cpu": (8, 64), "cuda": (16, 128)}
READ_NUMBERS = {"cpu": 1 << 26, "cuda": 1 << 30}
"""That are summed: more than caches hold."""
STARTS = 500
"""Attention kernels of two tokens that are started one after the other."""


def measure(device: torch.device) -> DeviceRates:
    """Measure the device; on a CPU with the threads that torch has."""
    kind, dtype = device.type, torch.float32 if device.type == "cpu" else torch.bfloat16
    side, tokens, (heads, head) = SIDE[kind], TOKENS[kind], HEADS[kind]
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    query, key, value = (torch.randn(1, heads, tokens, head, device=device, dtype=dtype) for _ in range(3))
    few = [each[:, :, :2].contiguous() for each in (query, key, value)]

    read = torch.ones(READ_NUMBERS[kind], device=device, dtype=dtype)

    def start_kernels() -> None:
        for _ in range(STARTS):
            scaled_dot_product_attention(*few, is_causal=True)

    product_s = best_seconds(lambda: left @ right, device)
    attention_s = best_seconds(lambda: scaled_dot_product_attention(query, key, value, is_causal=True), device)
    return DeviceRates(
        linear_flops=2.0 * side**3 / product_s,
        attention_flops=4.0 * heads * head * tokens * (tokens + 1) / 2 / attention_s,
        kernel_s=best_seconds(start_kernels, device) / STARTS,
        read_bytes=read.numel() * read.element_size() / best_seconds(lambda: read.sum(), device),
    )


def best_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the shortest time of the rounds, of which the first one warms up."""
    found = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return min(found[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    device = torch.device(parser.parse_args().device)
    torch.set_num_threads(1)
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    found, stated = measure(device), rates_of(name)
    print(name)
    for field in ("linear_flops", "attention_flops", "kernel_s", "read_bytes"):
        here, there = getattr(found, field), getattr(stated, field)
        print(f"    {field:<16} {here:10.3g}   in the table {there:8.3g}   {here / there:5.2f} x")


if __name__ == "__main__":
    main()
