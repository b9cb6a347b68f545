"""Noise by seed and position in a real vLLM engine on the CPU: what it must not depend on, and how it is distributed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from skyrl_train.config import Config
from skyrl_train.inference.vllm import VLLMEngine
from skyrl_train.runs.construction import engine_settings
from skyrl_train.types import SamplingParams
from tests.support.vllm_draws import CONFIG, ask, check_draws, check_repetition

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]


@pytest.fixture(scope="module")
def engine() -> Iterator[VLLMEngine]:
    opened = VLLMEngine(engine_settings(CONFIG))
    yield opened
    opened.close()


def test_seeds_of_the_engine_do_not_repeat_a_response(engine: VLLMEngine) -> None:
    sampling = SamplingParams(max_generate_length=24, temperature=2.0)
    bound = ask(engine, [1] * 5, sampling, name="bound")
    assert len({output.token_ids for output in bound}) == 1
    core = engine._thread.core
    assert core is not None
    core._seeds_by_request = False
    try:
        free = ask(engine, [1] * 5, sampling, name="free")
    finally:
        core._seeds_by_request = True
    assert len({output.token_ids for output in free}) == 5


@pytest.mark.parametrize(
    "truncation",
    [
        {"top_p": 0.8},
        {"top_k": 12},
        {"min_p": 0.02},
        {},
    ],
    ids=str,
)
def test_tokens_are_drawn_by_the_probabilities_that_truncation_leaves(
    engine: VLLMEngine, truncation: dict[str, float]
) -> None:
    check_draws(engine, truncation, tolerance=1e-4)


def test_a_response_is_the_same_alone_in_a_batch_whose_prompts_are_cut_and_in_an_engine_started_later(
    engine: VLLMEngine,
) -> None:
    check_repetition(engine, Config())
