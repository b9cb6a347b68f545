"""What `trainer.moe_routing_replay` cannot be combined with, and which of a run's models and engines it reaches."""

from __future__ import annotations

import pytest

from skyrl_train.config.derived.learners import learner_settings
from skyrl_train.config.models.engines import GeneratorConfig, VLLMConfig
from skyrl_train.config.models.models import CriticConfig, CriticModelConfig, ModelConfig
from skyrl_train.config.models.placement import PlatformConfig
from skyrl_train.config.rules.validate import run_rules
from skyrl_train.config.rules.validate_models import MODEL_RULES
from skyrl_train.config.schema import Config, TrainerConfig
from skyrl_train.inference.vllm import vllm_arguments
from skyrl_train.runs.construction import engine_settings

ON = TrainerConfig(moe_routing_replay=True)
GPU = PlatformConfig(name="gpu", device="cuda")


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (Config(trainer=ON), []),
        (Config(trainer=ON, generator=GeneratorConfig(backend="replay", replay_path="x")), []),
        (Config(trainer=ON, generator=GeneratorConfig(backend="http")), ["generator.backend"]),
        (Config(trainer=ON, generator=GeneratorConfig(backend="vllm")), ["generator.backend"]),
        (Config(trainer=ON, platform=GPU, generator=GeneratorConfig(backend="vllm")), []),
        (
            Config(
                trainer=ON,
                platform=GPU,
                generator=GeneratorConfig(backend="vllm", vllm=VLLMConfig(prefix_caching=False)),
            ),
            ["generator.vllm.prefix_caching"],
        ),
        (Config(trainer=ON, model=ModelConfig(compile=True)), ["model.compile"]),
        (Config(generator=GeneratorConfig(backend="http"), model=ModelConfig(compile=True)), []),
    ],
)
def test_what_cannot_record_or_be_told_is_refused_by_name(config: Config, fields: list[str]) -> None:
    found = [each for each in run_rules(config, MODEL_RULES) if "moe_routing_replay" in str(each)]
    assert [each.field for each in found] == fields


def test_the_policy_replays_what_the_engine_records_and_other_models_choose() -> None:
    config = Config(trainer=ON, critic=CriticConfig(model=CriticModelConfig(path="policy")))
    assert learner_settings(config, "policy").replays_routing
    assert not learner_settings(config, "reference").replays_routing
    assert not learner_settings(config, "critic").replays_routing
    assert not learner_settings(Config(), "policy").replays_routing
    assert engine_settings(config).records_routing
    assert vllm_arguments(engine_settings(config))["enable_return_routed_experts"]
    assert "enable_return_routed_experts" not in vllm_arguments(engine_settings(Config()))
