"""Samples of a request: what it asks for is checked, then the engine is asked, once for each sample."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl_train.serve.asked import Sample, checked
from skyrl_train.serve.models import Models
from skyrl_train.serve.records import Checkpoint, Request
from skyrl_train.serve.refusals import Refused
from skyrl_train.serve.wire import sample_response, tokens_of_json
from skyrl_train.system import derive_seed
from skyrl_train.types import GenerationRequest

_NOT_SERVED = ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info")


class Sampling:
    """Asks the engine."""

    def __init__(self, models: Models, *, seed: int) -> None:
        self._models, self._seed = models, seed

    def check(self, content: Mapping[str, Any]) -> Sample:
        """Return what is asked for. Raises Refused for what no engine could answer."""
        if refused := [name for name in _NOT_SERVED if content.get(name)]:
            raise Refused(f"{refused[0]} is not served; prompt_logprobs and topk_prompt_logprobs are")
        asked = checked(Sample, content, "asample")
        tokens, vocabulary = tokens_of_json(asked.prompt), self._models.vocabulary
        size = len(tokens)
        if not size or not 0 <= tokens.min() <= tokens.max() < vocabulary:
            raise Refused(f"prompt must have at least one token, and token ids from 0 to {vocabulary - 1}")
        if size >= self._models.max_length:
            raise Refused(f"a prompt of {size} tokens leaves no room in a context of {self._models.max_length}")
        if asked.prompt_logprobs_last_n is not None and asked.prompt_logprobs_last_n >= size:
            raise Refused(f"prompt_logprobs_last_n must be at most {size - 1}")
        return asked

    async def run(self, request: Request, checkpoint: Checkpoint | None, folder: Path) -> bytes:
        """Return the message of the samples. Raises Refused, EngineError."""
        if checkpoint is None:
            return await self._run(request, "")
        name = f"s{checkpoint.folder.replace('/', '-')}"
        await self._models.adapter_for(name, folder / checkpoint.folder, checkpoint.facts)
        try:
            return await self._run(request, name)
        finally:
            self._models.release(name)

    async def _run(self, request: Request, adapter: str) -> bytes:
        asked, engine = checked(Sample, request.content, "asample"), self._models.engine
        tokens = tuple(tokens_of_json(asked.prompt).tolist())
        given = asked.sampling_params.seed
        seed = derive_seed(self._seed, request.request_id) if given is None else given
        requests = [
            GenerationRequest(
                request_id=f"{request.request_id}:{index:04d}",
                prompt_token_ids=tokens,
                sampling=asked.sampling_params.sampling(self._models.max_length - len(tokens)),
                seed=derive_seed(seed, "sample", index),
                adapter=adapter,
                stop_token_ids=asked.sampling_params.stop_token_ids,
                ignores_eos=asked.sampling_params.stop == [],
            )
            for index in range(asked.num_samples)
        ]
        outputs = await asyncio.gather(*map(engine.generate, requests))
        prompt, top = None, asked.topk_prompt_logprobs
        if top or asked.prompt_logprobs:
            prompt = await engine.score(tokens, adapter=adapter, top_k=top)
        of_samples = []
        for output in outputs if asked.topk_sample_logprobs else ():
            both = (*tokens, *output.token_ids)
            whole = await engine.score(both, adapter=adapter, top_k=asked.topk_sample_logprobs)
            of_samples.append(whole.behind(len(tokens) - 1))
        num_blank = len(tokens) - (asked.prompt_logprobs_last_n or len(tokens))
        return sample_response(
            outputs, prompt=prompt, top_of_prompt=bool(top), num_blank=num_blank, top_of_samples=of_samples
        )
