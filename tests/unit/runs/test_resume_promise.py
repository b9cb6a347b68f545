"""What the first lines of a run and its `plan.json` say of a resume."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skyrl_train.config import Config
from skyrl_train.config.models import GeneratorConfig, PlatformConfig, SamplingConfig
from skyrl_train.runs.resolving import first_lines, resume_promise

GPU = PlatformConfig(name="gpu", device="cuda:0")
ENGINE_SEEDS = GeneratorConfig(backend="vllm", seeds="engine")


@pytest.mark.parametrize(
    ("config", "promise"),
    [
        (Config(), "identical"),
        (Config(platform=GPU, deterministic=True), "identical (deterministic=true)"),
        (Config(platform=GPU), "identical in data, prompts and seeds, not in rounding (deterministic=false)"),
        (
            Config(generator=ENGINE_SEEDS),
            "not identical: samples are left to the engine's own seed (generator.seeds=engine)",
        ),
        (
            Config(generator=ENGINE_SEEDS, platform=GPU, deterministic=True),
            "not identical: samples are left to the engine's own seed (generator.seeds=engine)",
        ),
    ],
)
def test_a_resume_is_promised_to_be_what_it_is(config: Config, promise: str) -> None:
    assert resume_promise(config) == promise
    assert f"resume      {promise}" in first_lines(config) or promise == "identical"


def test_seeds_of_requests_promise_nothing_less() -> None:
    config = replace(Config(), generator=replace(ENGINE_SEEDS, seeds="request"))
    assert not any(line.startswith("resume") for line in first_lines(config))


def test_how_evaluation_samples_is_told_where_it_differs() -> None:
    shorter = replace(Config().generator, eval_sampling=SamplingConfig(max_generate_length=16))
    told = [line for line in first_lines(replace(Config(), generator=shorter)) if line.startswith("evaluation")]
    assert told == ["evaluation  samples with max_generate_length=16 (training: 64)"]
    assert not any(line.startswith("evaluation") for line in first_lines(Config()))
