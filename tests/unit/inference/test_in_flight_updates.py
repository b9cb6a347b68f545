"""Weights that change under running requests: each token is of the version that the answer says, in the way that it says."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from skyrl_train.config.models import ModelConfig
from skyrl_train.inference.decode import Decoder, Response
from skyrl_train.inference.hf import HFEngine
from skyrl_train.model import load_causal_lm
from skyrl_train.runs.construction import sync_within_process
from skyrl_train.types import GenerationOutput, GenerationRequest, SamplingParams, VersionRun
from skyrl_train.weights import stored_weights
from tests.support.fakes import make_tiny_model, make_tokenizer
from tests.support.model_families import build_family

Cache = Literal["recompute", "keep"]
Answer = Response | GenerationOutput
PROMPTS: list[tuple[int, ...]] = [(2, 6, 4, 9), (2, 6, 4, 9, 20, 11, 30), (12,), (2, 6, 4, 9)]
LENGTHS = (12, 7, 12, 3)
TOLERANCE = 1e-5
"""Of a log-probability, in float32."""


def model_of(seed: int = 0) -> PreTrainedModel:
    """Weights so small that rounding alone, of other orders of the same sums, stays a tenth of the tolerance."""
    return make_tiny_model(seed=seed, initializer_range=0.1)


def make_requests(prompts: Sequence[tuple[int, ...]] = PROMPTS, lengths: Sequence[int] = LENGTHS) -> Any:
    return [
        GenerationRequest(
            request_id=f"r{index}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_generate_length=length),
            seed=index,
        )
        for index, (prompt, length) in enumerate(zip(prompts, lengths))
    ]


def copy_weights(source: PreTrainedModel, target: PreTrainedModel) -> None:
    with torch.no_grad():
        for parameter, other in zip(target.parameters(), source.parameters()):
            parameter.copy_(other)


class Updated:
    """A decoder whose weights become those of the next model before the steps `at`."""

    def __init__(self, models: Sequence[PreTrainedModel], make: Callable[[], PreTrainedModel], cache: Cache) -> None:
        self.models, self.model = models, make()
        copy_weights(models[0], self.model)
        self.decoder = Decoder(
            self.model,
            eos_token_ids=frozenset(),
            pad_token_id=0,
            decode_text=lambda _: "",
            keeps_older_cache=cache == "keep",
        )

    def run(self, requests: Sequence[GenerationRequest], at: Sequence[int]) -> list[Response]:
        version, step = 0, -1

        def next_version() -> int:
            nonlocal version, step
            step += 1
            if step in at:
                version += 1
                copy_weights(self.models[version], self.model)
                self.decoder.forget()
            return version

        return self.decoder.run(requests, version=next_version)


def model_of_token(answer: Answer, models: Sequence[PreTrainedModel]) -> list[PreTrainedModel]:
    """Of the version that the answer names for each token."""
    ends = [*(run.start for run in answer.weight_versions[1:]), len(answer.token_ids)]
    return [
        models[run.version % len(models)]
        for run, end in zip(answer.weight_versions, ends)
        for _ in range(run.start, end)
    ]


@torch.inference_mode()
def of_pure_models(models: Sequence[PreTrainedModel], prompt: tuple[int, ...], answer: Answer) -> list[float]:
    """Log-probabilities by one forward of each token's model over the whole sequence, without a cache."""
    ids = torch.tensor([[*prompt, *answer.token_ids]])
    of_token = model_of_token(answer, models)
    scores = {model: model(ids, use_cache=False).logits[0].log_softmax(dim=-1) for model in set(of_token)}
    first = len(prompt) - 1
    return [
        float(scores[model][first + index, token])
        for index, (model, token) in enumerate(zip(of_token, answer.token_ids))
    ]


@torch.inference_mode()
def of_kept_caches(models: Sequence[PreTrainedModel], prompt: tuple[int, ...], answer: Answer) -> list[float]:
    """Log-probabilities by the same schedule, in transformers' own cache: the model of a token computes what nobody computed
    before, which is the prompt or the last token, and finds the rest as earlier models left it."""
    cache, found, fresh = DynamicCache(), [], list(prompt)
    for model, token in zip(model_of_token(answer, models), answer.token_ids):
        logits = model(torch.tensor([fresh]), past_key_values=cache, use_cache=True).logits[0, -1]
        found.append(float(logits.log_softmax(dim=-1)[token]))
        fresh = [token]
    return found


REFERENCES = {"recompute": of_pure_models, "keep": of_kept_caches}


