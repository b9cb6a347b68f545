"""The forward of a model under a layout, and the models for which layouts are exact.

Packed rows and prefix trees are exact for a model whose tokens mix in attention alone, through the attention interface
of transformers. A state-space or linear-attention layer carries a state from each position to the next and would mix
rows; such a model is refused. So is one whose position encoding depends on the longest row of a forward, and one whose
attention sees chunks. The same models can be computed by several ranks together, of which each has a part of the
positions (`distributed/sequence_parallel.py`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from skyrl_train.batch import TrainingInputBatch, batch_of_lengths
from skyrl_train.batch.layouts import Layout, Segment, padded_layout, shared_layout
from skyrl_train.config.fields import LayoutChoice
from skyrl_train.errors import ModelError
from skyrl_train.model.last_layer import language_model
from skyrl_train.model.layers.attention import ATTENTION, PADDED, register
from skyrl_train.model.layers.segments import Segments

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_PADDED_ATTENTION = "skyrl_padded_attention"
"""Attribute of a model that remembers the attention it was loaded with."""
_TOLERANCE, _HALF_TOLERANCE = 1e-3, 0.03
"""Largest difference between layouts, relative to the largest hidden value, that is rounding in float32, or in half
precision."""
_LAYER_TYPES = ("full_attention", "sliding_attention")
_OTHER_MASKS = ("attention_chunk_size", "use_bidirectional_attention")
"""Fields of a config under which rows attend in other ways."""


def hidden_states(model: PreTrainedModel, layout: Layout) -> Tensor:
    """`[positions, hidden]`: the last hidden state of each position of the layout's forward that this rank computes.

    No mask is made for padding on the right: attention is causal, so no token sees it, and values there are never read.
    """
    extra: dict[str, Any] = {}
    if layout.segments or layout.group:
        _use_attention(model, ATTENTION)
        # transformers hands arguments that it does not know on to the attention function
        extra["segments"] = Segments(layout.segments or _one_segment(layout), layout.longest, layout.group)
    else:
        _use_attention(model, _padded_attention(model, layout.input_ids.device))
    hidden: Tensor = model.base_model(
        input_ids=layout.input_ids, position_ids=layout.position_ids, use_cache=False, **extra
    ).last_hidden_state
    return hidden.flatten(0, 1)


def _one_segment(layout: Layout) -> tuple[Segment, ...]:
    """Return the segment of padded rows: all of a row, what fills it up included."""
    width = layout.num_positions // len(layout.input_ids)
    return (Segment(0, width, width),)


def _padded_attention(model: PreTrainedModel, device: torch.device) -> str:
    """Return the attention that the model was loaded with; on CUDA, where rows attend in no other way than this package
    knows, `PADDED`."""
    loaded = _loaded_attention(model)
    return PADDED if loaded == "sdpa" and device.type == "cuda" and _is_plain(model) else loaded


def _loaded_attention(model: PreTrainedModel) -> str:
    if not hasattr(model, _PADDED_ATTENTION):
        loaded = str(language_model(model).config._attn_implementation)
        # The fused kernels leave a cap on the scores out.
        capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
        setattr(model, _PADDED_ATTENTION, "eager" if capped and loaded == "sdpa" else loaded)
    return str(getattr(model, _PADDED_ATTENTION))


def _is_plain(model: PreTrainedModel) -> bool:
    """Whether tokens attend to those before them, all or the last few, and to no others."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ()
    others = [name for name in _OTHER_MASKS if getattr(config, name, None)]
    return all(kind in _LAYER_TYPES for kind in kinds) and not others and getattr(config, "is_causal", True)


def _use_attention(model: PreTrainedModel, name: str) -> None:
    if name in (ATTENTION, PADDED):
        register()
        _loaded_attention(model)
    part = language_model(model)  # a vision tower attends to its patches as it was loaded
    if part.config._attn_implementation != name:
        part.set_attn_implementation(name)


