"""What vLLM says may follow each token of given texts, over its whole vocabulary."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_train.inference.settings import EngineSettings
from skyrl_train.inference.vllm.settings import vllm_arguments, vllm_environment

Ranked = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Token ids and their log-probabilities, each `[num_tokens - 1, vocabulary]`, the likeliest first."""


def prompt_distributions(settings: EngineSettings, texts: Sequence[Sequence[int]]) -> list[Ranked]:
    """Score texts, given as token ids, with a vLLM of their own; nothing that it computed for one is used for another.

    Raises ModelError where there is no such model, and whatever vLLM raises.
    """
    arguments = {**vllm_arguments(settings), "max_logprobs": -1, "enable_prefix_caching": False}
    os.environ.update(vllm_environment(settings))
    from vllm import LLM, SamplingParams as VLLMSamplingParams

    asked = VLLMSamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=-1, detokenize=False)
    prompts: Any = [{"prompt_token_ids": list(ids)} for ids in texts]
    answers = LLM(**arguments).generate(prompts, asked, use_tqdm=False)
    return [_ranked(answer.prompt_logprobs[1:]) for answer in answers]


def _ranked(positions: Sequence[Any]) -> Ranked:
    """Return what vLLM says of each position, a mapping from token to its log-probability, in the order of these."""
    width = min(map(len, positions))
    tokens = np.zeros((len(positions), width), np.int64)
    logprobs = np.zeros((len(positions), width))
    for row, position in enumerate(positions):
        found = sorted(((each.logprob, token) for token, each in position.items()), reverse=True)[:width]
        tokens[row] = [token for _, token in found]
        logprobs[row] = [logprob for logprob, _ in found]
    return tokens, logprobs
