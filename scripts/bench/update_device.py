"""Updates on one device, on the wall clock, on a CPU in time of the process: tokens per second, and which share of the
device's arithmetic they used.

Model FLOPs are what the step needs at least, whatever a layout computes: each distinct prefix of its rows once, forward
(1x) and backward (2x), without recomputed activations.

    6 * weights of the layers * positions  +  6 * vocabulary * hidden * scored tokens  +  12 * layers * query size * pairs

where a pair is a token that attends to another or to itself. Utilisation is that over the time and the peak rate of the
device: dense bfloat16 as NVIDIA's data sheets state it, or, for other devices, types and the CPU, the rate of a large
matrix product measured here.
"""

from __future__ import annotations

import time
from typing import Any

import harness
import numpy as np
import torch
from update_ours import Ours
from update_work import KINDS, SIZES, ModelSize

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.planner import facts_of
from skyrl_train.model.layers import product, set_numerics

PEAK_BF16 = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
}
"""FLOP/s in bfloat16, dense, by a part of the device's name; the longest that fits counts. From NVIDIA's data sheets, which
state twice as much for sparse matrices."""
_PRODUCT = {"cpu": 1024, "cuda": 8192}
"""Side of the matrices whose product is measured."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """FLOP/s, and where the number is from."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        known = sorted((each for each in PEAK_BF16 if each in name), key=len)
        if known:
            return PEAK_BF16[known[-1]], f"data sheet of {known[-1]}"
    side = _PRODUCT[device.type]
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    seconds = []
    for _ in range(4):
        _wait(device)
        start = clock()
        product(left, right)
        _wait(device)
        seconds.append(clock() - start)
    return 2 * side**3 / min(seconds[1:]), f"measured, {side} x {side} in {str(dtype).removeprefix('torch.')}"


def needed_flops(batch: TrainingInputBatch, size: ModelSize) -> float:
    """Of a forward and backward of the rows."""
    facts = facts_of(batch, layout="prefix_shared", merge_turns=False)
    tree = facts.sizes([np.arange(batch.num_rows)])
    query, kv = size.hidden, size.hidden // size.heads * size.kv_heads
    layer = size.hidden * (query + 2 * kv) + query * size.hidden + 3 * size.hidden * size.intermediate
    scored = int(batch["loss_mask"].sum())
    return (
        6.0 * size.layers * layer * float(tree.positions[0])
        + 6.0 * size.vocabulary * size.hidden * scored
        + 12.0 * size.layers * query * float(tree.pairs[0])
    )


def measure(args: Any) -> None:
    """Print a table: one line for each layout and form of the layers. The first update has what is compiled."""
    device = torch.device("cuda:0" if args.device == "cuda" else args.device)
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    set_numerics(deterministic=False)
    size = SIZES[args.model]
    peak, source = peak_flops(device, dtype)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, one thread"
    print(f"{name}; {args.model}, {args.kind}; peak {peak / 1e12:.3g} TFLOP/s ({source})")
    table = harness.Table(
        *("layout", "layers", "tokens", "positions", "first update, s", "s per update", "tokens/s and GPU", "MFU"),
        "peak GiB",
    )
    for variant in args.layouts.split(","):
        for form in args.forms.split(","):
            table.row(*_row(variant, form, size, device, args, peak))


def _row(variant: str, form: str, size: ModelSize, device: torch.device, args: Any, peak: float) -> list[str]:
    ours = Ours(
        size,
        KINDS[args.kind](size.vocabulary),
        variant=variant,
        tokens=args.tokens,
        bf16=args.bf16,
        checkpointing=args.checkpointing,
        device=str(device),
        form=form,
    )
    start = time.perf_counter()
    ours.score()
    ours.update()
    _wait(device)
    first = time.perf_counter() - start
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = ours.timed(args.steps)
    flops = needed_flops(ours.batch, size)
    held = f"{torch.cuda.max_memory_allocated(device) / 2**30:.2f}" if device.type == "cuda" else "-"
    rate, utilisation = f"{ours.batch.num_tokens / seconds:,.0f}", f"{flops / seconds / peak:.1%}"
    sizes = [f"{ours.batch.num_tokens:,}", f"{ours.positions:,}"]
    return [variant, form, *sizes, f"{first:.1f}", f"{seconds:.3f}", rate, utilisation, held]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