def supported_layout(
    model: PreTrainedModel, layout: LayoutChoice, *, name: str, sequence_parallel_size: int = 1
) -> LayoutChoice:
    """The layout, checked on this model; `auto` becomes `padded`, with a line in the log, where nothing else is exact.

    Raises ModelError for another layout that is not, and for a model of which so many ranks cannot compute a forward
    together.
    """
    together = sequence_parallel_size > 1
    if together:
        _require_divisible_heads(model, sequence_parallel_size, name=name)
    if layout == "padded" and not together:
        return layout
    try:
        check_layouts(model, name=name)
    except ModelError as error:
        if together:
            raise ModelError(
                f"{error} and strategy.sequence_parallel_size=1 in place of {sequence_parallel_size}: ranks that share "
                "a forward ask the same of a model"
            ) from error
        if layout != "auto":
            raise
        logger.info("layout: padded, since %s", error)
        return "padded"
    return layout


@torch.no_grad()
def check_layouts(model: PreTrainedModel, *, name: str) -> None:
    """Raises ModelError where the model gives other hidden states for a prefix tree than for its rows one by one."""
    config = model.config.get_text_config()
    other = [kind for kind in getattr(config, "layer_types", None) or () if kind not in _LAYER_TYPES]
    if other or getattr(model, "_is_stateful", False):
        raise _refusal(name, model, f"has {sorted(set(other))[0] if other else 'recurrent'} layers, which mix rows")
    scaling = _rope_type(config)
    if scaling in ("dynamic", "longrope"):
        raise _refusal(name, model, f"scales its positions ({scaling}) by the longest row of a forward")
    rows = _probe(config.vocab_size)
    tree = shared_layout(rows)
    plain = padded_layout(rows)
    try:
        found = _token_states(model, tree)
    except ModelError as error:
        raise ModelError(f"model path {name!r}: {error}") from error
    except Exception as error:
        raise _refusal(name, model, f"does not compute them ({type(error).__name__}: {error})") from error
    expected = _token_states(model, plain)
    difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12))
    if not difference <= (_TOLERANCE if model.dtype == torch.float32 else _HALF_TOLERANCE):
        raise _refusal(name, model, f"computes other hidden states under them (by {difference:.2g} of their size)")


def _require_divisible_heads(model: PreTrainedModel, size: int, *, name: str) -> None:
    heads = int(model.config.get_text_config().num_attention_heads)
    if heads % size:
        fitting = [str(count) for count in range(1, heads + 1) if heads % count == 0]
        raise ModelError(
            f"model path {name!r}: strategy.sequence_parallel_size={size} must divide its {heads} attention heads, of "
            f"which each rank computes a part. Try {' or '.join(fitting)}"
        )


def _refusal(name: str, model: PreTrainedModel, reason: str) -> ModelError:
    return ModelError(
        f"model path {name!r}: packed and prefix-shared rows are not exact for {type(model).__name__}, which {reason}. "
        "Set trainer.layout=padded"
    )


def _rope_type(config: Any) -> str:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    found = {str(kind.get("rope_type") or kind.get("type") or "default") for kind in kinds}
    return next((kind for kind in ("dynamic", "longrope") if kind in found), "default")


def _probe(vocabulary: int) -> TrainingInputBatch:
    """Rows that branch twice and one that shares nothing."""
    low = max(0, min(8, vocabulary - 8))
    rows = [[0, 1, 2, 3, 4], [0, 1, 2, 5, 6, 7], [0, 1, 2, 5, 1], [7, 6, 5]]
    batch = batch_of_lengths([len(row) for row in rows])
    ids = torch.tensor([low + token for row in rows for token in row], dtype=torch.int32).clamp(max=vocabulary - 1)
    return batch.with_columns(input_ids=ids)


def _token_states(model: PreTrainedModel, layout: Layout) -> Tensor:
    return hidden_states(model, layout.to(model.device)).float().cpu()[layout.position_of_token]
