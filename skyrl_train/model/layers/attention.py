"""Attention over packed rows and prefix trees, for unmodified models of transformers.

A forward of one long row is cut into segments (`batch/layouts/prefix_tree.py`): the tokens of a segment attend causally to
each other and fully to every segment above theirs. Positions are in depth-first order, so everything below a segment is
one slice, and all of it attends to the segment in one call:

    for every segment s       out[s] = causal attention of s over itself                  (rows, or parts of them)
    for every segment s       out[below s] joined with full attention of below(s) over s  (a shared prefix)

Two partial results over different keys join exactly (`joined_attention.py`). No mask is ever built.

Back ends: on a CPU the fused kernel of torch, per segment, joined; plain products with a mask per segment where a sliding
window is shorter than a row, or scores are capped. On CUDA:

    one segment a row                          scaled_dot_product_attention
    packed rows in bfloat16 or float16         variable-length flash attention, which knows windows
    trees, float32, caps, other value sizes    flex attention over a block mask (`model/layers/segments.py`)
    heads of fewer than 16 numbers             plain products: Triton multiplies no smaller matrices

Where ranks share a forward (`distributed/sequence_parallel.py`), each exchanges the other heads of its positions for the
other positions of its heads before, and back after; in between all of the above holds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config as dynamo
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from skyrl_train.batch.layouts import Segment
from skyrl_train.errors import ModelError
from skyrl_train.model.layers.joined_attention import accumulator, joined_attention, parts_of_queries
from skyrl_train.model.layers.numerics import is_deterministic
from skyrl_train.model.layers.segments import Segments
from skyrl_train.model.parallel.torch_versions import VARLEN_OPTIONS

ATTENTION, PADDED = "skyrl_segments", "skyrl_padded"
"""The names under which transformers finds `segment_attention` and `padded_attention`."""

READ = "skyrl_read_positions"
"""Attribute of an attention module of which fewer queries may be asked (`model/last_layer.py`)."""


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
    keys, values = expanded(key, value, num_heads=query.shape[1])
    parts: list[Tensor] = []
    path: list[Segment] = []
    for segment in segments.segments:
        # depth-first order: what ended before this segment is not above it
        while path and path[-1].subtree_stop <= segment.start:
            path.pop()
        path.append(segment)
        seen = torch.cat([torch.arange(each.start, each.stop, device=query.device) for each in path])
        own = segment.stop - segment.start
        scores = (query[:, :, segment.start : segment.stop] * scale) @ keys[:, :, seen].transpose(2, 3)
        # as fused kernels do: softmax in float32 whatever the type of the products
        scores = scores.to(accumulator(scores.dtype))
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        # distances within the row, of which positions of the forward know nothing where rows share a prefix
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
    """Attention of one forward by the kernel that fits. With `read`, other positions than these may be left 0."""
    # a window that no row is longer than changes nothing, and the fastest kernels know none
    if window is not None and window >= segments.longest_path:
        window = None
    if query.device.type != "cpu":
        return _attend_on_cuda(query, key, value, segments, scale=scale, window=window, softcap=softcap)
    if window is None and softcap is None and key.shape[-1] == value.shape[-1]:
        parts = None if read is None else parts_of_queries(segments.segments, read.tolist())
        if read is None or parts is None:
            return joined_attention(query, key, value, segments.parts(), scale=scale)
        found = joined_attention(query.index_select(2, read), key, value, parts, scale=scale)
        return torch.zeros_like(query).index_copy(2, read, found)
    return masked_attention(query, key, value, segments, scale=scale, window=window, softcap=softcap)


def _attend_on_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention by the first kernel of the module's table that computes this."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    same_size = key.shape[-1] == value.shape[-1]
    if len(segments.segments) == 1 and window is None and softcap is None and same_size:
        return _causal(query, key, value, scale=scale)
    # flash attention has no kernel for float32, for trees, or for values of another size
    flash = half and same_size and query.shape[-1] <= _MOST_FLASH and query.shape[-1] % 8 == 0
    if flash and not segments.is_tree and softcap is None and query.shape[0] == 1:
        return varlen(query, key, value, segments, scale=scale, window=window)
    if min(query.shape[-1], value.shape[-1]) < _LEAST_FLEX:
        return masked_attention(query, key, value, segments, scale=scale, window=window, softcap=softcap)
    return flex(query, key, value, segments, scale=scale, window=window, softcap=softcap, compiled=True)


_MOST_FLASH, _LEAST_FLEX = 256, 16
"""Numbers of a head: the most that flash attention takes (in multiples of 8), the least that flex attention does."""


def expanded(key: Tensor, value: Tensor, *, num_heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values `[rows, grouped heads, positions, size]`, each repeated for the queries' heads that share it."""
    repeats = num_heads // key.shape[1]
    return key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)


