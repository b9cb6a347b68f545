"""Generation with a tiny random model, compared with plain forward passes over the whole sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from skyrl_train.inference.decode import Decoder, Response
from skyrl_train.inference.kv_cache import RowState
from skyrl_train.inference.prefill import KeptPrefixes
from skyrl_train.types import GenerationRequest, SamplingParams, StopReason
from tests.support.fakes import make_tiny_model, make_tokenizer

PROMPTS: list[tuple[int, ...]] = [(2, 6, 4, 9), (2, 6, 4, 9, 20, 11, 30), (12,), (2, 6, 4, 9)]
TOKENIZER = make_tokenizer()


def make_decoder(model: PreTrainedModel, eos: Sequence[int] = ()) -> Decoder:
    return Decoder(
        model,
        eos_token_ids=frozenset(eos),
        pad_token_id=0,
        decode_text=lambda token_ids: TOKENIZER.decode(list(token_ids), skip_special_tokens=False),
    )


def make_requests(prompts: Sequence[tuple[int, ...]] = PROMPTS, first_seed: int = 1, **params: Any) -> Any:
    sampling = SamplingParams(**{"max_generate_length": 12, **params})
    return [
        GenerationRequest(request_id=f"r{index}", prompt_token_ids=prompt, sampling=sampling, seed=first_seed + index)
        for index, prompt in enumerate(prompts)
    ]


def logprobs_of(
    model: PreTrainedModel, prompt: tuple[int, ...], response: tuple[int, ...], temperature: float
) -> list[float]:
    """Of the response's tokens, by one forward pass without a cache."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]]), use_cache=False).logits[0] / temperature
    logprobs = logits.log_softmax(dim=-1)
    return [float(logprobs[len(prompt) - 1 + t, token]) for t, token in enumerate(response)]


def test_greedy_responses_are_the_likeliest_tokens_whatever_the_batch() -> None:
    model = make_tiny_model()
    for prompt, response in zip(PROMPTS, make_decoder(model).run(make_requests(temperature=0.0))):
        expected: list[int] = []
        for _ in range(12):
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *expected]]), use_cache=False).logits[0, -1]
            expected.append(int(logits.argmax()))
        assert response.token_ids == tuple(expected)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.5])
def test_logprobs_are_those_of_a_plain_forward_pass(temperature: float) -> None:
    model = make_tiny_model()
    requests = make_requests(temperature=temperature)
    for request, response in zip(requests, make_decoder(model).run(requests)):
        expected = logprobs_of(model, request.prompt_token_ids, response.token_ids, temperature or 1.0)
        assert list(response.logprobs) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("changes", [{"num_key_value_heads": 4}, {"tie_word_embeddings": False}])
def test_other_shapes_of_the_family_work_alike(changes: dict[str, Any]) -> None:
    model = make_tiny_model(**changes)
    requests = make_requests()
    for request, response in zip(requests, make_decoder(model).run(requests)):
        expected = logprobs_of(model, request.prompt_token_ids, response.token_ids, 1.0)
        assert list(response.logprobs) == pytest.approx(expected, abs=1e-4)


def test_a_sliding_window_is_respected() -> None:
    model = make_tiny_model(use_sliding_window=True, sliding_window=4, max_window_layers=0)
    assert set(model.config.layer_types) == {"sliding_attention"}
    requests = make_requests()
    for request, response in zip(requests, make_decoder(model).run(requests)):
        expected = logprobs_of(model, request.prompt_token_ids, response.token_ids, 1.0)
        assert list(response.logprobs) == pytest.approx(expected, abs=1e-4)


def test_another_family_works_alike() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        initializer_range=0.3, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    requests = make_requests()
    for request, response in zip(requests, make_decoder(model).run(requests)):
        expected = logprobs_of(model, request.prompt_token_ids, response.token_ids, 1.0)
        assert list(response.logprobs) == pytest.approx(expected, abs=1e-4)


def test_a_sample_depends_on_its_seed_and_not_on_the_rows_beside_it() -> None:
    model = make_tiny_model()
    requests = make_requests()
    together = make_decoder(model).run(requests)
    alone = [make_decoder(model).run([request])[0] for request in requests]
    assert [response.token_ids for response in together] == [response.token_ids for response in alone]
    assert together[0].token_ids != together[3].token_ids  # the same prompt, another seed
    assert make_decoder(model).run(make_requests(first_seed=50))[0].token_ids != together[0].token_ids


def test_samples_follow_the_distribution() -> None:
    model = make_tiny_model(initializer_range=0.05)
    prompt = PROMPTS[1]
    count = 4000
    responses = make_decoder(model).run(make_requests([prompt] * count, max_generate_length=1))
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1].softmax(dim=-1)
    drawn = torch.bincount(torch.tensor([r.token_ids[0] for r in responses]), minlength=len(expected)) / count
    assert float((drawn - expected).abs().max()) < 5 * (0.25 / count) ** 0.5


def shortest_that_stops(responses: Sequence[Response]) -> list[tuple[int, StopReason]]:
    return [(len(response.token_ids), response.stop_reason) for response in responses]


def test_a_response_ends_with_its_end_of_sequence_token_or_its_length() -> None:
    model = make_tiny_model()
    free = make_decoder(model).run(make_requests())
    eos = free[0].token_ids[4]
    for before, after in zip(free, make_decoder(model, eos=[eos]).run(make_requests())):
        if eos in before.token_ids:
            end = before.token_ids.index(eos) + 1
            assert (after.token_ids, after.stop_reason) == (before.token_ids[:end], StopReason.STOP)
        else:
            assert (after.token_ids, after.stop_reason) == (before.token_ids, StopReason.LENGTH)


