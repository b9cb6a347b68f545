"""Attention written out with a dense mask, and segments to compare it over."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from skyrl_train.batch.layouts import prefix_order, tree_segments
from skyrl_train.model.layers import Segments

HEADS, KV_HEADS = 4, 2


def random_tree(seed: int) -> Segments:
    """Rows of two different tokens: dense branching."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, 2, rng.integers(1, 9)).astype(np.int32) for _ in range(10)]
    order = prefix_order(rows)
    return Segments(tree_segments(order), max(order.lengths))


def long_tree(seed: int) -> Segments:
    """Rows of up to 200 tokens with common beginnings: several of flex attention's blocks of 128."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 9, 150).astype(np.int32)
    rows = [np.append(prompt[: rng.integers(1, 151)], rng.integers(0, 2, rng.integers(1, 50))) for _ in range(8)]
    order = prefix_order([row.astype(np.int32) for row in rows])
    return Segments(tree_segments(order), max(order.lengths))


def qkv(segments: Segments, dtype: torch.dtype = torch.float64, size: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int) -> Tensor:
        shape = (1, segments.num_positions, heads, size)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).transpose(1, 2).requires_grad_()

    return draw(HEADS), draw(KV_HEADS), draw(KV_HEADS)


def dense_mask(segments: Segments) -> Tensor:
    """bool `[positions, positions]`, written out."""
    size = segments.num_positions
    mask = torch.zeros(size, size, dtype=torch.bool)
    for segment in segments.segments:
        for key in range(segment.start, segment.stop):
            mask[key : segment.subtree_stop, key] = True
    return mask


def dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    key, value = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (key, value))
    return (query @ key.transpose(2, 3) * scale).masked_fill(~mask, -torch.inf).softmax(-1) @ value
