"""Where an engine sent the tokens of its answers, against a plain forward pass over the whole sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from skyrl_train.inference.decode import Decoder
from skyrl_train.model.parallel import record_routing
from skyrl_train.types import GenerationRequest, SamplingParams
from tests.support.moe_cases import NUM_LAYERS, TOP_K, make_moe

PROMPTS: list[tuple[int, ...]] = [(2, 6, 4, 9), (2, 6, 4, 9, 20, 11, 30), (12,), (2, 6, 4, 9)]


def make_decoder(model: PreTrainedModel, **changes: Any) -> Decoder:
    return Decoder(model, eos_token_ids=frozenset({7, 8, 9, 10}), pad_token_id=0, decode_text=str, **changes)


def make_requests(prompts: list[tuple[int, ...]], **params: Any) -> list[GenerationRequest]:
    sampling = SamplingParams(max_generate_length=12, **params)
    return [
        GenerationRequest(request_id=f"r{index}", prompt_token_ids=prompt, sampling=sampling, seed=index)
        for index, prompt in enumerate(prompts)
    ]


def routers_of(model: PreTrainedModel) -> list[Any]:
    return [layer.mlp.gate for layer in model.model.layers]  # type: ignore[union-attr]


def chosen(model: PreTrainedModel, tokens: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """`[tokens, layers, k]` by the routers' own answers, without a cache."""
    found: list[Any] = []
    hooks = [r.register_forward_hook(lambda _m, _i, out: found.append(out[2].numpy())) for r in routers_of(model)]
    with torch.no_grad():
        model(torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return np.stack(found, axis=1)


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2_moe"])
def test_each_token_is_recorded_but_for_the_last_of_the_response(kind: str) -> None:
    model = make_moe(kind)
    record_routing(model, name="m")
    requests = make_requests(PROMPTS)
    responses = make_decoder(model).run(requests)
    assert len({len(response.token_ids) for response in responses}) > 1, "rows leave the batch at different times"
    for request, response in zip(requests, responses):
        tokens = (*request.prompt_token_ids, *response.token_ids[:-1])
        assert response.routed_experts.shape == (len(tokens), NUM_LAYERS, TOP_K)
        assert np.array_equal(np.sort(response.routed_experts), np.sort(chosen(model, tokens)))


def test_a_turn_that_begins_with_kept_keys_has_the_experts_that_were_kept_with_them() -> None:
    model = make_moe()
    record_routing(model, name="m")
    decoder = make_decoder(model)
    first = decoder.run(make_requests(PROMPTS))
    prompts = [(*prompt, *response.token_ids, 30, 31) for prompt, response in zip(PROMPTS, first)]
    decoder.start_wave()
    for prompt, before, response in zip(prompts, first, decoder.run(make_requests(prompts))):
        tokens = (*prompt, *response.token_ids[:-1])
        assert np.array_equal(response.routed_experts[: len(before.routed_experts)], before.routed_experts)
        assert np.array_equal(np.sort(response.routed_experts), np.sort(chosen(model, tokens)))


def test_recording_changes_no_answer_and_without_it_nothing_is_recorded() -> None:
    plain = make_decoder(make_moe()).run(make_requests(PROMPTS))
    model = make_moe()
    record_routing(model, name="m")
    for one, other in zip(plain, make_decoder(model).run(make_requests(PROMPTS))):
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
        assert not len(one.routed_experts)
        assert len(other.routed_experts)


@pytest.mark.parametrize("keeps", [False, True])
def test_weights_that_change_under_a_response_leave_the_experts_of_what_was_sampled_before(keeps: bool) -> None:
    model, older = make_moe(), make_moe()
    record_routing(model, name="m")
    decoder = make_decoder(model, keeps_older_cache=keeps)
    asked = iter(range(100))

    def version() -> int:
        step = next(asked)
        if step == 5:
            for router in routers_of(model):
                router.weight.data.neg_()
            decoder.forget()
        return int(step >= 5)

    requests = make_requests(PROMPTS)
    responses = decoder.run(requests, version=version)
    changed = [len(each.token_ids) for each in responses if len(each.weight_versions) > 1]
    assert changed, "some response went on with the new weights"
    for request, response in zip(requests, responses):
        tokens = (*request.prompt_token_ids, *response.token_ids[:-1])
        runs = response.weight_versions
        first = len(request.prompt_token_ids) + (runs[1].start - 1 if len(runs) > 1 else len(response.token_ids) - 1)
        assert response.routed_experts.shape == (len(tokens), NUM_LAYERS, TOP_K)
        assert np.array_equal(np.sort(response.routed_experts[:first]), np.sort(chosen(older, tokens)[:first])), (
            "what the old weights computed, by them"
        )
        if len(runs) > 1 and not keeps and first < len(tokens):
            assert np.array_equal(
                np.sort(response.routed_experts[first + 1 :]), np.sort(chosen(model, tokens)[first + 1 :])
            ), "what only the new weights computed, by these"
