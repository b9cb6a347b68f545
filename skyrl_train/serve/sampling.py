"""Samples of a request: what it asks for is checked, then the engine is asked, once for each sample."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl_train.serve.models import Models
from skyrl_train.serve.records import Checkpoint, Request
from skyrl_train.serve.refusals import Refused
from skyrl_train.serve.wire import sample_response, tokens_of_json
from skyrl_train.system import derive_seed
from skyrl_train.types import GenerationRequest, SamplingParams

_MAX_SAMPLES = 1024
_MAX_TOP = 100
_MAX_STOPS = 64
_NOT_SERVED = ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info")


class Sampling:
    """Asks the engine."""

    def __init__(self, models: Models, *, seed: int) -> None:
        self._models, self._seed = models, seed

    def check(self, content: Mapping[str, Any]) -> int:
        """Return how many samples are asked for. Raises Refused for what no engine could answer."""
        if refused := [name for name in _NOT_SERVED if content.get(name)]:
            raise Refused(f"{refused[0]} is not served; prompt_logprobs and topk_prompt_logprobs are")
        count = _whole(content, "num_samples", 1, 1, _MAX_SAMPLES)
        _whole(content, "topk_prompt_logprobs", 0, 0, _MAX_TOP)
        _whole(content, "topk_sample_logprobs", 0, 0, _MAX_TOP)
        _params(content, longest=1)
        tokens = tokens_of_json(content.get("prompt"))
        size, vocabulary = len(tokens), self._models.vocabulary
        if not size or not 0 <= tokens.min() <= tokens.max() < vocabulary:
            raise Refused(f"prompt must have at least one token, and token ids from 0 to {vocabulary - 1}")
        if size >= self._models.max_length:
            raise Refused(f"a prompt of {size} tokens leaves no room in a context of {self._models.max_length}")
        last = content.get("prompt_logprobs_last_n")
        if last is not None and (type(last) is not int or not 1 <= last < size):
            raise Refused(f"prompt_logprobs_last_n must be from 1 to {size - 1}")
        return count

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
        content = request.content
        tokens = tuple(tokens_of_json(content.get("prompt")).tolist())
        sampling, stops, ignores_eos, seed = _params(content, longest=self._models.max_length - len(tokens))
        base = derive_seed(self._seed, request.request_id) if seed is None else seed
        engine = self._models.engine
        outputs = await asyncio.gather(
            *(
                engine.generate(
                    GenerationRequest(
                        request_id=f"{request.request_id}:{index:04d}",
                        prompt_token_ids=tokens,
                        sampling=sampling,
                        seed=derive_seed(base, "sample", index),
                        adapter=adapter,
                        stop_token_ids=stops,
                        ignores_eos=ignores_eos,
                    )
                )
                for index in range(content.get("num_samples", 1))
            )
        )
        top = content.get("topk_prompt_logprobs") or 0
        prompt = None
        if top or content.get("prompt_logprobs"):
            prompt = await engine.score(tokens, adapter=adapter, top_k=top)
        of_samples = []
        if wanted := content.get("topk_sample_logprobs") or 0:
            for output in outputs:
                whole = await engine.score((*tokens, *output.token_ids), adapter=adapter, top_k=wanted)
                of_samples.append(whole.behind(len(tokens) - 1))
        last = content.get("prompt_logprobs_last_n") or len(tokens)
        return sample_response(
            outputs, prompt=prompt, top_of_prompt=bool(top), num_blank=len(tokens) - last, top_of_samples=of_samples
        )


def _params(content: Mapping[str, Any], *, longest: int) -> tuple[SamplingParams, tuple[int, ...], bool, int | None]:
    """Return the parameters, the tokens that end a response, whether only these do, and the seed that is given. `longest`:
    tokens that there is room for. Raises Refused."""
    given = content.get("sampling_params")
    if not isinstance(given, dict):
        raise Refused("sampling_params must be an object")
    numbers = {}
    for name, default, low, high in (("temperature", 1.0, 0.0, 1e3), ("top_p", 1.0, 0.0, 1.0)):
        value = given.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise Refused(f"sampling_params.{name} must be a number from {low:g} to {high:g}; got {str(value)[:40]}")
        numbers[name] = float(value)
    top_k, seed = given.get("top_k", -1), given.get("seed")
    if type(top_k) is not int or not (top_k == -1 or top_k >= 1) or (seed is not None and type(seed) is not int):
        raise Refused("sampling_params.top_k must be -1 or from 1 on, and seed a whole number")
    stop = given.get("stop")
    stops = [stop] if isinstance(stop, str) else stop
    are_texts = isinstance(stops, list) and all(isinstance(each, str) and each for each in stops)
    are_tokens = isinstance(stops, list) and all(type(each) is int and each >= 0 for each in stops)
    if stops is not None and (not (are_texts or are_tokens) or len(stops) > _MAX_STOPS):
        raise Refused(f"sampling_params.stop must be a text, or a list of up to {_MAX_STOPS} texts or token ids")
    if (top_p := numbers["top_p"]) == 0:
        raise Refused("sampling_params.top_p must be above 0")
    sampling = SamplingParams(
        temperature=numbers["temperature"],
        top_p=top_p,
        top_k=top_k,
        max_generate_length=min(longest, _whole(given, "max_tokens", longest, 1, 1 << 30)),
        stop=tuple(stops) if stops and are_texts else (),
    )
    tokens = tuple(stops) if stops and not are_texts else ()
    return sampling, tokens, stops == [], None if seed is None else seed % 2**63


def _whole(content: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = content.get(name)
    value = default if value is None else value
    if type(value) is not int or not low <= value <= high:
        raise Refused(f"{name} must be a whole number from {low} to {high}; got {str(value)[:40]}")
    return value
