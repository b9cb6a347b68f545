"""What `skyrl-serve` makes of a machine's GPUs: one process on one, a worker with the whole base on each of several."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl_train.errors import ConfigError
from skyrl_train.main_serve import OF_SERVER
from skyrl_train.runs import for_server
from tests.support.auto_placement_cases import gpu_config


def config_of(*words: str, gpus: int = 1) -> Any:
    stated = ("placement.gpu_memory_gb=80", f"placement.num_gpus={gpus}")
    return gpu_config(*OF_SERVER, "model.path=builtin:tiny_qwen2", *stated, *words)


@pytest.mark.parametrize(
    ("gpus", "words", "backend", "workers"),
    [
        (1, (), "inline", 1),
        (2, (), "ray", 2),
        (8, (), "ray", 8),
        (8, ("placement.num_nodes=2", "placement.ray_address=auto"), "ray", 8),
    ],
)
def test_each_gpu_gets_the_whole_base(gpus: int, words: tuple[str, ...], backend: str, workers: int) -> None:
    placed = for_server(config_of(*words, gpus=gpus))
    assert (placed.placement.backend, placed.placement.policy_num_workers) == (backend, workers)
    assert placed.strategy.kind == ("single" if workers == 1 else "ddp")
    assert placed.generator.backend == "hf"


@pytest.mark.parametrize(("word", "field"), [("strategy=fsdp2", "strategy"), ("generator=replay", "generator.backend")])
def test_what_a_server_has_not_is_refused_by_name(word: str, field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        for_server(config_of(word, gpus=2))
    assert [each.field for each in refused.value.violations] == [field]
