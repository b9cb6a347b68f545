"""Noise by seed and position in a real vLLM engine on the CPU: what it must not depend on, and how it is distributed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from skyrl_train.config.generation import GeneratorConfig, VLLMConfig
from skyrl_train.config.schema import Config
from skyrl_train.inference.vllm import VLLMEngine
from skyrl_train.model.causal_lm import load_causal_lm
from skyrl_train.runs.build_engines import engine_settings
from skyrl_train.types import GenerationOutput, GenerationRequest, SamplingParams

pytestmark = pytest.mark.cluster

ARGUMENTS = {"enable_chunked_prefill": True, "max_num_batched_tokens": 128}
"""With generators of its own vLLM breaks here ("CPU Generator does not use offset")."""
CONFIG = replace(Config(), generator=GeneratorConfig(vllm=VLLMConfig(max_num_seqs=64, engine_args=ARGUMENTS)))
PROMPT = tuple(5 + index % 50 for index in range(200))


@pytest.fixture(scope="module")
def engine() -> Iterator[VLLMEngine]:
    opened = VLLMEngine(engine_settings(CONFIG))
    yield opened
    opened.close()


def ask(engine: VLLMEngine, seeds: list[int], sampling: SamplingParams, *, name: str) -> list[GenerationOutput]:
    """One request a seed, all at once."""
    asked = [
        GenerationRequest(request_id=f"{name}-{n}", prompt_token_ids=PROMPT, sampling=sampling, seed=seed)
        for n, seed in enumerate(seeds)
    ]
    return [future.result(120) for future in [engine.submit(each) for each in asked]]


def test_seeds_of_the_engine_do_not_repeat_a_response(engine: VLLMEngine) -> None:
    sampling = SamplingParams(max_generate_length=24, temperature=2.0)
    bound = ask(engine, [1] * 5, sampling, name="bound")
    assert len({output.token_ids for output in bound}) == 1
    core = engine._thread.core
    assert core is not None
    of_request, core._settings = core._settings, replace(core._settings, seeds_by_request=False)
    try:
        free = ask(engine, [1] * 5, sampling, name="free")
    finally:
        core._settings = of_request
    assert len({output.token_ids for output in free}) == 5


@pytest.mark.parametrize("truncation", [{"top_p": 0.8}, {"top_k": 12}, {"min_p": 0.02}, {}], ids=str)
def test_tokens_are_drawn_by_the_probabilities_that_truncation_leaves(
    engine: VLLMEngine, truncation: dict[str, float]
) -> None:
    check_draws(engine, truncation, tolerance=1e-4)


def check_draws(engine: VLLMEngine, truncation: dict[str, float], *, tolerance: float) -> None:
    """Chi-square of 3,000 first tokens, each with a seed of its own, against the trainer's model; `tolerance` is of a
    log-probability."""
    number, temperature = 3000, 2.0
    sampling = SamplingParams(max_generate_length=1, temperature=temperature, **truncation)  # type: ignore[arg-type]
    outputs = ask(engine, list(range(number)), sampling, name=f"draw-{truncation}")
    with torch.no_grad():
        logits = load_causal_lm(CONFIG.model, "cpu")(input_ids=torch.tensor([PROMPT])).logits[0, -1].double()
    probabilities, order = (logits / temperature).softmax(0).sort(descending=True)
    keeps = (probabilities.cumsum(0) - probabilities < truncation.get("top_p", 1.0)) & (
        probabilities >= truncation.get("min_p", 0.0) * probabilities[0]
    )
    keeps[int(truncation.get("top_k", len(keeps))) :] = False
    kept, expected = order[keeps], number * probabilities[keeps] / probabilities[keeps].sum()
    counts = torch.bincount(torch.tensor([output.token_ids[0] for output in outputs]), minlength=len(logits))[kept]
    assert counts.sum() == number, "nothing that is cut off is drawn"
    common = expected >= 5
    assert common.sum() > 4
    chi_square = float(((counts[common] - expected[common]) ** 2 / expected[common]).sum())
    freedom = int(common.sum()) - 1
    print(f"\n{truncation}: chi-square {chi_square:.1f} at {freedom} degrees of freedom")
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5
    reported = logits.log_softmax(0)
    for output in outputs[:50]:
        assert output.logprobs[0] == pytest.approx(float(reported[output.token_ids[0]]), abs=tolerance), (
            "without the noise"
        )


def test_a_response_is_the_same_alone_in_a_batch_whose_prompts_are_cut_and_in_an_engine_started_later(
    engine: VLLMEngine,
) -> None:
    check_repetition(engine, Config())


def check_repetition(engine: VLLMEngine, later: Config) -> None:
    """Closes the engine; `later` is that of the one that is started after it."""
    sampling, seeds = SamplingParams(max_generate_length=24), list(range(30))
    together = [output.token_ids for output in ask(engine, seeds, sampling, name="together")]
    alone = [ask(engine, [seed], sampling, name=f"alone-{seed}")[0].token_ids for seed in seeds]
    assert together == alone
    assert len(set(together)) > len(seeds) / 2
    engine.close()
    resumed = VLLMEngine(engine_settings(later))
    try:
        assert [output.token_ids for output in ask(resumed, seeds[::-1], sampling, name="resumed")] == together[::-1]
    finally:
        resumed.close()