def largest_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(one - other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("cache", ["recompute", "keep"])
def test_each_token_is_of_the_version_that_its_run_names(cache: Cache) -> None:
    models = [model_of(seed) for seed in range(3)]
    requests = make_requests()
    responses = Updated(models, model_of, cache).run(requests, at=(2, 5))
    assert [response.weight_versions for response in responses] == [
        ((0, 0), (2, 1), (5, 2)),
        ((0, 0), (2, 1), (5, 2)),
        ((0, 0), (2, 1), (5, 2)),
        ((0, 0), (2, 1)),
    ]
    for request, response in zip(requests, responses):
        assert len(response.token_ids) == request.sampling.max_generate_length
        expected = REFERENCES[cache](models, request.prompt_token_ids, response)
        assert largest_difference(response.logprobs, expected) < TOLERANCE
        # The other way gives other numbers, so that the two can be told apart.
        other = REFERENCES["keep" if cache == "recompute" else "recompute"](models, request.prompt_token_ids, response)
        assert largest_difference(response.logprobs, other) > 1e-3


def test_weights_that_do_not_change_change_nothing_but_the_version() -> None:
    model = model_of()
    requests = make_requests()
    plain = Updated([model], model_of, "keep").run(requests, at=())
    for cache in ("recompute", "keep"):
        updated = Updated([model] * 3, model_of, cache).run(requests, at=(1, 4))  # type: ignore[arg-type]
        assert [response.token_ids for response in updated] == [response.token_ids for response in plain]
        assert updated[0].weight_versions == ((0, 0), (1, 1), (4, 2))


@pytest.mark.parametrize("cache", ["recompute", "keep"])
def test_the_next_turn_finds_nothing_that_older_weights_computed(cache: Cache) -> None:
    models = [model_of(seed) for seed in range(2)]
    updated = Updated(models, model_of, cache)
    first = make_requests()[1:2]
    (answer,) = updated.run(first, at=(3,))
    prompt = (*first[0].prompt_token_ids, *answer.token_ids, 5, 7)
    second = make_requests([prompt], [6])
    found = updated.decoder.run(second, version=lambda: 1)[0]
    assert found.weight_versions == (VersionRun(0, 1),)
    assert largest_difference(found.logprobs, of_pure_models(models, prompt, found)) < TOLERANCE


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next"])
@pytest.mark.parametrize("cache", ["recompute", "keep"])
def test_a_state_that_older_weights_left_is_computed_again_or_kept(family: str, cache: Cache, tmp_path: Path) -> None:
    """Models whose layers carry a state over all tokens, in a cache of their own."""
    folder = build_family(family, tmp_path)
    models = [load_causal_lm(ModelConfig(path=str(folder)), "cpu") for _ in range(2)]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.mul_(1.1)
    requests = make_requests([(2, 6, 4, 9), (7, 6, 5, 8), (2, 6)], [8, 8, 8])
    responses = Updated(models, lambda: load_causal_lm(ModelConfig(path=str(folder)), "cpu"), cache).run(
        requests, at=(4,)
    )
    differences = []
    for request, response in zip(requests, responses):
        expected = of_pure_models(models, request.prompt_token_ids, response)
        differences.append(largest_difference(response.logprobs, expected))
    # The third prompt, of another length, begins after the update.
    assert [len(response.weight_versions) for response in responses] == [2, 2, 1]
    assert (max(differences) < 1e-4) == (cache == "recompute")
    assert differences[2] < 1e-4


# The engine

NUM_MODELS = 5


def make_engine(cache: Cache | None, **changes: Any) -> HFEngine:
    return HFEngine(model_of(), make_tokenizer(), max_batch_size=64, weight_version=0, in_flight_cache=cache, **changes)


class Slowed:
    """Has an engine's model take its time for each forward, and counts them."""

    def __init__(self, engine: HFEngine, seconds: float = 0.01) -> None:
        self.begun = threading.Semaphore(0)
        self._seconds = seconds
        engine._model.register_forward_pre_hook(self._wait)

    def _wait(self, *_: object) -> None:
        self.begun.release()
        threading.Event().wait(self._seconds)


def sync(engine: HFEngine, version: int, models: Sequence[PreTrainedModel]) -> None:
    weights = dict(models[version % len(models)].named_parameters())
    sync_within_process(engine, Path()).sync(stored_weights(weights), version)


@contextlib.contextmanager
def answers_of(engine: HFEngine, requests: Sequence[GenerationRequest]) -> Iterator[list[GenerationOutput]]:
    """Asked on a thread of their own; complete when the block is left."""
    found: list[GenerationOutput] = []

    async def ask() -> None:
        found.extend(await asyncio.wait_for(asyncio.gather(*map(engine.generate, requests)), 600))

    thread = threading.Thread(target=lambda: asyncio.run(ask()), daemon=True)
    thread.start()
    yield found
    thread.join(600)
    assert len(found) == len(requests)


def test_an_update_waits_for_running_requests_and_further_ones_wait_for_it() -> None:
    models = [model_of(seed) for seed in range(2)]
    engine = make_engine(None)
    engine._max_batch_size = 2
    slowed = Slowed(engine)
    requests = make_requests([PROMPTS[0]] * 6, [10] * 6)
    with contextlib.closing(engine), answers_of(engine, requests) as found:
        assert slowed.begun.acquire(timeout=30)
        sync(engine, 1, models)
    # One batch of two was running; the two behind it were not let past the update.
    assert [answer.weight_versions for answer in found] == [((0, 0),)] * 2 + [((0, 1),)] * 4
    for request, answer in zip(requests, found):
        assert largest_difference(answer.logprobs, of_pure_models(models, request.prompt_token_ids, answer)) < 1e-5


@pytest.mark.parametrize("cache", ["recompute", "keep"])
def test_an_update_in_flight_waits_for_no_more_than_a_token(cache: Cache) -> None:
    models = [model_of(seed) for seed in range(2)]
    engine = make_engine(cache)
    slowed = Slowed(engine)
    requests = make_requests([PROMPTS[0]] * 2, [30] * 2)
    with contextlib.closing(engine), answers_of(engine, requests) as found:
        for _ in range(3):
            assert slowed.begun.acquire(timeout=30)
        sync(engine, 1, models)
        while slowed.begun.acquire(blocking=False):
            pass
        assert slowed.begun.acquire(timeout=30), "the responses go on after it"
    for request, answer in zip(requests, found):
        (_, (start, version)) = answer.weight_versions
        assert (version, 1 <= start <= 5) == (1, True)
        expected = REFERENCES[cache](models, request.prompt_token_ids, answer)
        assert largest_difference(answer.logprobs, expected) < TOLERANCE


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("cache", ["recompute", "keep"])
def test_a_thousand_requests_during_updates(cache: Cache) -> None:
    """Two turns of 500 conversations, while weights change as fast as they can be brought."""
    models = [model_of(seed) for seed in range(NUM_MODELS)]
    engine = make_engine(cache)
    positions: list[int] = []
    engine._model.register_forward_pre_hook(
        lambda *given: positions.append(given[2]["input_ids"].numel()), with_kwargs=True
    )
    asked: list[GenerationRequest] = []
    version = 0

    async def converse(number: int) -> list[GenerationOutput]:
        prompt, answers = tuple(4 + (number + index) % 30 for index in range(3 + number % 17)), []
        for turn in range(2):
            sampling = SamplingParams(max_generate_length=8 + number % 25)
            request = GenerationRequest(
                request_id=f"{number}-{turn}", prompt_token_ids=prompt, sampling=sampling, seed=2 * number + turn
            )
            answers.append(await engine.generate(request))
            asked.append(request)
            prompt = (*prompt, *answers[-1].token_ids, 5, 7)
        return answers

    async def converse_all() -> dict[str, GenerationOutput]:
        found = await asyncio.gather(*map(converse, range(500)))
        return {f"{number}-{turn}": answer for number, pair in enumerate(found) for turn, answer in enumerate(pair)}

    results: list[dict[str, GenerationOutput]] = []
    thread = threading.Thread(target=lambda: results.append(asyncio.run(converse_all())), daemon=True)
    thread.start()
    while thread.is_alive():
        version += 1
        sync(engine, version, models)
        thread.join(0.02)
    engine.close()
    (answers,) = results
    runs = [len(answers[request.request_id].weight_versions) for request in asked]
    worst, distance, num_tokens = 0.0, 0.0, 0
    for request in asked:
        answer = answers[request.request_id]
        prompt = request.prompt_token_ids
        worst = max(worst, largest_difference(answer.logprobs, REFERENCES[cache](models, prompt, answer)))
        pure = of_pure_models(models, prompt, answer)
        distance += sum(abs(one - other) for one, other in zip(answer.logprobs, pure))
        num_tokens += len(pure)
    several = sum(number > 1 for number in runs)
    print(
        f"\n{cache}: {len(runs)} requests, {version} updates, {several} requests of several versions (up to {max(runs)}), "
        f"{num_tokens} tokens, {sum(positions)} token positions computed: {worst:.1e} from the reference, "
        f"{distance / num_tokens:.1e} from the pure models in the mean"
    )
    assert len(runs) == 1000
    assert several > 500
    assert worst < TOLERANCE
