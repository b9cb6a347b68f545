"""Real runs of the bundled model whose engine takes new weights between the tokens of running responses."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config import Config
from skyrl_train.config.rules import validate_config
from skyrl_train.inference import EngineSettings, hf
from skyrl_train.interfaces import InferenceEngine
from skyrl_train.registry import reads
from skyrl_train.runs import train
from skyrl_train.telemetry import read_metrics
from skyrl_train.types import Tokenizer
from tests.support.async_runs import check_each_prompt_once, check_versions, exported, make_config, trained

NUM_STEPS = 6


@pytest.fixture
def slow_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner waits for the engine, so that batches have tokens of its own version, and updates find responses."""
    load = hf.load_for_engine

    def slowed(*given: Any) -> Any:
        model = load(*given)
        model.register_forward_pre_hook(lambda *_: time.sleep(0.02))
        return model

    monkeypatch.setattr(hf, "load_for_engine", slowed)


def in_flight_config(root: Path, **trainer: Any) -> Config:
    settings = {"max_staleness": 1, "total_steps": NUM_STEPS, "in_flight_updates": True, **trainer}
    config = make_config(root, **settings)
    policy = config.trainer.policy
    policy = replace(policy, optimizer=replace(policy.optimizer, lr=3e-3))
    config = replace(config, trainer=replace(config.trainer, policy=policy))
    sampling = replace(config.generator.sampling, max_generate_length=24)
    data = replace(config.data, max_train_prompts=4 * NUM_STEPS)
    return replace(config, data=data, generator=replace(config.generator, sampling=sampling, max_batch_size=4))


@pytest.mark.slow
@pytest.mark.parametrize("cache", [pytest.param("recompute", marks=pytest.mark.nightly), "keep"])
def test_responses_of_several_versions_are_trained_on_and_their_distance_is_told(
    tmp_path: Path, slow_engine: None, cache: str
) -> None:
    root = tmp_path / "run"
    config = in_flight_config(root, in_flight_cache=cache, export_hf=True)
    train(config)
    check_each_prompt_once(root, config, num_steps=NUM_STEPS)
    check_versions(root, max_staleness=1)
    turns = [turn for batch in trained(root) for each in batch.trajectories for turn in each.turns]
    assert max(len(turn.weight_versions) for turn in turns) > 1
    records = read_metrics(root / "metrics.jsonl")
    shares = [record.get("off_policy/in_flight/share", 0.0) for record in records]
    distances = [record.get("off_policy/in_flight/cache_distance_max") for record in records]
    print(f"\n{cache}: shares {shares}, distances {distances}")
    assert max(shares) > 0
    assert (max(distance or 0.0 for distance in distances) < 1e-4) == (cache == "recompute")
    serial = {"max_staleness": 0, "in_flight_updates": False, "in_flight_cache": "recompute", "export_hf": True}
    replayed = in_flight_config(tmp_path / "replayed", **serial)
    generator = replace(replayed.generator, backend="replay", replay_path=str(root / "rollouts"))
    train(replace(replayed, generator=generator))
    assert exported(tmp_path / "replayed") == exported(root)


def build_custom(settings: EngineSettings, tokenizer: Tokenizer) -> InferenceEngine:
    """For `generator.backend`: an engine that says nothing of updates."""
    return hf.build_hf_engine(settings, tokenizer)


@reads(in_flight_updates=True)
def build_declared(settings: EngineSettings, tokenizer: Tokenizer) -> InferenceEngine:
    """For `generator.backend`: one that takes them between two tokens."""
    return hf.build_hf_engine(settings, tokenizer)


@pytest.mark.parametrize(
    ("changes", "backend", "field", "message"),
    [
        ({"max_staleness": 0}, "hf", "in_flight_updates", "does nothing with trainer.max_staleness=0"),
        ({}, "http", "in_flight_updates", "does nothing with http: it takes no weights between two tokens"),
        (
            {},
            "test_in_flight_runs:build_custom",
            "in_flight_updates",
            "with test_in_flight_runs:build_custom: it takes no weights between two tokens",
        ),
        (
            {"in_flight_updates": False, "in_flight_cache": "keep"},
            "hf",
            "in_flight_cache",
            "does nothing with trainer.in_flight_updates=false",
        ),
    ],
)
def test_what_an_update_in_flight_needs_is_asked_for_by_name(
    tmp_path: Path, changes: dict[str, Any], backend: str, field: str, message: str
) -> None:
    config = in_flight_config(tmp_path, **changes)
    config = replace(config, generator=replace(config.generator, backend=backend))
    (found,) = [one for one in validate_config(config) if field in one.field]
    assert message in found.rule
    for able in ("hf", "vllm", "test_in_flight_runs:build_declared"):
        config = in_flight_config(tmp_path)
        config = replace(config, generator=replace(config.generator, backend=able))
        assert not [one for one in validate_config(config) if "in_flight" in one.field]
