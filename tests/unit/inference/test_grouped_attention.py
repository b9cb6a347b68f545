"""Attention over a cache that query heads share, against transformers' own call and against a forward without a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from skyrl_train.inference.grouped_attention import GROUPED, grouped_attention, use_grouped_attention
from tests.support.model_layouts import EXACT, build


class _Layer(torch.nn.Module):
    def __init__(self, sharing: int) -> None:
        super().__init__()
        self.num_key_value_groups, self.is_causal = sharing, True


@pytest.mark.parametrize("mask", ["none", "bool", "float", "per head"])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("sharing", [1, 3])
def test_output_is_that_of_repeated_keys(sharing: int, tokens: int, mask: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, key_heads, columns, size = 2, 2, 7, 8

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query = draw(rows, key_heads * sharing, tokens, size)
    key, value = draw(rows, key_heads, columns, size), draw(rows, key_heads, columns, size)
    visible = torch.arange(columns) <= torch.arange(columns - tokens, columns)[:, None]
    visible = visible.repeat(rows, 1, 1, 1)
    visible[1, ..., :2] = False
    given = {
        "none": None,
        "bool": visible,
        "float": torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -torch.inf),
        "per head": visible.expand(-1, key_heads * sharing, -1, -1),
    }[mask]
    layer = _Layer(sharing)
    found, _ = grouped_attention(layer, query, key, value, given, scaling=0.3)
    expected, _ = sdpa_attention_forward(layer, query, key, value, given, scaling=0.3)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "extra"), EXACT, ids=lambda value: value if isinstance(value, str) else ",".join(value)
)
def test_a_model_that_takes_it_computes_what_it_computed(kind: str, extra: dict[str, Any]) -> None:
    model = build(kind, extra).requires_grad_(False)
    ids = torch.arange(2, 26).view(2, 12) % model.config.vocab_size
    expected = model(input_ids=ids, use_cache=False).logits
    use_grouped_attention(model)
    assert model.config._attn_implementation == GROUPED
    mask = torch.ones_like(ids, dtype=torch.bool)
    begun = model(input_ids=ids[:, :9], attention_mask=mask[:, :9], use_cache=True)
    cache, logits = begun.past_key_values, [begun.logits]
    for column in range(9, 12):
        output = model(
            input_ids=ids[:, column : column + 1],
            attention_mask=mask[:, : column + 1],
            past_key_values=cache,
            use_cache=True,
        )
        logits.append(output.logits)
    torch.testing.assert_close(torch.cat(logits, dim=1), expected)
