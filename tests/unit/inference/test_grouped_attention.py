"""Attention over a cache that query heads share, against transformers' own call and against a forward without a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from skyrl_train.inference.decode import Decoder
from skyrl_train.inference.grouped_attention import GROUPED, grouped_attention, reads_shared_keys, use_grouped_attention
from skyrl_train.inference.kv_cache import SharedKeys
from skyrl_train.types import GenerationRequest, SamplingParams
from tests.support.fakes import make_tiny_model
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


def test_samples_that_read_a_prompt_together_are_what_each_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over two turns, with prompts of several lengths and numbers of samples, of which some end early."""
    model = make_tiny_model().double()
    use_grouped_attention(model)
    alone = Decoder(model, eos_token_ids=frozenset(), pad_token_id=0, decode_text=lambda _: "")
    together = Decoder(model, eos_token_ids=frozenset(), pad_token_id=0, decode_text=lambda _: "")
    alone._shares, together._shares = False, True
    read: list[int] = []
    spread = SharedKeys.spread
    monkeypatch.setattr(SharedKeys, "spread", lambda self, rows: read.append(len(rows)) or spread(self, rows))
    prompts = [(2, 6, 4, 9)] * 4 + [(2, 6, 4, 9, 20, 11, 30)] * 3 + [(12,)]
    for turn in range(2):
        requests = [
            GenerationRequest(
                request_id=f"{turn}-{index}",
                prompt_token_ids=prompt,
                sampling=SamplingParams(temperature=1.0, max_generate_length=2 + 2 * index),
                seed=10 * turn + index,
            )
            for index, prompt in enumerate(prompts)
        ]
        read.clear()
        found = together.run(requests)
        assert read[0] == len(prompts)
        assert read[-1] < len(prompts)
        for request, response in zip(requests, found):
            (own,) = alone.run([request])
            assert response.token_ids == own.token_ids
            assert response.logprobs == pytest.approx(own.logprobs, abs=1e-6)
            ids = [*request.prompt_token_ids, *response.token_ids]
            plain = model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(dim=-1)
            begin = len(request.prompt_token_ids)
            expected = [float(plain[place - 1, ids[place]].detach()) for place in range(begin, len(ids))]
            assert response.logprobs == pytest.approx(expected, abs=1e-6)
        prompts = [(*prompt, *response.token_ids, 7, 8) for prompt, response in zip(prompts, found)]


def test_a_model_whose_keys_are_changed_on_their_way_reads_no_shared_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model()
    assert not reads_shared_keys(model)
    use_grouped_attention(model)
    assert reads_shared_keys(model)
    inner = grouped_attention

    def on_copies(module: Any, query: Any, key: Any, value: Any, *args: Any, **others: Any) -> Any:
        return inner(module, query, key.clone(), value, *args, **others)

    monkeypatch.setitem(AttentionInterface._global_mapping, GROUPED, on_copies)
    assert not reads_shared_keys(model)
