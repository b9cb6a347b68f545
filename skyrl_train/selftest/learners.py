"""Cases of one learner on one device: kernels against float64, masks, compilation, micro-batches that size themselves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils import _triton

from skyrl_train.batch.layouts import Segment
from skyrl_train.batch.steps import close_mini_batch
from skyrl_train.config.fields import LayoutChoice
from skyrl_train.errors import ModelError
from skyrl_train.learner.memory import SizingLimits, make_meter, size_micro_batches
from skyrl_train.model.layers import Segments, masked_attention, segment_attention
from skyrl_train.selftest.cases import Context, SkipCase
from skyrl_train.selftest.fixtures import (
    gradient_of,
    make_learner,
    make_reference,
    make_rows,
    relative_error,
    require_gradient,
    require_logprobs,
    save_model,
)

_SCALE = 0.125
_ATTENTION_BOUNDS = {"float32": 5e-5, "bfloat16": 0.02}
_MASK_BYTES_PER_POSITION = 1024


def layout_against_float64(context: Context, *, layout: LayoutChoice, dtype: str) -> str:
    """Log-probabilities and gradient of a step in this layout and type, with and without recomputed activations."""
    folder = save_model(context.folder)
    reference = make_reference(folder)
    figures = []
    for checkpointing in (False, True):
        learner = make_learner(folder, context.device, layout=layout, dtype=dtype, checkpointing=checkpointing)
        logprobs = require_logprobs(learner.forward(reference.step.batch), reference, dtype)
        learner.forward_backward(reference.step)
        figures.append((logprobs, require_gradient(gradient_of(learner), reference, dtype)))
    return f"log-probabilities {max(f[0] for f in figures):.1e}, gradient {max(f[1] for f in figures):.1e} off"


@dataclass(frozen=True, kw_only=True)
class _Attention:
    """One kind of attention that a case compares: its segments, window and softcap."""

    segments: tuple[Segment, ...]
    window: int | None
    softcap: float | None

    def __str__(self) -> str:
        is_tree = any(segment.subtree_stop > segment.stop for segment in self.segments)
        return f"{'tree' if is_tree else 'packed rows'}, window {self.window}, cap {self.softcap}"

    def compute(self, inputs: Sequence[Tensor], device: str, dtype: torch.dtype, *, expected: bool) -> list[Tensor]:
        """Output and gradients of query, key and value, float64 on the CPU; `inputs` ends in the output's gradient.

        `expected`: by plain products with a mask, else by what a model's layers call.
        """
        longest = max(segment.subtree_stop - segment.start for segment in self.segments)
        segments = Segments(self.segments, longest)
        query, key, value = (each.to(device, dtype, copy=True).requires_grad_() for each in inputs[:3])
        terms = {"window": self.window, "softcap": self.softcap}
        if expected:
            out = masked_attention(query, key, value, segments, scale=_SCALE, **terms)  # type: ignore[arg-type]
        else:
            out = _called_by_layers(query, key, value, segments, sliding_window=self.window, softcap=self.softcap)
        gradients = torch.autograd.grad(out, (query, key, value), inputs[3].to(device, dtype))
        return [each.detach().double().cpu() for each in (out, *gradients)]


def attention_terms(context: Context, *, dtype: str) -> str:
    """Attention over packed rows and over a tree, with sliding windows and capped scores, forward and backward."""
    packed = (Segment(0, 100, 100), Segment(100, 230, 230), Segment(230, 300, 300))
    tree = (Segment(0, 120, 300), Segment(120, 210, 210), Segment(210, 300, 300))
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, heads, 300, 64, generator=generator, dtype=torch.float64) for heads in (4, 2, 2, 4)]
    largest = 0.0
    for segments, window, softcap in itertools.product((packed, tree), (None, 24), (None, 15.0)):
        kind = _Attention(segments=segments, window=window, softcap=softcap)
        expected = kind.compute(inputs, "cpu", torch.float64, expected=True)
        found = kind.compute(inputs, context.device, getattr(torch, dtype), expected=False)
        error = max(relative_error(mine, right) for mine, right in zip(found, expected))
        assert error < _ATTENTION_BOUNDS[dtype], f"{kind}: {error:.2e} off"
        largest = max(largest, error)
    return f"8 kinds, output and gradients at most {largest:.1e} off"


def _called_by_layers(query: Tensor, key: Tensor, value: Tensor, segments: Segments, **terms: Any) -> Tensor:
    """`[rows, heads, positions, size]`, by the function that transformers finds under the package's name."""
    layer: Any = SimpleNamespace()
    out, _ = segment_attention(layer, query, key, value, None, scaling=_SCALE, segments=segments, **terms)
    return out.transpose(1, 2)


