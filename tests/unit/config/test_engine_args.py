"""`generator.vllm.engine_args` and `generator.seeds`: what vLLM takes and what the trainer sets."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from skyrl_train.config.models.engines import GeneratorConfig, VLLMConfig
from skyrl_train.config.models.models import LoraConfig
from skyrl_train.config.models.placement import PlacementConfig, PlatformConfig
from skyrl_train.config.rules.validate_batch import validate_config
from skyrl_train.config.rules.validate_engines import SET_BY_TRAINER, engine_args_fields
from skyrl_train.config.schema import Config
from skyrl_train.errors import Violation
from skyrl_train.inference.vllm import vllm_arguments, vllm_environment
from skyrl_train.runs.construction import engine_settings

needs_vllm = pytest.mark.skipif(not engine_args_fields(), reason="vllm is not installed")


def with_arguments(arguments: Mapping[str, Any], *, colocate_all: bool = False) -> Config:
    return replace(
        Config(),
        generator=GeneratorConfig(backend="vllm", vllm=VLLMConfig(engine_args=arguments)),
        placement=PlacementConfig(backend="ray", colocate_all=colocate_all),
    )


def violations(config: Config) -> list[Violation]:
    return [each for each in validate_config(config) if "engine_args" in each.field or "seeds" in each.field]


@needs_vllm
def test_what_vllm_takes_is_passed_and_a_name_that_it_does_not_know_is_refused_before_vllm_is_imported() -> None:
    arguments = {"quantization": "fp8", "max_num_batched_tokens": 4096, "speculative_config": {"method": "ngram"}}
    assert violations(with_arguments(arguments)) == []
    found = vllm_arguments(engine_settings(with_arguments(arguments)))
    assert {name: found[name] for name in arguments} == arguments
    started = time.monotonic()
    (found,) = violations(with_arguments({"quantisation": "fp8"}))
    assert time.monotonic() - started < 3.0
    assert found.field == "generator.vllm.engine_args.quantisation"
    assert "quantization" in found.remedy


@needs_vllm
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"max_num_batched_tokens": "many"}, "must be of type int | None"),
        ({"disable_cascade_attn": 1}, "must be of type bool"),
        ({"max_num_batched_tokens": True}, "must be of type int | None"),
    ],
)
def test_a_value_of_another_plain_type_is_refused(arguments: Mapping[str, Any], says: str) -> None:
    (found,) = violations(with_arguments(arguments))
    assert says in found.rule


def test_what_the_trainer_sets_is_refused_with_the_setting_that_says_it() -> None:
    found = violations(with_arguments({"max_model_len": 4096, "weight_transfer_config": None}))
    assert [each.remedy for each in found] == [
        "set generator.max_context_length instead",
        "drop generator.vllm.engine_args.weight_transfer_config: the trainer depends on its own value",
    ]


def test_nothing_that_the_trainer_sets_can_be_overridden_but_how_prompts_are_cut_and_loading_is_shown() -> None:
    gpu = replace(
        with_arguments({}, colocate_all=True),
        platform=PlatformConfig(name="gpu", device="cuda:0"),
        model=replace(Config().model, lora=LoraConfig(rank=8)),
        generator=GeneratorConfig(backend="vllm", vllm=VLLMConfig(lora_sync="adapter", kv_cache_gib=1.0)),
    )
    set_here = {
        *vllm_arguments(engine_settings(gpu)),
        *vllm_arguments(engine_settings(with_arguments({}))),
        "weight_transfer_config",
    }
    left = {"additional_config", "enable_chunked_prefill", "max_num_batched_tokens", "use_tqdm_on_load"}
    assert set_here - set(SET_BY_TRAINER) == left
    if known := engine_args_fields():
        assert set(SET_BY_TRAINER) <= set(known)


def test_what_is_pickled_to_vllms_processes_joins_what_a_user_adds_for_vllm() -> None:
    arguments = vllm_arguments(engine_settings(with_arguments({"additional_config": {"mine": 1}})))
    assert arguments["additional_config"]["mine"] == 1
    assert set(arguments["additional_config"]) == {"mine", "skyrl_train"}


def test_a_gpu_has_the_engines_own_defaults_and_a_cpu_does_not_compile() -> None:
    on_gpu = replace(with_arguments({}), platform=PlatformConfig(name="gpu", device="cuda:0"), deterministic=True)
    gpu, cpu = engine_settings(on_gpu), engine_settings(replace(with_arguments({}), deterministic=True))
    assert "enforce_eager" not in vllm_arguments(gpu)
    assert "enable_chunked_prefill" not in vllm_arguments(gpu)
    assert vllm_arguments(gpu)["enable_prefix_caching"] is True
    assert vllm_environment(gpu)["VLLM_BATCH_INVARIANT"] == "1"
    assert vllm_arguments(cpu)["enforce_eager"] is True
    assert "VLLM_BATCH_INVARIANT" not in vllm_environment(cpu)


def test_pipelines_count_as_devices_and_need_devices_of_their_own() -> None:
    config = with_arguments({"pipeline_parallel_size": 2}, colocate_all=True)
    assert config.generator.vllm.devices_per_engine == 2
    assert [each.field for each in violations(config)] == ["generator.vllm.engine_args.pipeline_parallel_size"]
    apart = with_arguments({"pipeline_parallel_size": 2})
    assert [each.field for each in violations(apart)] == ["generator.vllm.engine_args.pipeline_parallel_size"]
    on_gpus = replace(apart, platform=PlatformConfig(name="gpu", device="cuda:0"))
    assert violations(on_gpus) == []


def test_seeds_of_the_engine_need_an_engine_that_has_one() -> None:
    config = replace(Config(), generator=GeneratorConfig(seeds="engine"))
    assert [each.field for each in violations(config)] == ["generator.seeds"]
    assert violations(replace(config, generator=replace(config.generator, backend="vllm"))) == []


def test_arguments_without_vllm_do_nothing_and_are_refused() -> None:
    config = replace(Config(), generator=GeneratorConfig(vllm=VLLMConfig(engine_args={"quantization": "fp8"})))
    assert [each.field for each in violations(config)] == ["generator.vllm.engine_args"]


@pytest.mark.parametrize(("size", "executor"), [(1, None), (2, "mp")])
def test_an_engine_of_two_gpus_in_one_bundle_starts_its_own_workers(size: int, executor: str | None) -> None:
    """vLLM's Ray executor, which it would take there, refuses a bundle of more than one GPU."""
    config = with_arguments({})
    options = replace(config.generator.vllm, tensor_parallel_size=size)
    config = replace(
        config,
        platform=PlatformConfig(name="gpu", device="cuda:0"),
        generator=replace(config.generator, vllm=options),
    )
    assert vllm_arguments(engine_settings(config)).get("distributed_executor_backend") == executor