def varlen(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, scale: float, window: int | None = None
) -> Tensor:
    """torch's flash attention over packed rows; on CUDA, in half precision. `window` as in `masked_attention`."""
    offsets, longest = segments.offsets(query.device)
    options = {"enable_gqa": query.shape[1] != key.shape[1], "num_splits": 1 if is_deterministic() else None}
    if "enable_gqa" not in VARLEN_OPTIONS:
        key, value = expanded(key, value, num_heads=query.shape[1])
    q, k, v = (each.squeeze(0).transpose(0, 1) for each in (query, key, value))
    function: Any = varlen_attn
    found: Tensor = function(
        q,
        k,
        v,
        offsets,
        offsets,
        longest,
        longest,
        scale=scale,
        # tokens to the left and to the right that are seen beside the token itself; -1 is all
        window_size=(-1 if window is None else window - 1, 0),
        **{name: options[name] for name in options if name in VARLEN_OPTIONS},
    )
    return found.transpose(0, 1).unsqueeze(0)


def flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    compiled: bool,
) -> Tensor:
    """Flex attention with the segments' block mask. Has no backward on a CPU.

    Raises ModelError where `compiled` and another graph is needed than the most that one process may have.
    """
    function: Any = compiled_flex() if compiled else flex_attention
    try:
        found: Tensor = function(
            query,
            key,
            value,
            score_mod=None if softcap is None else _capped(softcap),
            block_mask=segments.block_mask(query.device, window),
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
            # one kernel for forwards of all sizes: that for few queries splits keys, and does not know every grouping of
            # heads
            kernel_options={"BACKEND": "TRITON"},
        )
    except FailOnRecompileLimitHit as error:
        raise ModelError(
            f"flex attention would need more than {MOST_FLEX_GRAPHS} compiled graphs in one process, and uncompiled it "
            "takes memory in proportion to the square of positions. Set trainer.layout=packed with model.dtype=bfloat16, or "
            "trainer.layout=padded"
        ) from error
    return found


MOST_FLEX_GRAPHS = 64
"""Graphs of flex attention in one process. One serves forwards of all sizes; each model's heads, window, cap and type need
another, in training and in scoring. torch's own limit of 8 a function is reached by two models."""


@cache
def compiled_flex(backend: str | Callable[..., Any] = "inductor") -> Any:
    """Return torch's flex attention, compiled by `backend` as one whole graph: where it cannot be, it raises rather than
    computing every pair of positions."""
    dynamo.recompile_limit = max(dynamo.recompile_limit, MOST_FLEX_GRAPHS)
    return torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend)


@cache
def _capped(softcap: float) -> Any:
    """Return the same function for the same cap: another one would be compiled again."""

    def cap(score: Tensor, _batch: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


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


def padded_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of padded rows on CUDA, as `segment_attention` with one segment: grouped heads in float32 do not fall to
    plain products, nor do windows, and no mask is made. Each row is its own, and none sees what fills it up behind it."""
    width = query.shape[2]
    if (sliding_window is None or sliding_window >= width) and others.get("softcap") is None:
        # not by way of segments, which a compiled layer would be traced for
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return _causal(query.to(value.dtype), key.to(value.dtype), value, scale=scale).transpose(1, 2), None
    one = Segments((Segment(0, width, width),), width)
    terms: dict[str, Any] = {"scaling": scaling, "sliding_window": sliding_window, "segments": one, **others}
    return segment_attention(module, query, key, value, attention_mask, **terms)


def _causal(query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> Tensor:
    """torch's fused kernels, of which only those for half precision know grouped heads."""
    if query.dtype not in (torch.bfloat16, torch.float16):
        key, value = expanded(key, value, num_heads=query.shape[1])
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )


_registered: dict[str, Any] = {ATTENTION: segment_attention, PADDED: padded_attention}


def leave_uncompiled() -> None:
    """From now on layers that torch compiles call attention over segments as it is: traced, it would be compiled anew
    for each set of segments."""
    if _registered[ATTENTION] is segment_attention:
        disable: Any = torch.compiler.disable
        _registered[ATTENTION] = disable(segment_attention)


def register() -> None:
    """Makes `ATTENTION` and `PADDED` known to transformers. It makes no mask for names of which it knows none, and does not
    look for packed rows then, for which it would wait for the device."""
    for name, function in _registered.items():
        AttentionInterface.register(name, function)
