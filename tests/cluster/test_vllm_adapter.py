"""An adapter by itself in a real vLLM engine on the CPU: it computes what the merged model does; no older one is left."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from skyrl_train.cluster.engine_group import EngineGroup
from skyrl_train.cluster.learners import start_learner
from skyrl_train.cluster.session import RaySession
from skyrl_train.config import Config
from skyrl_train.config.models import GeneratorConfig, LoraConfig, ModelConfig, VLLMConfig
from skyrl_train.errors import EngineError
from skyrl_train.inference.vllm import VLLMEngine
from skyrl_train.model import load_causal_lm, quiet_transformers
from skyrl_train.model.lora import adapter_tensors, add_adapter, as_they_are, merged_weights
from skyrl_train.runs.construction import engine_settings
from skyrl_train.types import GenerationOutput
from skyrl_train.weight_sync import DeviceSharing
from tests.support.learner_cases import settings_of
from tests.support.ray_learners import SLOT, make_config, mini_batch
from tests.support.vllm_cases import LONG_PROMPT, expected_logprobs, largest_difference, request, sync
from tests.support.weight_cases import in_buckets, sync_of

pytestmark = pytest.mark.cluster

CONFIG = Config(
    model=ModelConfig(lora=LoraConfig(rank=6, alpha=12.0)),
    generator=GeneratorConfig(backend="vllm", vllm=VLLMConfig(lora_sync="adapter")),
)


@pytest.fixture(scope="module")
def engine() -> Iterator[VLLMEngine]:
    opened = VLLMEngine(engine_settings(CONFIG))
    yield opened
    opened.close()


def trained(seed: int, lora: LoraConfig = CONFIG.model.lora) -> nn.Module:
    """The model with an adapter as after a long training."""
    with quiet_transformers():
        model = load_causal_lm(CONFIG.model, "cpu")
    add_adapter(model, lora, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapter_tensors(model).items():
        if "lora_B" in name:
            parameter.data.copy_(0.03 * torch.randn(parameter.shape, generator=generator))
    return model


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in adapter_tensors(model).items()}


def merged(model: nn.Module) -> Mapping[str, Tensor]:
    return dict(merged_weights(model, as_they_are))


def difference(output: GenerationOutput, model: nn.Module | None) -> float:
    """Of the engine's log-probabilities to those of the merged model, or of the base."""
    expected = expected_logprobs(None if model is None else merged(model), LONG_PROMPT, output)
    return largest_difference(output, expected)


def test_before_the_first_sync_it_is_the_base_model(engine: VLLMEngine) -> None:
    assert difference(engine.submit(request("base")).result(60), None) < 1e-4


def test_each_adapter_replaces_the_one_before_and_no_kept_prompt_is_stale(engine: VLLMEngine) -> None:
    for version in (1, 2, 3):
        model = trained(version)
        assert sync(engine, tensors(model), version) == version
        output = engine.submit(request(f"version-{version}")).result(60)
        assert output.weight_versions == ((0, version),)
        assert difference(output, model) < 1e-4
        assert difference(output, None) > 0.05


def test_requests_during_an_update_wait_for_the_new_adapter(engine: VLLMEngine) -> None:
    model = trained(4)
    engine.begin_update()
    held = engine.submit(request("held"))
    for bucket in in_buckets(iter(tensors(model).items())):
        engine.update(bucket)
    assert not held.done()
    engine.finish_update(4, len(tensors(model)))
    assert held.result(60).weight_versions == ((0, 4),)
    assert difference(held.result(60), model) < 1e-4


@pytest.mark.nightly
def test_two_sharded_ranks_sync_their_adapter_alone(session: RaySession, tmp_path: Path) -> None:
    """However they are carried; the engine is compared with the learner after each sync."""
    config = make_config(Path("unused"), strategy="fsdp2")
    config = replace(
        config,
        model=CONFIG.model,
        generator=replace(CONFIG.generator, max_context_length=400, verify_weight_sync=True),
        output_dir=str(tmp_path),
    )
    group = EngineGroup(
        "vllm", engine_settings(config), config.placement, session, [SLOT], num_threads=1, max_restarts=1
    )
    sharing = DeviceSharing(group.living, wait_ready=group.wait_ready)
    learner = start_learner(settings_of(config, "policy"), config.placement, session, [SLOT] * 2, sharing=sharing)()
    try:
        for version, way in enumerate(("shared_memory", "broadcast", "cuda_ipc"), start=1):
            learner.forward_backward(mini_batch(version))
            learner.optim_step()
            file = tmp_path / "weight_sync.jsonl"
            sync_of(config, group, sharing, way, file, adapter_only=True).sync(learner.weights(), version)
    finally:
        learner.close()
        group.close()
    found = [json.loads(line) for line in (tmp_path / "weight_sync.jsonl").read_text().splitlines()]
    assert [record["version"] for record in found] == [1, 2, 3]
    assert all(record["probe_difference"] < 1e-4 for record in found)
    assert all(record["num_bytes"] < 400_000 for record in found), "the whole model has 3,900,000"


def test_an_adapter_is_a_fraction_of_the_weights(engine: VLLMEngine) -> None:
    model = trained(5)
    sizes = [
        sum(bucket.num_bytes for bucket in in_buckets(iter(weights.items())))
        for weights in (tensors(model), merged(model))
    ]
    assert sizes[0] < sizes[1] / 10


def test_an_incomplete_adapter_leaves_an_engine_that_refuses(engine: VLLMEngine) -> None:
    """Last, because the engine answers nothing any more."""
    model = trained(6)
    engine.begin_update()
    first = dict(list(tensors(model).items())[:3])
    for bucket in in_buckets(iter(first.items())):
        engine.update(bucket)
    with pytest.raises(EngineError, match=f"3 of {len(tensors(model))} parameters arrived"):
        engine.finish_update(6, len(tensors(model)))
    with pytest.raises(EngineError, match="half-way"):
        engine.submit(request("refused")).result(60)
