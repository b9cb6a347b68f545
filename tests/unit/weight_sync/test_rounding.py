"""Weights of fewer bits in an engine: by hand, in the engine of this process, and what the configuration makes of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from skyrl_train.config import Config, TrainerConfig
from skyrl_train.config.algorithm import AlgorithmConfig, OffPolicyConfig
from skyrl_train.config.models import GeneratorConfig, PlatformConfig, VLLMConfig
from skyrl_train.config.rules import validate_config
from skyrl_train.inference import HFEngine
from skyrl_train.inference.vllm import vllm_arguments
from skyrl_train.runs.construction import engine_settings, tolerance
from skyrl_train.weight_sync.rounding import Rounding, is_rounded, rounded
from tests.support.fakes import make_tiny_model, make_tokenizer

MATRIX = "model.layers.0.mlp.up_proj.weight"


def test_a_row_is_rounded_to_its_own_largest_number() -> None:
    weight = torch.tensor([[127.0, 1.4, -2.6], [0.0, 0.0, 0.0], [-0.127, 0.0005, 0.0]])
    expected = torch.tensor([[127.0, 1.0, -3.0], [0.0, 0.0, 0.0], [-0.127, 0.0, 0.0]])
    torch.testing.assert_close(rounded(MATRIX, weight, "int8"), expected)
    # 448 in units of one: between 256 and 448 numbers are 32 apart, between 16 and 32 they are 2 apart.
    weight = torch.tensor([[448.0, 300.0, 17.5, -1.0]])
    torch.testing.assert_close(rounded(MATRIX, weight, "fp8"), torch.tensor([[448.0, 288.0, 18.0, -1.0]]))


@pytest.mark.parametrize("rounding", ["int8", "fp8"])
def test_what_is_rounded_is_rounded_once_and_by_little(rounding: Rounding) -> None:
    weight = torch.randn(4, 16, 64, generator=torch.Generator().manual_seed(0))  # of experts
    once = rounded(MATRIX, weight, rounding)
    torch.testing.assert_close(rounded(MATRIX, once, rounding), once)
    bound = 1 / 16 * weight.abs() + 1e-3 if rounding == "fp8" else weight.abs().amax(-1, keepdim=True) / 254 + 1e-6
    assert bool(((once - weight).abs() <= bound).all())
    assert not torch.equal(once, weight)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.3.block_sparse_moe.router.weight",
    ],
)
def test_embeddings_head_and_routers_stay_whole(name: str) -> None:
    weight = torch.randn(4, 4)
    assert rounded(name, weight, "int8") is weight
    assert rounded(MATRIX, weight, "none") is weight
    assert not is_rounded("model.layers.0.input_layernorm.weight", weight[0])


def test_an_engine_computes_with_rounded_weights_and_the_trainer_with_whole_ones() -> None:
    trained, model = make_tiny_model(seed=1), make_tiny_model(seed=0)
    engine = HFEngine(model, make_tokenizer(), max_batch_size=4, rounding="int8")
    engine.load_weights(trained.state_dict().items(), 1)
    engine.close()
    own = model.state_dict()
    changed = {name for name, tensor in trained.state_dict().items() if not torch.equal(tensor, own[name])}
    assert changed == {name for name, tensor in own.items() if is_rounded(name, tensor)} != set()


def with_quantization(**changes: object) -> Config:
    generator = GeneratorConfig(quantization="int8")
    return replace(Config(), generator=replace(generator, **changes))


def test_losses_are_corrected_where_engines_are_rounded_unless_something_else_is_asked_for() -> None:
    assert not Config().trainer.algorithm.off_policy.enabled
    assert with_quantization().trainer.algorithm.off_policy.weight == "token"
    for asked in ("none", "sequence"):
        algorithm = AlgorithmConfig(off_policy=OffPolicyConfig(weight=asked))
        config = replace(with_quantization(), trainer=TrainerConfig(algorithm=algorithm))
        assert config.trainer.algorithm.off_policy.weight == asked
    for algorithm in (AlgorithmConfig(proximal="behaviour"), AlgorithmConfig(policy_loss="rollout_is")):
        config = replace(with_quantization(), trainer=TrainerConfig(algorithm=algorithm))
        assert config.trainer.algorithm.off_policy.weight == "none", "the ratio starts at the rollout by itself"


def test_a_gpus_vllm_computes_in_fp8_and_others_with_rounded_weights() -> None:
    gpu = PlatformConfig(name="gpu", device="cuda:0")
    config = replace(with_quantization(backend="vllm", quantization="fp8"), platform=gpu)
    settings = engine_settings(config)
    assert (vllm_arguments(settings)["quantization"], settings.rounding) == ("fp8_per_channel", "none")
    for other in (replace(config, platform=PlatformConfig()), with_quantization(backend="vllm")):
        settings = engine_settings(other)
        assert "quantization" not in vllm_arguments(settings)
        assert settings.rounding == other.generator.quantization
    assert tolerance(config.generator, config.model, config.platform) == math.inf


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"backend": "http"}, "is known to generator=hf and generator=vllm alone"),
        ({"backend": "vllm", "vllm": VLLMConfig(lora_sync="adapter")}, "which sends no matrices to be rounded"),
        ({"backend": "vllm", "vllm": VLLMConfig(engine_args={"quantization": "fp8"})}, "one of them says how"),
    ],
)
def test_what_cannot_be_rounded_is_refused(changes: dict[str, object], rule: str) -> None:
    found = [each for each in validate_config(with_quantization(**changes)) if each.field == "generator.quantization"]
    assert len(found) == 1
    assert rule in found[0].rule
