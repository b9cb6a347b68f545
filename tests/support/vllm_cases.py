"""Requests of a vLLM engine, and the log-probabilities that they must have."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from skyrl_train.config import Config
from skyrl_train.inference.vllm import VLLMEngine
from skyrl_train.model import load_causal_lm
from skyrl_train.types import GenerationOutput, GenerationRequest, SamplingParams
from tests.support.weight_cases import in_buckets

CONFIG = Config()
LONG_PROMPT = tuple(5 + index % 50 for index in range(200))
"""More than one block of the prefix cache (128 tokens)."""


def request(
    name: str, prompt: tuple[int, ...] = LONG_PROMPT, *, seed: int = 1, temperature: float = 1.0, **sampling: object
) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(temperature=temperature, max_generate_length=12, **sampling),  # type: ignore[arg-type]
        seed=seed,
    )


def expected_logprobs(
    weights: Mapping[str, Tensor] | None, prompt: tuple[int, ...], output: GenerationOutput, temperature: float = 1.0
) -> Tensor:
    """Of the sampled tokens under the Hugging Face model with these weights."""
    model = load_causal_lm(CONFIG.model, "cpu")
    if weights is not None:
        model.load_state_dict(dict(weights), strict=False)
        model.tie_weights()
    ids = torch.tensor([[*prompt, *output.token_ids]])
    with torch.no_grad():
        scores = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float() / temperature, dim=-1)
    return scores[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None]).squeeze(1)


def sync(engine: VLLMEngine, weights: Mapping[str, Tensor], version: int) -> int:
    engine.begin_update()
    for bucket in in_buckets(iter(weights.items())):
        engine.update(bucket)
    return engine.finish_update(version, len(weights))


def largest_difference(output: GenerationOutput, expected: Tensor) -> float:
    return float((torch.tensor(output.logprobs) - expected).abs().max())