def test_an_end_of_sequence_as_the_last_allowed_token_is_a_stop() -> None:
    model = make_tiny_model()
    last = make_decoder(model).run(make_requests(PROMPTS[:1]))[0].token_ids[-1]
    first = make_decoder(model).run(make_requests(PROMPTS[:1]))[0].token_ids.index(last)
    request = make_requests(PROMPTS[:1], max_generate_length=first + 1)
    assert make_decoder(model, eos=[last]).run(request)[0].stop_reason is StopReason.STOP


def test_rows_with_different_lengths_each_stop_at_their_own() -> None:
    requests = [
        replace(request, sampling=replace(request.sampling, max_generate_length=length))
        for request, length in zip(make_requests(), (1, 9, 3, 2))
    ]
    responses = make_decoder(make_tiny_model()).run(requests)
    assert shortest_that_stops(responses) == [(n, StopReason.LENGTH) for n in (1, 9, 3, 2)]


def test_a_stop_string_ends_a_response_and_stays_in_it() -> None:
    model = make_tiny_model()
    (free,) = make_decoder(model).run(make_requests(PROMPTS[:1]))
    text = TOKENIZER.decode(list(free.token_ids), skip_special_tokens=False)
    stop = TOKENIZER.decode(list(free.token_ids[5:8]), skip_special_tokens=False)
    (stopped,) = make_decoder(model).run(make_requests(PROMPTS[:1], stop=("never said", stop)))
    stopped_text = TOKENIZER.decode(list(stopped.token_ids), skip_special_tokens=False)
    assert stopped_text == text[: text.index(stop) + len(stop)]
    assert stopped.stop_reason is StopReason.STOP


def test_responses_longer_than_the_reserved_room_go_on() -> None:
    model = make_tiny_model()
    requests = make_requests(PROMPTS[:2], max_generate_length=90)
    for request, response in zip(requests, make_decoder(model).run(requests)):
        assert len(response.token_ids) == 90
        expected = logprobs_of(model, request.prompt_token_ids, response.token_ids, 1.0)
        assert list(response.logprobs) == pytest.approx(expected, abs=1e-3)


def continued(responses: Sequence[Response], prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """What the next turn asks for: prompt, response, and some more tokens."""
    return [(*prompt, *r.token_ids, 4, 2, 6, 4 + index) for index, (prompt, r) in enumerate(zip(prompts, responses))]


def test_a_next_turn_computes_only_what_is_new_and_gives_the_same() -> None:
    model = make_tiny_model()
    decoder = make_decoder(model)
    decoder.start_wave()
    prompts = continued(decoder.run(make_requests()), PROMPTS)
    prompts.append((7, 8, 9, 10, 11))  # one that continues nothing
    computed: list[int] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: computed.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    decoder.start_wave()
    responses = decoder.run(make_requests(prompts, max_generate_length=1))
    assert sum(computed) == len(prompts) * 5  # the last sampled token and four more; or the new prompt
    fresh = make_decoder(model).run(make_requests(prompts, max_generate_length=1))
    for response, other in zip(responses, fresh):
        assert response.token_ids == other.token_ids
        assert list(response.logprobs) == pytest.approx(list(other.logprobs), abs=1e-4)


def test_nothing_of_older_weights_is_used() -> None:
    model = make_tiny_model()
    decoder = make_decoder(model)
    prompts = continued(decoder.run(make_requests()), PROMPTS)
    with torch.no_grad():
        for parameter, new in zip(model.parameters(), make_tiny_model(seed=1).parameters()):
            parameter.copy_(new)
    decoder.forget()
    requests = make_requests(prompts)
    for request, response in zip(requests, decoder.run(requests)):
        expected = logprobs_of(model, request.prompt_token_ids, response.token_ids, 1.0)
        assert list(response.logprobs) == pytest.approx(expected, abs=1e-4)


def test_a_batch_that_nobody_waits_for_any_more_ends_early() -> None:
    asked: list[bool] = []

    def wanted() -> bool:
        asked.append(True)
        return len(asked) < 3

    (response,) = make_decoder(make_tiny_model()).run(make_requests(PROMPTS[:1]), wanted=wanted)
    assert (len(response.token_ids), response.stop_reason) == (3, StopReason.ABORT)


def make_state(num_tokens: int) -> RowState:
    return RowState(((torch.zeros(1, num_tokens, 1), torch.zeros(1, num_tokens, 1)),))


def test_of_several_kept_prefixes_the_longest_is_used() -> None:
    prefixes = KeptPrefixes(max_bytes=10_000)
    prefixes.keep(("", (1, 2)), make_state(1))
    prefixes.keep(("", (1, 2, 3)), make_state(2))
    prefixes.keep(("", (1, 2, 4, 5)), make_state(3))
    assert getattr(prefixes.longest(("", (1, 2, 3, 4))), "num_tokens", None) == 2
    assert getattr(prefixes.longest(("", (1, 2, 5))), "num_tokens", None) == 1
    assert prefixes.longest(("", (2, 2))) is None


def test_prefixes_are_kept_for_one_more_wave_and_within_their_room() -> None:
    prefixes = KeptPrefixes(max_bytes=3 * 8)
    prefixes.start_wave()
    prefixes.keep(("", (1, 2, 3)), make_state(2))
    prefixes.keep(("", (4, 5, 6)), make_state(2))
    assert prefixes.longest(("", (4, 5, 6))) is None
    prefixes.start_wave()
    assert prefixes.longest(("", (1, 2, 3))) is not None
    prefixes.start_wave()
    assert prefixes.longest(("", (1, 2, 3))) is None
    prefixes.keep(("", (4, 5, 6)), make_state(2))
    assert prefixes.longest(("", (4, 5, 6))) is not None
