"""vLLM on a real GPU, where its core is always a process of its own and its runner V2 samples. The cases of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from skyrl_train.config import Config
from skyrl_train.config.models import GeneratorConfig, PlatformConfig, VLLMConfig
from skyrl_train.inference.vllm import VLLMEngine
from skyrl_train.runs.construction import engine_settings
from tests.support.vllm_apart import check_death, check_orphans, check_updates_under_way, endless, settings_apart
from tests.support.vllm_draws import check_draws, check_repetition

__all__ = ["endless"]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

TOLERANCE = 5e-3
"""Of a log-probability in float32, whose products a GPU may round as TF32."""


def sampling_config(**arguments: object) -> Config:
    return replace(
        Config(),
        platform=PlatformConfig(name="gpu", device="cuda:0"),
        deterministic=True,
        generator=GeneratorConfig(
            backend="vllm", vllm=VLLMConfig(max_num_seqs=64, gpu_memory_utilization=0.3, engine_args=arguments)
        ),
    )


@pytest.fixture(scope="module")
def engine() -> Iterator[VLLMEngine]:
    opened = VLLMEngine(settings_apart("cuda:0"))
    yield opened
    opened.close()


@pytest.fixture
def sampling_engine() -> Iterator[VLLMEngine]:
    opened = VLLMEngine(engine_settings(sampling_config(max_num_batched_tokens=128)))
    yield opened
    opened.close()


def test_no_token_is_computed_by_a_mixture_of_weights(engine: VLLMEngine, endless: None) -> None:
    check_updates_under_way(engine, tolerance=TOLERANCE)


def test_a_stopped_core_is_silent_and_a_killed_one_is_noticed(engine: VLLMEngine, endless: None) -> None:
    check_death(engine)


@pytest.mark.parametrize("when", ["while it starts", "while it serves"])
def test_nothing_of_vllm_outlives_its_actor(tmp_path: Path, when: str) -> None:
    check_orphans(tmp_path, when, device="cuda:0")


def test_tokens_are_drawn_by_their_probabilities_and_responses_repeat(sampling_engine: VLLMEngine) -> None:
    """Graphs, chunked prefill and the batch-invariant mode are on."""
    for truncation in ({"top_p": 0.8}, {"top_k": 12.0}, {"min_p": 0.02}, {}):
        check_draws(sampling_engine, truncation, tolerance=TOLERANCE)
    check_repetition(sampling_engine, sampling_config())
