"""Samples of a request: what it asks for is checked, then the engine is asked, once for each sample."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_train.images import ImageSpans, precedes_image
from skyrl_train.serve.asked import Sample, checked
from skyrl_train.serve.images import PlacedTokens, RequestImages, require_taken
from skyrl_train.serve.models import Bases, Sampled, Saved
from skyrl_train.serve.records import Records, Request, Sampler
from skyrl_train.serve.refusals import Refused
from skyrl_train.serve.wire import input_of_json, sample_response, targets_of_json
from skyrl_train.system import derive_seed
from skyrl_train.types import GenerationOutput, GenerationRequest, StopReason

_NOT_SERVED = ("prompt_alt_tokens_k", "record_stability_info")
_MAX_TARGETS = 1 << 20
"""Cells of `target_prompt_logprobs`."""
_PART_TOKENS = 128
"""Of a response that are asked for at once. The engine answers what waits together and takes up nothing else meanwhile: what
comes then waits for so many tokens, however long responses are."""


class Sampling:
    """Draws the samples that clients ask for with the engine."""

    def __init__(self, bases: Bases, records: Records, folder: Path, *, seed: int) -> None:
        self._bases, self._records, self._folder, self._seed = bases, records, folder, seed
        # Of so many prompts images are in memory as the model reads them; others wait as they were sent.
        self._image_prompts, self._decoding = asyncio.Semaphore(32), asyncio.Lock()

    def check(self, sampler: Sampler, content: Mapping[str, Any], placed: NDArray[np.int64] | None = None) -> Sample:
        """Return what is asked for. Raises Refused for what no engine could answer. `placed`: the prompt's tokens, those of
        images among them; without it a prompt with images is not looked at further, as to decode them takes long."""
        models = self._bases.of(self._records.base_of(sampler))
        if refused := [name for name in _NOT_SERVED if content.get(name)]:
            raise Refused(f"{refused[0]} is not served; prompt_logprobs, topk_ and target_prompt_logprobs are")
        asked = checked(Sample, content, "asample")
        tokens, images = input_of_json(asked.prompt)
        if images and placed is None:
            require_taken(models.images)
            return asked
        tokens, vocabulary = tokens if placed is None else placed, models.about.vocabulary
        size = len(tokens)
        if not size or not 0 <= tokens.min() <= tokens.max() < vocabulary:
            raise Refused(f"prompt must have at least one token, and token ids from 0 to {vocabulary - 1}")
        if size >= models.about.max_length:
            raise Refused(f"a prompt of {size} tokens leaves no room in a context of {models.about.max_length}")
        if asked.prompt_logprobs_last_n is not None and asked.prompt_logprobs_last_n >= size:
            raise Refused(f"prompt_logprobs_last_n must be at most {size - 1}")
        if asked.target_prompt_logprobs is not None:
            targets = targets_of_json(asked.target_prompt_logprobs)[1]
            fits = targets.ndim == 2 and len(targets) == size - 1 and targets.size <= _MAX_TARGETS
            if not fits or (targets.size and not -1 <= targets.min() <= targets.max() < vocabulary):
                raise Refused(
                    f"target_prompt_logprobs must have the shape [{size - 1}, K], at most {_MAX_TARGETS} cells, and token "
                    f"ids from 0 to {vocabulary - 1}, or -1 for none"
                )
        return asked

    async def run(self, request: Request) -> bytes:
        """Return the message of the samples. Raises Refused, EngineError."""
        sampler, saved = self._records.samplers[request.owner], None
        models = self._bases.of(self._records.base_of(sampler))
        if sampler.path is not None:
            checkpoint = self._records.checkpoint(sampler.tenant, sampler.path)
            saved = Saved(folder=self._folder / checkpoint.folder, facts=checkpoint.facts)
        tokens, images = input_of_json(request.content["prompt"])
        # Before the engine: who holds one must not wait here for somebody who waits for it.
        async with self._image_prompts if images else nullcontext():
            spans: ImageSpans = ()
            if images:
                async with self._decoding:
                    tokens, spans = await asyncio.to_thread(RequestImages(models.images).placed, tokens, images)
                self.check(sampler, request.content, tokens)
            async with models.sampled_from(saved) as sampled:
                return await self._run(request, (tokens, spans), sampled, models.about.max_length)

    async def _generate(self, whole: GenerationRequest, sampled: Sampled) -> GenerationOutput:
        """Return a response that is asked for in parts, each with the tokens before it as its prompt."""
        most = whole.sampling.max_generate_length
        tokens: tuple[int, ...] = ()
        logprobs: tuple[float, ...] = ()
        size = most if whole.sampling.stop else _PART_TOKENS  # a string may begin in one part and end in the next
        while True:
            part = replace(
                whole,
                prompt_token_ids=whole.prompt_token_ids + tokens,
                sampling=replace(whole.sampling, max_generate_length=min(size, most - len(tokens))),
                seed=derive_seed(whole.seed, "part", len(tokens)) if tokens else whole.seed,
            )
            output = await sampled.generate(part)
            tokens, logprobs = tokens + output.token_ids, logprobs + output.logprobs
            if output.stop_reason is not StopReason.LENGTH or len(tokens) >= most:
                return GenerationOutput(token_ids=tokens, logprobs=logprobs, stop_reason=output.stop_reason)

    async def _run(self, request: Request, prompt: PlacedTokens, sampled: Sampled, max_length: int) -> bytes:
        asked = checked(Sample, request.content, "asample")
        tokens, spans = tuple(prompt[0].tolist()), prompt[1]
        given = asked.sampling_params.seed
        seed = derive_seed(self._seed, request.request_id) if given is None else given
        requests = [
            GenerationRequest(
                request_id=f"{request.request_id}:{index:04d}",
                prompt_token_ids=tokens,
                sampling=asked.sampling_params.sampling(max_length - len(tokens)),
                seed=derive_seed(seed, "sample", index),
                images=spans,
                stop_token_ids=asked.sampling_params.stop_token_ids,
                ignores_eos=asked.sampling_params.stop == [],
            )
            for index in range(asked.num_samples)
        ]
        outputs = await asyncio.gather(*(self._generate(each, sampled) for each in requests))
        scored, top, of_targets = None, asked.topk_prompt_logprobs, None
        named = None if asked.target_prompt_logprobs is None else targets_of_json(asked.target_prompt_logprobs)
        if top or asked.prompt_logprobs or named is not None:
            targets = None if named is None else np.maximum(named[1], 0)
            scored = await sampled.score(tokens, top_k=top, targets=targets, spans=spans)
            unscored = precedes_image(len(tokens), spans)[:-1]
            scored = replace(scored, logprobs=np.where(unscored, np.float32(np.nan), scored.logprobs))
            if named is not None:
                of_targets = named[0], np.where(named[1] < 0, np.float32(0), scored.target_logprobs)
        of_samples = []
        for output in outputs if asked.topk_sample_logprobs else ():
            both = (*tokens, *output.token_ids)
            whole = await sampled.score(both, top_k=asked.topk_sample_logprobs, spans=spans)
            of_samples.append(whole.behind(len(tokens) - 1))
        num_blank = len(tokens) - (asked.prompt_logprobs_last_n or len(tokens))
        return sample_response(
            outputs,
            prompt=scored if top or asked.prompt_logprobs else None,
            top_of_prompt=bool(top),
            num_blank=num_blank,
            top_of_samples=of_samples,
            of_targets=of_targets,
        )
