"""Weights that are not trained are held in the type of the forward pass, and a plan knows what that takes."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from skyrl_train.batch.steps import close_mini_batch
from skyrl_train.config import Config, PlanConfig, TrainerConfig
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.models import GeneratorConfig, LoraConfig, ModelConfig, PlatformConfig, StrategyConfig
from skyrl_train.config.placement import Role
from skyrl_train.config.rules import quantization
from skyrl_train.distributed import Sharded
from skyrl_train.inference import EngineSettings, build_hf_engine, load_for_engine
from skyrl_train.learner.memory.predict import Effort
from skyrl_train.learner.memory.share import DeviceShare
from skyrl_train.model import load_tokenizer, quiet_transformers
from skyrl_train.model.lora import is_adapter, merged_weights
from skyrl_train.model.sizes import ParameterCounts
from skyrl_train.plan import models_of
from tests.support.gloo_ranks import on_ranks
from tests.support.learner_cases import critic_of, make_batch, policy_of

HAS_BITSANDBYTES = find_spec("bitsandbytes") is not None
NO_ADAPTER, ADAPTER = LoraConfig(), LoraConfig(rank=4)


def config_of(dtype: str, lora: LoraConfig = NO_ADAPTER) -> Config:
    model = ModelConfig(dtype=dtype, lora=lora)  # type: ignore[arg-type]
    algorithm = AlgorithmConfig(kl_loss_coef=0.1)
    return Config(model=model, trainer=TrainerConfig(algorithm=algorithm), plan=PlanConfig(device_memory_gb=1.0))


def held_types(model: nn.Module) -> dict[str, set[torch.dtype]]:
    found: dict[str, set[torch.dtype]] = {}
    for name, parameter in model.named_parameters():
        kind = "adapter" if is_adapter(name) else "head" if name.startswith("score.") else "weights"
        found.setdefault(kind, set()).add(parameter.dtype)
    return found


@pytest.mark.parametrize(
    ("role", "lora", "expected"),
    [
        ("policy", NO_ADAPTER, {"weights": {torch.float32}}),
        ("policy", ADAPTER, {"weights": {torch.bfloat16}, "adapter": {torch.float32}}),
        ("reference", NO_ADAPTER, {"weights": {torch.bfloat16}}),
    ],
)
def test_what_is_frozen_is_held_in_the_type_of_the_forward_and_predicted_so(
    role: Role, lora: LoraConfig, expected: dict[str, set[torch.dtype]]
) -> None:
    config = config_of("bfloat16", lora)
    learner = policy_of(config, role=role)
    assert held_types(learner.engine.model) == expected
    held = sum(each.numel() * each.element_size() for each in learner.engine.model.parameters())
    share = models_of(config, Effort())[role]
    assert share.share.resident(share.counts, training=False)["parameters"] == held


def test_the_adapter_of_a_critic_leaves_its_value_head_in_float32() -> None:
    config = config_of("bfloat16")
    critic = replace(config.critic, model=replace(config.critic.model, path="policy", lora=ADAPTER))
    learner = critic_of(replace(config, critic=critic))
    assert held_types(learner.engine.model) == {
        "weights": {torch.bfloat16},
        "adapter": {torch.float32},
        "head": {torch.float32},
    }


def test_an_engine_in_this_process_holds_the_type_of_the_forward() -> None:
    for dtype in ("float32", "bfloat16"):
        model = ModelConfig(dtype=dtype)  # type: ignore[arg-type]
        settings = EngineSettings(model=model, generator=GeneratorConfig(), platform=PlatformConfig())
        engine = build_hf_engine(settings, load_tokenizer(model))
        assert {str(each.dtype) for each in engine._model.parameters()} == {f"torch.{dtype}"}
        engine.close()


def test_a_frozen_reference_scores_as_the_weights_in_float32_do_within_their_rounding() -> None:
    rows = make_batch([9, 14, 6])
    exact = policy_of(config_of("float32"), role="reference").forward(rows)
    held = policy_of(config_of("bfloat16"), role="reference").forward(rows)
    assert 0 < float((held - exact).abs().max()) < 0.15


FIELD = "model.quantization"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"quantization": "nf4"}, "holds weights that are not trained, and without an adapter all are"),
        ({"quantization": "nf4", "lora": ADAPTER, "loader": "m:f"}, "is done by the loader of transformers alone"),
        ({"quantization": "nf4", "lora": ADAPTER}, "" if HAS_BITSANDBYTES else "needs bitsandbytes"),
        ({}, ""),
    ],
)
def test_4_bits_are_refused_in_a_line_where_they_cannot_work(changes: dict[str, Any], told: str) -> None:
    found = [each.rule for each in quantization(ModelConfig(**changes), StrategyConfig()) if each.field == FIELD]
    assert any(told in rule for rule in found) if told else not found
    sharded = [each.rule for each in quantization(ModelConfig(**changes), StrategyConfig(name="fsdp2"))]
    assert any("not known to strategy=fsdp2" in rule for rule in sharded) == bool(changes)


def test_a_plan_counts_half_a_byte_for_what_is_frozen_in_4_bits() -> None:
    counts = ParameterCounts(total=1_100, trained=100, block=200, root=360)
    share = DeviceShare(frozen_bytes=2, in_4_bits=True)
    assert share.resident(counts, training=False)["parameters"] == 2 * 360 + 640 // 2 + 640 // 64 + 4 * 100


@pytest.mark.skipif(not HAS_BITSANDBYTES, reason="bitsandbytes is not installed")
def test_an_adapter_over_4_bits_learns_and_what_is_synced_and_exported_is_what_it_computes(tmp_path: Path) -> None:
    config = config_of("float32", ADAPTER)
    config = replace(config, model=replace(config.model, quantization="nf4"))
    learner = policy_of(config)
    model = learner.engine.model
    packed = model.get_parameter("model.layers.0.self_attn.q_proj.base_layer.weight")
    assert packed.dtype == torch.uint8
    rows = make_batch([9, 14, 6], dtype=torch.float32)
    mini_batch = close_mini_batch(rows, loss_reduction="token_mean", max_sequence_length_for_norm=64)
    before = learner.forward(rows)
    for _ in range(3):
        learner.forward_backward(mini_batch)
        learner.optim_step()
    after = learner.forward(rows)
    assert not torch.equal(before, after)
    assert learner.forward_base(rows).sub(before).abs().max() < 1e-5  # the base did not move

    engine = load_for_engine(config.model, "cpu")
    own = dict(engine.named_parameters())
    for name, tensor in learner.weights():
        assert (tensor.shape, tensor.dtype) == (own[name].shape, torch.float32)
        own[name].data.copy_(tensor)
    learner.export_hf(tmp_path)
    with quiet_transformers():
        exported = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not hasattr(exported.config, "quantization_config")
    ids = rows["input_ids"][:9].long()[None]
    with torch.no_grad():
        for whole in (engine.eval(), exported.eval()):
            scores = whole(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
            assert (scores[2:] - after[3:9]).abs().max() < 1e-4


def train_adapter(strategy: Sharded | None) -> dict[str, torch.Tensor]:
    """The merged weights after a step."""
    learner = policy_of(config_of("bfloat16", ADAPTER), strategy=strategy)
    rows = make_batch([9, 14, 6, 7], dtype=torch.float32)
    mini_batch = close_mini_batch(rows, loss_reduction="token_mean", max_sequence_length_for_norm=64)
    if strategy is not None:
        own = torch.arange(4)[strategy.rank :: strategy.num_ranks]
        mini_batch = replace(mini_batch, batch=mini_batch.batch.take(own))
    learner.forward_backward(mini_batch)
    learner.optim_step()
    return {
        name: tensor.clone() for name, tensor in merged_weights(learner.engine.model, learner.engine.strategy.gather)
    }


def on_rank(rank: int, folder: Path) -> bool:
    sharded = Sharded(device=torch.device("cpu"), dtype=torch.bfloat16, cpu_offload=False)
    found, alone = train_adapter(sharded), train_adapter(None)
    return all(torch.allclose(found[name].float(), alone[name].float(), atol=2e-2) for name in alone)


@pytest.mark.slow
def test_ranks_shard_frozen_weights_beside_an_adapter_of_another_type(tmp_path: Path) -> None:
    assert on_ranks(on_rank, tmp_path) == [True, True]
