"""Attention of few new tokens over a cache, for models whose query heads share keys and values.

transformers' own repeats keys and values for each query head before a masked call, which copies the whole cache in every
layer for every token. The query heads that share a key are queries like any other: here they are put beside each other,
`[rows, key heads, sharing heads x tokens, size]`, and the cache is read as it lies.

Samples of one prompt read its keys and values from one place (`kv_cache.SharedKeys`), as a product of matrices: the queries
of all of them against one prompt. What they read of their own, and the softmax over both, is each row's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from skyrl_train.inference.kv_cache import BatchCache, SharedKeys, num_attention_layers

GROUPED = "skyrl_grouped"
"""The name under which transformers finds `grouped_attention`."""


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Have a model of attention layers that takes torch's fused attention take it this way; on a CPU, which is where the
    copies were measured."""
    fused = model.config.get_text_config(decoder=True)._attn_implementation == "sdpa"
    if fused and model.device.type == "cpu" and num_attention_layers(model) is not None:
        AttentionInterface.register(GROUPED, grouped_attention)
        AttentionMaskInterface.register(GROUPED, sdpa_mask)
        model.set_attn_implementation(GROUPED)


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As `sdpa_attention_forward`: query `[rows, heads, tokens, size]`, key and value `[rows, key heads, columns, size]`,
    mask bool or to be added, `[rows or 1, 1, tokens, columns]`; returns `[rows, tokens, heads, size]`."""
    shared = getattr(key, "shared", None)
    if shared is not None:
        return _shared_attention(query, key, value, attention_mask, scaling, shared), None
    rows, heads, tokens, _ = query.shape
    sharing = heads // key.shape[1]
    # without a mask, several tokens see each other causally, for which torch's own call needs no copies
    unmasked = attention_mask is None and tokens > 1
    per_head = attention_mask is not None and attention_mask.shape[1] > 1
    if sharing == 1 or unmasked or per_head or others.get("position_bias") is not None:
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
        return found
    if attention_mask is not None:
        attention_mask = attention_mask[:, :, None].expand(-1, -1, sharing, -1, -1).flatten(2, 3)
    out = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, key.shape[1], sharing * tokens, query.shape[-1]),
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
    )
    return out.view(rows, heads, tokens, value.shape[-1]).transpose(1, 2).contiguous(), None


def _shared_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, shared: SharedKeys
) -> Tensor:
    """Attention of one new token a row. `mask` has the columns of the prompts and then those of `key`."""
    rows, heads, _, size = query.shape
    sharing = heads // key.shape[1]
    scaled = (query * (size**-0.5 if scaling is None else scaling)).view(rows, key.shape[1], sharing, size)
    of_prompt = shared.collect(shared.spread(scaled) @ shared.keys.transpose(2, 3), sharing)
    scores = torch.cat([of_prompt, scaled @ key.transpose(2, 3)], dim=3)
    if mask is not None:
        scores = scores.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else scores.add_(mask)
    weights = scores.softmax(dim=3)
    width = shared.keys.shape[2]
    out = weights[..., width:] @ value
    out += shared.collect(shared.spread(weights[..., :width]) @ shared.values, sharing)
    return out.view(rows, 1, heads, value.shape[3])


@torch.inference_mode()
def reads_shared_keys(model: PreTrainedModel) -> bool:
    """Whether the model hands what its cache gives to the attention above and takes nothing else into account: tried with
    two samples of a prompt. Only in float32, in which the products above lose nothing."""
    num_layers = num_attention_layers(model)
    config = model.config.get_text_config(decoder=True)
    if config._attn_implementation != GROUPED or model.dtype != torch.float32 or num_layers is None:
        return False
    tokens = torch.arange(3, 8, device=model.device).remainder(config.vocab_size)
    places = torch.arange(5, device=model.device)
    found = []
    try:
        for shares in (False, True):
            prompt = BatchCache(num_layers, reserve=4)
            model(
                input_ids=tokens[None, :4], use_cache=True, **prompt.arguments(places[None, :4] >= 0, places[None, :4])
            )
            rows = [prompt.read_row(0, places[:4])] * 2
            cache = BatchCache(num_layers, reserve=5, rows=rows, shares=shares)
            given = cache.arguments((places >= 0).expand(2, -1), places[4:].expand(2, -1))
            found.append(model(input_ids=tokens[4:].expand(2, -1), use_cache=True, **given).logits)
    except (RuntimeError, TypeError, ValueError):
        return False
    alone, together = found
    return torch.allclose(alone, together, rtol=1e-4, atol=1e-4)