def mask_memory(context: Context) -> str:
    """The block mask of a tree of many positions takes memory in proportion to them, not to their pairs."""
    positions = 16384 if context.on_cuda else 4096
    device = torch.device(context.device)
    meter = make_meter(device, SizingLimits(longest=1, max_rows=1, limit_bytes=8 << 30, margin=0.0, retries=0))
    with meter.counting():
        meter.reset_peak()
        before = meter.in_use_bytes()
        half = positions // 2
        Segments((Segment(0, half, positions), Segment(half, positions, positions)), positions).block_mask(device)
    taken = meter.peak_bytes() - before
    figure = f"{taken / 2**20:.1f} MiB for {positions} positions"
    assert taken <= _MASK_BYTES_PER_POSITION * positions, f"{figure}, {taken / positions**2:.1f} bytes a pair"
    return figure


def recompilation(context: Context) -> str:
    """Flex attention over trees of eight sizes compiles no graphs after the first two."""
    if not _triton.has_triton():
        raise SkipCase("torch finds no working Triton")
    seen = []
    for positions in (300, 513, 700, 1111, 1500, 2049, 128, 640):
        third = positions // 3
        tree = (
            Segment(0, third, positions),
            Segment(third, 2 * third, 2 * third),
            Segment(2 * third, positions, positions),
        )
        query, key, value = (
            torch.randn(1, heads, positions, 64, device=context.device, dtype=torch.bfloat16, requires_grad=True)
            for heads in (4, 2, 2)
        )
        out = _called_by_layers(query, key, value, Segments(tree, positions))
        torch.autograd.grad(out.sum(), (query, key, value))
        seen.append(int(counters["stats"]["unique_graphs"]))
    assert seen[-1] > 0, "torch compiled nothing"
    assert seen[-1] - seen[1] <= 2, f"graphs after each size: {seen}"
    return f"graphs after each size: {', '.join(map(str, seen))}"


def compiled_layers(context: Context) -> str:
    """`model.compile=true`: the gradient of compiled layers."""
    folder = save_model(context.folder)
    try:
        learner = make_learner(folder, context.device, dtype="float32", compiled=True)
    except ModelError as error:
        raise SkipCase(str(error).partition("but ")[2]) from error
    reference = make_reference(folder)
    learner.forward_backward(reference.step)
    return f"gradient {require_gradient(gradient_of(learner), reference, 'float32'):.1e} off"


def auto_micro_batches(context: Context) -> str:
    """Budgets that are probed hold for steps of many lengths, and use what they may.

    On CUDA against the caching allocator, which is told to refuse more; on a CPU tensors are counted.
    """
    device = torch.device(context.device)
    longest, rows, budget_bytes = (1024, 256, 384 << 20) if context.on_cuda else (256, 64, 48 << 20)
    learner = make_learner(save_model(context.folder), context.device)
    held = sum(tensor.nbytes for tensor in learner.engine.held_tensors())
    limit = 4 * held + budget_bytes  # weights, gradients and two moments
    limits = SizingLimits(longest=longest, max_rows=rows, limit_bytes=limit, margin=0.1, retries=3)
    meter = make_meter(device, limits)
    report = size_micro_batches(learner, meter, limits)
    assert report.training is not None
    generator = torch.Generator().manual_seed(3)
    lengths = (8 + (longest - 8) * torch.rand(rows, generator=generator) ** 3).int().tolist()
    drawn = make_rows(tuple(lengths), prompt=4)
    logprobs = learner.forward(drawn)
    step = drawn.with_columns(old_logprobs=logprobs, ref_logprobs=logprobs, rollout_logprobs=logprobs)
    learner.engine.oom_retry.take_peak()
    metrics = learner.forward_backward(
        close_mini_batch(step, loss_reduction="token_mean", max_sequence_length_for_norm=longest)
    )
    peak = metrics["memory/policy_peak_gib"].value * 2**30
    redone = metrics["memory/policy_redone"].value
    assert redone == 0, f"{redone:.0f} micro-batches ran out of memory and were computed anew"
    assert 0.4 * limit < peak <= limit, f"the peak was {peak / limit:.0%} of the limit"
    return f"{report.training.tokens} positions a micro-batch, peak {peak / limit:.0%} of {limit / 2**20:.0f} MiB"
