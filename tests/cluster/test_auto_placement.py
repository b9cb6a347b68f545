"""`placement=auto` where a real Ray counts, reserves and trains, and the engines that it asks for in vLLM's own words."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.errors import ConfigError
from skyrl_train.inference.vllm import vllm_arguments
from skyrl_train.runs.cli import place
from skyrl_train.runs.construction import engine_settings
from tests.support.auto_placement_cases import COUNTS, SIZES, gpu_config, gpus, sized_model
from tests.support.learner_cases import policy_of
from tests.support.ray_learners import make_config, three_steps, weights_of

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(model_folder: Path) -> dict[int, Any]:
    result = subprocess.run(
        [sys.executable, "-m", "tests.cluster.auto_placement_on_ray", str(model_folder)],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith('{"count"')]
    return {line["count"]: line for line in lines}


@pytest.mark.nightly
@pytest.mark.parametrize("count", COUNTS)
def test_each_gpu_of_the_cluster_has_a_rank_and_an_engine(found: dict[int, Any], count: int) -> None:
    policy, engine = found[count]["policy"], found[count]["engine"]
    assert len(set(policy)) == count
    assert policy == engine


@pytest.mark.nightly
@pytest.mark.parametrize("count", COUNTS)
def test_the_tiny_model_trains_in_the_same_bundles(found: dict[int, Any], count: int, model_folder: Path) -> None:
    config = make_config(model_folder)
    alone = policy_of(config)
    three_steps(alone)
    total = sum(float(tensor.double().abs().sum()) for tensor in weights_of(alone).values())
    assert found[count]["trained"] == pytest.approx(total, rel=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("count", COUNTS)
def test_more_gpus_than_there_are_is_refused_without_waiting(found: dict[int, Any], count: int) -> None:
    refusal = found[count]["refusal"]
    assert "1 node with" in refusal["says"]
    assert f"GPU {count}" in refusal["says"]
    assert refusal["seconds"] < 30.0, "under a second where nothing else runs; waiting would take 300"


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    "size", [pytest.param(size, marks=() if size in ("0.5B", "7B") else pytest.mark.nightly) for size in SIZES]
)
def test_vllm_knows_every_argument_of_the_engines_that_are_chosen(
    tmp_path: Path, size: str, count: int, offload: bool
) -> None:
    from vllm import EngineArgs

    model = sized_model(tmp_path / "model", size)
    config = gpu_config(f"model.path={model}", *(["strategy.cpu_offload=true"] if offload else []))
    try:
        placed = place(config, gpus(count))
    except ConfigError:
        pytest.skip("refused: tests/unit/runs/test_auto_placement.py shows that its remedies work")
    arguments = vllm_arguments(engine_settings(placed))
    assert set(arguments) <= set(inspect.signature(EngineArgs).parameters)
    engine = EngineArgs(**arguments)
    assert count % engine.tensor_parallel_size == 0
    assert SIZES[size]["num_attention_heads"] % engine.tensor_parallel_size == 0
