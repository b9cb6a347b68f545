"""Rules of distributed runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skyrl_train.config.models.engines import GeneratorConfig, HTTPConfig, SamplingConfig, VLLMConfig
from skyrl_train.config.models.models import LoraConfig, ModelConfig
from skyrl_train.config.models.placement import PlacementConfig
from skyrl_train.config.rules.validate import run_rules
from skyrl_train.config.rules.validate_engines import ENGINE_RULES
from skyrl_train.config.rules.validate_placement import ENGINE_PLACEMENT_RULES, PLACEMENT_RULES
from skyrl_train.config.schema import Config


def violated(config: Config) -> list[str]:
    return [
        violation.field for violation in run_rules(config, (*PLACEMENT_RULES, *ENGINE_PLACEMENT_RULES, *ENGINE_RULES))
    ]


def with_vllm(**changes: object) -> Config:
    return Config(generator=GeneratorConfig(backend="vllm", **changes))  # type: ignore[arg-type]


def test_the_defaults_hold() -> None:
    assert violated(Config()) == []


@pytest.mark.parametrize(
    ("placement", "field"),
    [
        (
            PlacementConfig(backend="ray", policy_num_workers=3, policy_num_nodes=2, ray_address="auto"),
            "placement.policy_num_nodes",
        ),
        (PlacementConfig(silence_timeout_s=60.0, call_timeout_s=30.0), "placement.silence_timeout_s"),
    ],
)
def test_a_placement_that_contradicts_itself_is_refused(placement: PlacementConfig, field: str) -> None:
    assert violated(Config(placement=placement)) == [field]


def test_vllm_cannot_report_log_probabilities_of_a_tempered_and_truncated_distribution() -> None:
    assert violated(with_vllm(sampling=SamplingConfig(temperature=0.7, top_p=0.9))) == [
        "generator.sampling.temperature"
    ]
    assert violated(with_vllm(sampling=SamplingConfig(temperature=0.7))) == []
    assert violated(with_vllm(sampling=SamplingConfig(temperature=1.0, top_p=0.9))) == []


def test_vllm_takes_temperatures_up_to_two() -> None:
    assert violated(with_vllm(sampling=SamplingConfig(temperature=2.0))) == []
    assert violated(with_vllm(sampling=SamplingConfig(temperature=2.5))) == ["generator.sampling.temperature"]
    assert violated(Config(generator=GeneratorConfig(sampling=SamplingConfig(temperature=2.5)))) == []


def test_a_server_needs_a_scheme() -> None:
    config = Config(generator=GeneratorConfig(backend="http", http=HTTPConfig(url="server:8000")))
    assert violated(config) == ["generator.http.url"]
    assert violated(Config(generator=GeneratorConfig(backend="http"))) == ["generator.http.url"]


def test_an_adapter_is_shipped_to_vllm_only_where_there_is_one_that_it_takes() -> None:
    vllm = VLLMConfig(lora_sync="adapter")
    for rank, expected in ((16, []), (600, ["model.lora.rank"])):
        assert violated(replace(with_vllm(vllm=vllm), model=ModelConfig(lora=LoraConfig(rank=rank)))) == expected
