"""`placement=auto`: what is chosen for stated numbers of GPUs and models of several sizes, and what is refused."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from skyrl_train.config import Config, SFTConfig
from skyrl_train.config.derived import gpus_needed
from skyrl_train.config.models import PlacementConfig, StrategyConfig
from skyrl_train.config.rules import validate_config
from skyrl_train.errors import ConfigError
from skyrl_train.runs.cli.placement import find_devices, place, room_violations
from skyrl_train.runs.planning import main as plan_main
from skyrl_train.system import Devices
from tests.support.auto_placement_cases import COUNTS, SIZES, gpu_config, gpus, sized_model

PLAIN, STATE_AWAY, OFFLOADED = (
    StrategyConfig(name="fsdp2", cpu_offload=offload)  # type: ignore[arg-type]
    for offload in (False, "optimizer", True)
)
CHOSEN = {
    **{("0.5B", count): ((count, 1), PLAIN) for count in COUNTS},
    ("7B", 1): ((1, 1), STATE_AWAY),
    **{("7B", count): ((count, 1), PLAIN) for count in (2, 4, 8)},
    ("32B", 2): ((1, 2), OFFLOADED),
    ("32B", 4): ((2, 2), OFFLOADED),
    ("32B", 8): ((4, 2), STATE_AWAY),
    ("70B", 4): ((1, 4), OFFLOADED),
    ("70B", 8): ((2, 4), OFFLOADED),
}
"""Engines and GPUs of each, and the strategy, on GPUs of 80 GB, trained in full with AdamW; all else is refused."""


def engines(config: Config) -> tuple[int, int]:
    """How many, and GPUs of each."""
    return config.generator.vllm.num_engines, config.generator.vllm.tensor_parallel_size


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("size", SIZES)
def test_each_size_is_placed_on_all_gpus_or_refused_with_a_remedy_that_works(
    tmp_path: Path, size: str, count: int
) -> None:
    model = f"model.path={sized_model(tmp_path / size, size)}"
    config = gpu_config(model)
    try:
        placed = place(config, gpus(count))
    except ConfigError as error:
        assert (size, count) not in CHOSEN
        began = time.process_time()
        with pytest.raises(ConfigError, match=re.escape(str(error))):
            place(config, gpus(count))
        assert time.process_time() - began < 3.0, "what was traced once is remembered"
        (violation,) = error.violations
        assert f"{count} GPU" in violation.value
        settings, larger = remedies(violation.remedy)
        assert larger > count
        assert place(config, gpus(*[8] * (larger // 8) or [larger])).placement.policy_num_workers == larger
        for setting in settings:
            again = place(gpu_config(model, *setting), gpus(count))
            assert validate_config(again) == []
            assert gpus_needed(again) == count
    else:
        assert (engines(placed), placed.strategy) == CHOSEN[size, count]
        assert (placed.placement.colocate_all, placed.placement.policy_num_workers) == (True, count)
        assert gpus_needed(placed) == count
        assert validate_config(placed) == []


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4, 8])
def test_offload_that_is_stated_is_kept(tmp_path: Path, count: int) -> None:
    config = gpu_config(f"model.path={sized_model(tmp_path / 'model', '32B')}", "strategy.cpu_offload=true")
    placed = place(config, gpus(count))
    assert (engines(placed), placed.strategy) == ((count // 2, 2), OFFLOADED)
    assert gpus_needed(placed) == placed.placement.policy_num_workers == count
    assert validate_config(placed) == []


def remedies(text: str) -> tuple[list[list[str]], int]:
    """Settings to add, each group by itself, and the number of GPUs that is enough."""
    parts = text.removeprefix("try ").split(", or ")
    settings = [part.partition(" (")[0].split() for part in parts if "=" in part]
    return settings, int(re.findall(r"(\d+) GPUs", parts[-1])[0])


@pytest.mark.slow
def test_a_large_model_has_engines_over_several_gpus_none_of_which_leaves_its_node(tmp_path: Path) -> None:
    config = gpu_config(f"model.path={sized_model(tmp_path / 'model', '70B')}", "placement.ray_address=auto")
    placed = place(config, gpus(8, 8, 8))
    assert engines(placed) == (6, 4)
    assert (placed.placement.policy_num_nodes, placed.placement.policy_num_gpus_per_node) == (3, 8)


def test_what_only_generates_needs_no_room_to_train(tmp_path: Path) -> None:
    config = gpu_config(f"model.path={sized_model(tmp_path / 'model', '70B')}")
    assert engines(place(config, gpus(8), training=False)) == (2, 4)
    with pytest.raises(ConfigError, match="has no room for 141 GB of weights"):
        place(config, gpus(2), training=False)


@pytest.mark.slow
def test_an_engine_is_split_as_its_heads_allow(tmp_path: Path) -> None:
    config = gpu_config(f"model.path={sized_model(tmp_path / 'model', '7B')}", "strategy.cpu_offload=true")
    assert engines(place(config, gpus(6, memory_gb=30.0))) == (3, 2), "28 heads do not divide by 3 or 6"


@pytest.mark.slow
def test_what_the_user_states_of_engines_is_kept() -> None:
    config = gpu_config("generator.vllm.tensor_parallel_size=2")
    assert engines(place(config, gpus(8))) == (4, 2)


@pytest.mark.slow
def test_nodes_with_unequal_numbers_of_gpus_are_used_as_far_as_they_are_equal() -> None:
    placed = place(gpu_config("placement.ray_address=auto"), gpus(8, 8, 2)).placement
    assert (placed.policy_num_nodes, placed.policy_num_gpus_per_node, placed.policy_num_workers) == (2, 8, 16)


def test_stated_counts_need_no_device_and_are_spread_over_nodes() -> None:
    found = find_devices(PlacementConfig(auto=True, num_gpus=16, num_nodes=2, gpu_memory_gb=141.0))
    assert (found.gpus_per_node, found.memory_gb, found.source) == ((8, 8), 141.0, "placement.num_gpus=16")


@pytest.mark.slow
def test_a_placement_that_was_chosen_is_as_if_it_were_stated() -> None:
    placed = place(gpu_config("placement.num_gpus=4"))
    assert placed.placement.auto is False
    assert place(placed) == placed


def test_the_engine_of_transformers_is_in_one_process_with_the_trainer() -> None:
    placed = place(gpu_config("generator=hf"), gpus(4))
    assert (placed.placement.backend, placed.strategy.name) == ("inline", "single")
    assert validate_config(placed) == []


def test_supervised_runs_have_one_process_on_one_gpu_and_ranks_on_several() -> None:
    config = SFTConfig(
        platform=gpu_config().platform, placement=PlacementConfig(auto=True, backend="ray"), model=gpu_config().model
    )
    assert place(config, gpus(1)).placement.backend == "inline"
    several = place(config, gpus(4))
    assert (several.placement.policy_num_workers, several.strategy.name) == (4, "fsdp2")


@pytest.mark.parametrize(
    ("overrides", "devices", "field", "remedy"),
    [
        (["placement.policy_num_workers=4"], gpus(8), "placement.policy_num_workers", "add placement=ray"),
        (["placement.colocate_all=true"], gpus(8), "placement.colocate_all", "add placement=ray"),
        ([], Devices(source="no CUDA device found"), "placement.auto", "try platform=cpu"),
    ],
)
def test_what_contradicts_the_choice_or_leaves_nothing_to_choose_is_refused(
    overrides: list[str], devices: Devices, field: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        place(gpu_config(*overrides), devices)
    (violation,) = caught.value.violations
    assert violation.field == field
    assert violation.remedy.startswith(remedy)


def test_a_stated_placement_that_this_machine_has_no_gpus_for_is_refused() -> None:
    (violation,) = room_violations(gpu_config("placement=gpu_8_split", "generator.vllm.num_engines=4"))
    assert violation.rule.startswith("needs 8 GPUs, and there are 0")
    assert "platform=cpu" in violation.remedy


@pytest.mark.parametrize("count", [pytest.param(count, marks=pytest.mark.nightly) for count in COUNTS])
def test_the_plan_shows_placement_engines_and_gpus_needed_and_found(
    count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["+experiment=gsm8k_multiturn", "platform=gpu", f"placement.num_gpus={count}"]
    assert plan_main(arguments) == 0
    printed, began = capsys.readouterr().out, time.process_time()
    assert plan_main(arguments) == 0
    assert time.process_time() - began < 3.0, "what was traced once is remembered"
    assert f"{count} needed, {count} found (placement.num_gpus={count})" in printed
    assert f"{count} vLLM engine" in printed
    assert "layout auto, micro-batches auto" in printed
    assert "Memory of a device of 80 GB" in printed


@pytest.mark.nightly
def test_the_plan_of_a_machine_without_a_gpu_says_that_it_was_made_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_main(["+experiment=gsm8k_multiturn", "platform=gpu", "--format", "json"]) == 0
    placement = json.loads(capsys.readouterr().out)["placement"]
    assert (placement["gpus_needed"], placement["gpus_found"]) == (1, 0)


@pytest.mark.slow
def test_a_plan_for_a_model_that_does_not_fit_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["+experiment=gsm8k_multiturn", "platform=gpu", "placement.num_gpus=1", "model.path=Qwen/Qwen2.5-32B"]
    assert plan_main(arguments) == 2
    assert "Try 2 GPUs" in capsys.readouterr().out
