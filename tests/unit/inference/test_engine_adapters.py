"""The Hugging Face engine with adapters beside its own weights: whose answers they are, and whose memory."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_train import load_config
from skyrl_train.config.derived import learner_settings
from skyrl_train.config.models import LoraConfig, OptimizerConfig
from skyrl_train.errors import EngineError
from skyrl_train.inference import HFEngine, load_for_engine
from skyrl_train.learner import AdapterLearners
from skyrl_train.model import load_tokenizer
from skyrl_train.types import GenerationOutput, GenerationRequest, SamplingParams, StopReason

pytest.importorskip("peft")
PROMPT = (1, 2, 3, 4, 5)


@pytest.fixture
def learners() -> AdapterLearners:
    made = AdapterLearners(learner_settings(load_config("generator.sampling.temperature=1.0"), "policy"))
    for number, name in enumerate(("one", "two")):
        torch.manual_seed(number)
        made.create(name, lora(made), seed=number, optimizer=OptimizerConfig(name="adamw"))
        for key, parameter in made._learners[name].engine.parameters.items():
            if "lora_B" in key:
                torch.nn.init.normal_(parameter, std=0.05)
    return made


def lora(learners: AdapterLearners) -> LoraConfig:
    return LoraConfig(rank=4, targets=learners.targets(attention=True, mlp=True))


@pytest.fixture
def engine(learners: AdapterLearners) -> HFEngine:
    config = load_config("generator.sampling.temperature=1.0")
    made = HFEngine(load_for_engine(config.model, "cpu"), load_tokenizer(config.model), max_batch_size=8)
    made.share_weights(learners.base_weights())
    for name in ("one", "two"):
        made.load_adapter(name, lora(learners), learners.tensors(name))
    return made


def request(number: int = 0, adapter: str = "", **facts: Any) -> GenerationRequest:
    sampling = SamplingParams(temperature=0.0, max_generate_length=5)
    facts = {"prompt_token_ids": PROMPT, "sampling": sampling, "seed": 1, **facts}
    return GenerationRequest(request_id=f"r{number}", adapter=adapter, **facts)


def answers(engine: HFEngine, *requests: GenerationRequest) -> list[GenerationOutput]:
    async def run() -> list[GenerationOutput]:
        return list(await asyncio.gather(*map(engine.generate, requests)))

    return asyncio.run(run())


@pytest.mark.slow
def test_requests_of_several_adapters_in_one_wave_each_get_their_own(engine: HFEngine) -> None:
    together = answers(engine, *(request(number, name) for number, name in enumerate(("one", "", "two", "one", ""))))
    assert together[0] == together[3]
    assert together[1] == together[4]
    assert len({each.token_ids for each in together}) == 3
    for number, name in ((0, "one"), (1, ""), (2, "two")):
        alone = answers(engine, request(9, name))[0]
        assert alone.token_ids == together[number].token_ids
        np.testing.assert_allclose(alone.logprobs, together[number].logprobs, atol=1e-5)  # one row, or two


@pytest.mark.slow
def test_the_base_lies_in_memory_once_and_adapters_are_copies(engine: HFEngine, learners: AdapterLearners) -> None:
    own = dict(engine._model.named_parameters())
    base = learners.base_weights()
    shared = [name for name, each in own.items() if each.data_ptr() in {theirs.data_ptr() for theirs in base.values()}]
    assert {name.replace(".base_layer", "") for name in shared} == base.keys()
    before = answers(engine, request(0, "one"))
    for parameter in learners._learners["one"].engine.parameters.values():
        parameter.data.fill_(0.5)
    assert answers(engine, request(0, "one")) == before


@pytest.mark.slow
def test_an_adapter_that_is_gone_or_unknown_is_refused_and_others_stay(engine: HFEngine) -> None:
    before = answers(engine, request(0, "two"))
    answers(engine, request(1, "one"))
    engine.unload_adapter("one")
    with pytest.raises(EngineError, match="no adapter 'one'"):
        answers(engine, request(2, "one"))
    assert answers(engine, request(0, "two")) == before


@pytest.mark.parametrize("others", [(), ("two", "")])
def test_an_adapter_that_goes_takes_no_request_of_another_with_it(engine: HFEngine, others: tuple[str, ...]) -> None:
    expected = [each.token_ids for each in answers(engine, *(request(0, name) for name in others))]

    async def run() -> list[GenerationOutput]:
        with engine._weights_lock:  # as a batch that is computed before
            gone, *asked = [asyncio.ensure_future(engine.generate(request(1, name))) for name in ("one", *others)]
            await asyncio.sleep(0)
            engine.unload_adapter("one")
        with pytest.raises(EngineError, match=r"^the engine has no adapter 'one'$"):
            await gone
        return list(await asyncio.gather(*asked))

    assert [each.token_ids for each in asyncio.run(run())] == expected


def test_an_adapter_takes_the_place_of_the_one_that_went_before_it(engine: HFEngine, learners: AdapterLearners) -> None:
    expected = answers(engine, request(0, "two"))[0]
    answers(engine, request(1, "one"))
    before = [parameter.data_ptr() for parameter in engine._model.parameters()]
    engine.unload_adapter("one")
    assert {adapter for adapter, _ in engine._decoder._prefixes._kept} == {"two"}
    engine.load_adapter("three", lora(learners), learners.tensors("two"))
    assert [parameter.data_ptr() for parameter in engine._model.parameters()] == before
    assert answers(engine, request(0, "three"))[0].token_ids == expected.token_ids
    for name in ("two", "three"):
        engine.unload_adapter(name)
    assert sum(1 for _ in engine._model.parameters()) < len(before), "of two that went the memory of one is kept"


@pytest.mark.slow
def test_an_adapter_of_another_shape_is_refused_whole(engine: HFEngine, learners: AdapterLearners) -> None:
    before = answers(engine, request(0, "two"))
    tensors = learners.tensors("one")
    first = next(iter(tensors))
    for wrong in ({**tensors, first: tensors[first][:1]}, {key: each for key, each in tensors.items() if key != first}):
        with pytest.raises(EngineError, match="'three'"):
            engine.load_adapter("three", lora(learners), wrong)
    assert answers(engine, request(0, "two")) == before
    with pytest.raises(EngineError, match="weights of another model"):
        engine.share_weights({})


@pytest.mark.slow
def test_scores_are_those_that_tokens_were_sampled_with(engine: HFEngine) -> None:
    output = answers(engine, request(0, "two"))[0]
    scored = asyncio.run(engine.score((*PROMPT, *output.token_ids), adapter="two", top_k=3))
    np.testing.assert_allclose(scored.logprobs[len(PROMPT) - 1 :], output.logprobs, atol=1e-5)
    tail = scored.behind(len(PROMPT) - 1)
    assert tail.top_token_ids[:, 0].tolist() == list(output.token_ids), "greedy tokens are the likeliest"
    np.testing.assert_allclose(tail.top_logprobs[:, 0], output.logprobs, atol=1e-5)
    assert (np.diff(scored.top_logprobs, axis=1) <= 0).all()
    one = asyncio.run(engine.score((7,), top_k=2))
    assert (one.logprobs.shape, one.top_token_ids.shape) == ((0,), (0, 2))


@pytest.mark.slow
def test_responses_end_with_the_tokens_that_a_request_names(engine: HFEngine) -> None:
    plain = answers(engine, request())[0]
    stopped = answers(engine, request(stop_token_ids=(plain.token_ids[2],)))[0]
    assert (stopped.token_ids, stopped.stop_reason) == (plain.token_ids[:3], StopReason.STOP)
    engine._decoder._eos_token_ids = frozenset(plain.token_ids[:1])
    assert answers(engine, request())[0].token_ids == plain.token_ids[:1]
    on = answers(engine, request(ignores_eos=True))[0]
    assert (on.token_ids, on.stop_reason) == (plain.token_ids, StopReason.LENGTH)


@pytest.mark.slow
def test_one_batch_of_several_adapters_gives_what_each_gives_alone(engine: HFEngine) -> None:
    """Prompts of two lengths, rows that end early; in as many forwards as the longest row has. In
    float64, where only what is computed counts: in float32 a product of more rows rounds otherwise (3e-6 here)."""
    engine._model.double()
    sampling = SamplingParams(temperature=1.0, max_generate_length=6)
    short = SamplingParams(temperature=1.0, max_generate_length=2)
    asked = [
        request(
            number, name, seed=number // 2, prompt_token_ids=prompt, sampling=short if number % 3 == 1 else sampling
        )
        for number, (name, prompt) in enumerate(
            [(name, PROMPT[:length]) for name in ("two", "", "one", "") for length in (5, 3)]
        )
    ]
    forwards = []
    hook = engine._model.register_forward_hook(lambda *_: forwards.append(1))
    together = answers(engine, *asked)
    hook.remove()
    assert len(forwards) <= 2 + 5, "prompts of two lengths at most, then a token of every row"
    engine._decoder.forget()
    for each, found in zip(asked, together):
        alone = answers(engine, each)[0]
        assert alone.token_ids == found.token_ids
        np.testing.assert_allclose(alone.logprobs, found.logprobs, atol=1e-12)


@pytest.mark.slow
def test_what_one_adapter_computed_is_not_continued_by_another(engine: HFEngine) -> None:
    first = answers(engine, request(0, "one"))[0]
    longer = (*PROMPT, *first.token_ids)
    found = {
        name: answers(engine, request(1, name, prompt_token_ids=longer))[0].logprobs for name in ("one", "two", "")
    }
    engine._decoder.forget()
    for name, logprobs in found.items():
        alone = answers(engine, request(1, name, prompt_token_ids=longer))[0].logprobs
        np.testing.assert_allclose(logprobs, alone, atol=1e-6)


@pytest.mark.slow
def test_an_adapter_on_other_layers_than_its_neighbour_computes_its_own(
    engine: HFEngine, learners: AdapterLearners
) -> None:
    attention = LoraConfig(rank=2, targets=learners.targets(attention=True, mlp=False))
    learners.create("three", attention, seed=3, optimizer=OptimizerConfig(name="adamw"))
    for key, parameter in learners._learners["three"].engine.parameters.items():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.05)
    engine.load_adapter("three", attention, learners.tensors("three"))
    engine._model.double()
    together = answers(engine, *(request(number, name) for number, name in enumerate(("three", "one", "", "two"))))
    for name, found in zip(("three", "one", "", "two"), together):
        alone = answers(engine, request(9, name))[0]
        assert alone.token_ids == found.token_ids
        np.testing.assert_allclose(alone.logprobs, found.logprobs, atol=1e-12)
