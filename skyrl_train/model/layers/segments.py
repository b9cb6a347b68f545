"""Who attends to whom in one forward, and what attention kernels derive from it, once for all layers.

A forward of one long row is cut into segments (`batch/layouts/prefix_tree.py`). Positions are in depth-first order, so that
everything below a segment is one interval behind it, and key k is visible from query q where

    k <= q < reach[k]                       reach[k]: where the subtree of k's segment ends
    depth[q] - depth[k] < window            under a sliding window; depth: tokens of the row before the position

Flex attention wants this in blocks: which blocks of keys a block of queries reads at all, and which of them in full, so
that no mask is looked at inside. Both follow from the least and the largest reach and depth of a block: no tensor of
`positions x positions` is made. Blocks grow with the forward, so that there are never more than `MAX_BLOCKS` on a side
and the block mask never takes more than 16 MiB.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from skyrl_train.batch.layouts import PositionGroup, Segment
from skyrl_train.model.layers.joined_attention import Parts, all_parts

BLOCK, MAX_BLOCKS = 128, 1024
"""Positions of a block, doubled until a forward has at most so many blocks."""


@dataclass
class Segments:
    """The segments of one forward."""

    segments: tuple[Segment, ...]
    longest_path: int
    """Tokens of the longest row."""
    group: PositionGroup | None = None
    """The ranks of which each has a part of the positions."""
    _derived: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def num_positions(self) -> int:
        return self.segments[-1].stop if self.segments else 0

    @property
    def is_tree(self) -> bool:
        return any(segment.subtree_stop > segment.stop for segment in self.segments)

    def offsets(self, device: torch.device) -> tuple[Tensor, int]:
        """int32 `[segments + 1]` bounds, and the longest segment; for packed rows."""
        if "offsets" not in self._derived:
            bounds = [0, *(segment.stop for segment in self.segments)]
            longest = max(stop - start for start, stop in pairwise(bounds))
            self._derived["offsets"] = torch.tensor(bounds, dtype=torch.int32).to(device, non_blocking=True), longest
        found: tuple[Tensor, int] = self._derived["offsets"]
        return found

    def parts(self) -> Parts:
        """Return the parts that the CPU's attention kernel computes one after the other; made once."""
        if "parts" not in self._derived:
            self._derived["parts"] = all_parts(self.segments)
        found: Parts = self._derived["parts"]
        return found

    def reach(self) -> NDArray[np.int32]:
        """`[positions]`: where the subtree of each position's segment ends."""
        bounds = np.array(self.segments, dtype=np.int32).reshape(-1, 3)
        return np.repeat(bounds[:, 2], bounds[:, 1] - bounds[:, 0])

    def depths(self) -> NDArray[np.int32]:
        """`[positions]`: how many tokens of its row come before each position."""
        found = np.empty(self.num_positions, dtype=np.int32)
        path: list[tuple[Segment, int]] = []
        for segment in self.segments:
            while path and path[-1][0].subtree_stop <= segment.start:
                path.pop()
            first = path[-1][1] + path[-1][0].stop - path[-1][0].start if path else 0
            path.append((segment, first))
            found[segment.start : segment.stop] = np.arange(first, first + segment.stop - segment.start)
        return found

    def block_mask(self, device: torch.device, window: int | None = None) -> BlockMask:
        """For flex attention. `window`: a token sees itself and the `window - 1` tokens of its row before it."""
        key = f"block_mask {window}"
        if key not in self._derived:
            self._derived[key] = _block_mask(self, window, device)
        found: BlockMask = self._derived[key]
        return found


def block_size(num_positions: int) -> int:
    """Positions on a side of a block of the mask of so many positions."""
    size = BLOCK
    while num_positions > size * MAX_BLOCKS:
        size *= 2
    return size


def _block_mask(segments: Segments, window: int | None, device: torch.device) -> BlockMask:
    reach, size = segments.reach(), segments.num_positions
    depths = None if window is None else segments.depths()
    block = block_size(size)
    some, full = _blocks(reach, depths, window, block)
    if len(some) == 1:
        # torch compiles another graph for a size of 1. Kernels do not look at a block behind the last position.
        some, full = np.pad(some, (0, 1)), np.pad(full, (0, 1))
    # Built on the host, where its scratch space is no matter, and moved as int32 [blocks] and [blocks, blocks].
    counts, indices = zip(_ordered(some & ~full), _ordered(full))
    host = BlockMask.from_kv_blocks(
        counts[0], indices[0], counts[1], indices[1], BLOCK_SIZE=block, seq_lengths=(size, size)
    )
    found: BlockMask = host.to(device)
    found.mask_mod = _visible(
        torch.from_numpy(reach).to(device, non_blocking=True),
        None if depths is None else torch.from_numpy(depths).to(device, non_blocking=True),
        window,
    )
    return found


def _visible(reach: Tensor, depths: Tensor | None, window: int | None) -> Any:
    """The rule itself, for blocks that are read in part."""

    def above(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < reach[key])

    if depths is None or window is None:
        return above
    depth, within = depths, window

    def near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return above(batch, head, query, key) & (depth[query] - depth[key] < within)

    return near


def _blocks(
    reach: NDArray[np.int32], depths: NDArray[np.int32] | None, window: int | None, block: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Two of bool `[blocks of queries, blocks of keys]`: of which some pair is visible, and of which each one is.

    Without a window both are exact. With one the first may hold blocks of which no pair is visible and the second may
    lack blocks of which all are, where a block mixes depths: the rule decides there, pair by pair.
    """
    starts = np.arange(0, len(reach), block)
    earlier = starts[:, None] > starts
    some = earlier & (np.maximum.reduceat(reach, starts) > starts[:, None])
    full = earlier & (np.minimum.reduceat(reach, starts) >= starts[:, None] + block)
    if depths is not None and window is not None:
        low, high = np.minimum.reduceat(depths, starts), np.maximum.reduceat(depths, starts)
        some &= low[:, None] - high < window
        full &= high[:, None] - low < window
    return some | np.eye(len(starts), dtype=np.bool_), full


def _ordered(blocks: NDArray[np.bool_]) -> tuple[Tensor, Tensor]:
    """Return blocks as flex attention takes them: int32 `[1, 1, blocks]` counts, and `[1, 1, blocks, blocks]` numbers
    of the blocks of keys that a block of queries reads, in order, before those that it does not."""
    counts, indices = blocks.sum(axis=1), np.argsort(~blocks, axis=1, kind="stable")
    return tuple(torch.from_numpy(each.astype(np.int32))[None, None] for each in (counts, indices))  # type: ignore[return-value]
