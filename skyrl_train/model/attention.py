"""Attention over packed rows and prefix trees, for unmodified models of transformers.

A forward of one long row is cut into segments (`batch/prefix_tree.py`): the tokens of a segment attend causally to
each other and fully to every segment above theirs. Positions are in depth-first order, so everything below a segment is
one slice, and all of it attends to the segment in one call:

    for every segment s       out[s] = causal attention of s over itself                  (rows, or parts of them)
    for every segment s       out[below s] joined with full attention of below(s) over s  (a shared prefix)

Two partial results over different keys join exactly (`joined_attention.py`). No mask is ever built.

Back ends: on a CPU the fused kernel of torch, per segment, joined. On CUDA the variable-length flash kernel of torch for
packed rows in bfloat16 or float16, and flex attention with a block mask for trees and for float32. Where a sliding window
is shorter than a row, or scores are capped, plain products with a mask per segment: exact, slower.

Where ranks share a forward (`distributed/sequence_parallel.py`), each exchanges the other heads of its positions for the
other positions of its heads before, and back after; in between all of the above holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from skyrl_train.batch.layout import PositionGroup
from skyrl_train.batch.prefix_tree import Segment
from skyrl_train.errors import ModelError
from skyrl_train.model.joined_attention import Parts, accumulator, all_parts, joined_attention, parts_of_queries
from skyrl_train.model.numerics import is_deterministic

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

ATTENTION = "skyrl_segments"
"""The name under which transformers finds `segment_attention`."""

READ = "skyrl_read_positions"
"""Attribute of an attention module of which fewer queries may be asked (`model/last_layer.py`)."""


@dataclass
class Segments:
    """Who attends to whom in one forward; what back ends derive from it is kept for all layers."""

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
            self._derived["offsets"] = torch.tensor(bounds, dtype=torch.int32, device=device), longest
        found: tuple[Tensor, int] = self._derived["offsets"]
        return found

    def reach(self, device: torch.device) -> Tensor:
        """int64 `[positions]`: where the subtree of each position's segment ends: key k is above query q where
        `k <= q < reach[k]`."""
        if "reach" not in self._derived:
            ends = torch.tensor([segment.subtree_stop for segment in self.segments], device=device)
            sizes = torch.tensor([segment.stop - segment.start for segment in self.segments], device=device)
            self._derived["reach"] = torch.repeat_interleave(ends, sizes)
        found: Tensor = self._derived["reach"]
        return found

    def parts(self) -> Parts:
        """For the CPU's kernel."""
        if "parts" not in self._derived:
            self._derived["parts"] = all_parts(self.segments)
        found: Parts = self._derived["parts"]
        return found

    def block_mask(self, device: torch.device) -> BlockMask:
        """For flex attention."""
        if "block_mask" not in self._derived:
            from torch.nn.attention.flex_attention import create_block_mask

            reach, size = self.reach(device), self.num_positions

            def above(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                return (key <= query) & (query < reach[key])

            self._derived["block_mask"] = create_block_mask(above, None, None, size, size, device=str(device))
        found: BlockMask = self._derived["block_mask"]
        return found


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The reference: plain products, segment by segment against the segments above, with a mask for each.

    `window`: a token sees itself and the `window - 1` tokens of its row before it. `softcap`: scores become
    `softcap * tanh(score / softcap)`.
    """
    groups = query.shape[1] // key.shape[1]
    keys, values = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    parts: list[Tensor] = []
    path: list[Segment] = []
    for segment in segments.segments:
        while path and path[-1].subtree_stop <= segment.start:
            path.pop()
        path.append(segment)
        seen = torch.cat([torch.arange(each.start, each.stop, device=query.device) for each in path])
        own = segment.stop - segment.start
        scores = (query[:, :, segment.start : segment.stop] * scale) @ keys[:, :, seen].transpose(2, 3)
        scores = scores.to(accumulator(scores.dtype))
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        depth = torch.arange(len(seen), device=query.device)
        distance = depth[-own:, None] - depth
        allowed = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        probabilities = scores.masked_fill(~allowed, -torch.inf).softmax(-1).to(value.dtype)
        parts.append(probabilities @ values[:, :, seen])
    return torch.cat(parts, dim=2)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    read: Tensor | None,
) -> Tensor:
    """With `read`, other positions than these may be left 0."""
    if window is not None and window >= segments.longest_path:
        window = None
    if window is not None or softcap is not None or key.shape[-1] != value.shape[-1]:
        return masked_attention(query, key, value, segments, scale=scale, window=window, softcap=softcap)
    if query.device.type == "cpu":
        parts = None if read is None else parts_of_queries(segments.segments, read.tolist())
        if read is None or parts is None:
            return joined_attention(query, key, value, segments.parts(), scale=scale)
        found = joined_attention(query.index_select(2, read), key, value, parts, scale=scale)
        return torch.zeros_like(query).index_copy(2, read, found)
    return _attend_on_cuda(query, key, value, segments, scale=scale)


def _attend_on_cuda(query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, scale: float) -> Tensor:
    """The fused kernel for rows of one segment, variable-length flash attention for packed rows in half precision, else
    flex attention."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    if len(segments.segments) == 1:
        if not half:  # of the fused kernels, only those for half precision know grouped heads
            key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    if not segments.is_tree and half:
        return varlen(query, key, value, segments, scale=scale)
    return flex(query, key, value, segments, scale=scale, compiled=True)


def varlen(query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, scale: float) -> Tensor:
    """torch's flash attention over packed rows; on CUDA, in half precision."""
    from torch.nn.attention import varlen as library

    offsets, longest = segments.offsets(query.device)
    q, k, v = (each.squeeze(0).transpose(0, 1) for each in (query, key, value))
    function: Any = library.varlen_attn
    found: Tensor = function(
        q,
        k,
        v,
        offsets,
        offsets,
        longest,
        longest,
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
        num_splits=1 if is_deterministic() else None,
    )
    return found.transpose(0, 1).unsqueeze(0)


def flex(query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, scale: float, compiled: bool) -> Tensor:
    """Flex attention with the tree's block mask. Has no backward on a CPU."""
    from torch.nn.attention import flex_attention as library

    function: Any = library.flex_attention
    if compiled:
        function = _COMPILED.setdefault("flex", torch.compile(library.flex_attention, dynamic=True))
    found: Tensor = function(
        query,
        key,
        value,
        block_mask=segments.block_mask(query.device),
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return found


_COMPILED: dict[str, Any] = {}


def segment_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    segments: Segments | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What a model's layers call in place of their own attention; `[rows, positions, heads, size]`.

    Raises ModelError for a model that does not hand `segments` on, or whose attention has a term that is not known.
    """
    name = type(module).__name__
    if segments is None:
        raise ModelError(f"{name} does not hand the layout of its rows to its attention. Set trainer.layout=padded")
    unknown = [key for key in _TERMS if others.get(key) is not None]
    if unknown or dropout:
        raise ModelError(
            f"{name}: attention with {', '.join(unknown) or 'dropout'} is not known to merged layouts. "
            "Set trainer.layout=padded"
        )
    # Under autocast, rotary embeddings leave query and key in float32; kernels want one type.
    query, key = query.to(value.dtype), key.to(value.dtype)
    group = segments.group
    if group is not None:
        query, key, value = group.to_heads(query, key, value)
    out = _attend(
        query,
        key,
        value,
        segments,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        read=getattr(module, READ).value if group is None and hasattr(module, READ) else None,
    )
    return (out if group is None else group.to_positions(out)).transpose(1, 2), None


_TERMS = ("s_aux", "position_bias", "head_mask", "cache")
"""Arguments that change what attention computes, in models that merged layouts do not know."""


_registered: dict[str, Any] = {ATTENTION: segment_attention}


def leave_uncompiled() -> None:
    """From now on layers that torch compiles call attention over segments as it is: traced, it would be compiled anew
    for each set of segments."""
    if _registered[ATTENTION] is segment_attention:
        disable: Any = torch.compiler.disable
        _registered[ATTENTION] = disable(segment_attention)


def register() -> None:
    """Makes `ATTENTION` known to transformers, with no mask."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _registered[ATTENTION])
    AttentionMaskInterface.register(ATTENTION, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    return None
