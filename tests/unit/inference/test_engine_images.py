"""`HFEngine` with images: its log-probabilities are the trainer's, whatever it kept from the turn before."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from skyrl_train.batch.training_batch import batch_of_lengths
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.schema import ModelConfig, OptimizerConfig
from skyrl_train.images import ImageSpan, ImageSpans
from skyrl_train.inference.decode import Decoder, Response
from skyrl_train.learner.engine import ModelEngine
from skyrl_train.learner.policy import PolicyLearner
from skyrl_train.types import GenerationRequest, SamplingParams
from tests.support.learner_cases import fixed_rows
from tests.support.vision_cases import PLACEHOLDER, make_image, make_vlm

WIDE, SMALL = make_image(1, rows=1, columns=4), make_image(2)
Prompt = tuple[tuple[int, ...], ImageSpans]


def prompt(image: object, *, before: int, after: int) -> Prompt:
    assert image in (WIDE, SMALL)
    size = image.num_tokens  # type: ignore[attr-defined]
    ids = (*range(3, 3 + before), *[PLACEHOLDER] * size, *range(20, 20 + after))
    return ids, (ImageSpan(before, image),)  # type: ignore[arg-type]


def generate(decoder: Decoder, prompts: list[Prompt]) -> list[Response]:
    requests = [
        GenerationRequest(
            request_id=f"r{number}",
            prompt_token_ids=ids,
            sampling=SamplingParams(max_generate_length=6),
            seed=number,
            images=images,
        )
        for number, (ids, images) in enumerate(prompts)
    ]
    return decoder.run(requests)


def scores(model: PreTrainedModel, found: Prompt, response: Response) -> list[float]:
    """By the learner's forward."""
    ids = [*found[0], *response.token_ids]
    batch = batch_of_lengths([len(ids)])
    mask = torch.tensor([False] * len(found[0]) + [True] * len(response.token_ids))
    batch = batch.with_columns(input_ids=torch.tensor(ids, dtype=torch.int32), loss_mask=mask)
    from dataclasses import replace

    batch = replace(batch, metadata=replace(batch.metadata, images=(found[1],)))
    engine = ModelEngine(model, name="policy", micro_batching=fixed_rows(1), optimizer=OptimizerConfig())
    learner = PolicyLearner(engine, model=ModelConfig(), algorithm=AlgorithmConfig(), temperature=1.0)
    return [float(each) for each in learner.forward(batch)[mask]]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    model = make_vlm()
    return Decoder(model, eos_token_ids=frozenset(), pad_token_id=0, decode_text=lambda ids: str(ids))


def test_log_probabilities_are_the_trainers_in_a_later_turn_too(decoder: Decoder) -> None:
    trainer = make_vlm()
    decoder.forget()
    decoder.start_wave()
    prompts = [prompt(WIDE, before=2, after=3), prompt(SMALL, before=5, after=1), ((5, 6, 7), ())]
    first = generate(decoder, prompts)
    for each, response in zip(prompts, first):
        assert np.abs(np.subtract(response.logprobs, scores(trainer, each, response))).max() < 1e-5
    decoder.start_wave()
    later: list[Prompt] = []
    for (ids, images), response in zip(prompts, first):
        whole = (*ids, *response.token_ids, 9, *[PLACEHOLDER] * SMALL.num_tokens, 10)
        later.append((whole, (*images, ImageSpan(len(whole) - 1 - SMALL.num_tokens, SMALL))))
    for each, response in zip(later, generate(decoder, later)):
        assert np.abs(np.subtract(response.logprobs, scores(trainer, each, response))).max() < 1e-5


def test_prompts_of_the_same_tokens_and_other_images_are_other_prompts(decoder: Decoder) -> None:
    trainer = make_vlm()
    decoder.forget()
    other = make_image(7)
    prompts: list[Prompt] = [
        ((3, *[PLACEHOLDER] * 4, 4), (ImageSpan(1, SMALL),)),
        ((3, *[PLACEHOLDER] * 4, 4), (ImageSpan(1, other),)),
        ((3, *[PLACEHOLDER] * 4, 4), ()),
    ]
    for each, response in zip(prompts, generate(decoder, prompts)):
        assert np.abs(np.subtract(response.logprobs, scores(trainer, each, response))).max() < 1e-5


def test_engines_that_read_no_images_say_so() -> None:
    from skyrl_train.errors import EngineError
    from skyrl_train.inference.vllm import VLLMEngine

    request = GenerationRequest(
        request_id="r", prompt_token_ids=(3, 4), sampling=SamplingParams(), seed=0, images=(ImageSpan(0, SMALL),)
    )
    engine = object.__new__(VLLMEngine)
    with pytest.raises(EngineError, match="generator=vllm reads no images"):
        asyncio.run(engine.generate(request))
