"""A run that loses a worker is attempted again, so often and on so many ranks as its configuration says."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config import Config, TrainerConfig
from skyrl_train.config.derived import layout_of
from skyrl_train.config.models import GeneratorConfig, PlacementConfig, StrategyConfig, VLLMConfig
from skyrl_train.config.placement import missing_room
from skyrl_train.config.rules import validate_config
from skyrl_train.distributed import is_broken_collective
from skyrl_train.errors import ActorError, ActorLostError, ConfigError, EngineError, MemoryLimitError, StopRequested
from skyrl_train.runs.drive import run_with_restarts
from skyrl_train.runs.restarts import Restarts, smaller
from skyrl_train.telemetry import RunFolder
from skyrl_train.telemetry.logs import RunConsole

DEAD = "policy worker rank 1 (node 10.0.0.2, pid 7) died in phase update (forward_backward): killed\nits log"


def lost(phase: str = "update") -> ActorLostError:
    return ActorLostError(DEAD, phase=phase)


class Run:
    """Attempts that raise these errors in turn, and then succeed."""

    def __init__(self, root: Path, *errors: Exception, max_restarts: int = 2) -> None:
        self.config = Config(trainer=TrainerConfig(max_restarts=max_restarts))
        self.folder, self.said = RunFolder(root), io.StringIO()
        self.folder.create()
        self.errors, self.modes = list(errors), list[str]()

    def go(self) -> int:
        console = RunConsole(file=self.said)
        return run_with_restarts(self.config, self.folder, console, self.attempt)

    def attempt(self, config: Config, restarts: Restarts) -> int:
        self.modes.append(restarts.resume(replace(config.trainer, resume_mode="none")).resume_mode)
        restarts.begun(len(self.modes), policy_num_workers=config.placement.policy_num_workers)
        (self.folder.checkpoints / f"step_{len(self.modes):06d}").mkdir(parents=True)
        if self.errors:
            raise self.errors.pop(0)
        return restarts.count


def test_a_lost_worker_is_answered_by_another_attempt_from_the_last_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, lost(), lost("start"))
    assert run.go() == 2
    assert run.modes == ["none", "latest", "latest"]
    first = DEAD.partition("\n")[0]
    assert f"restart 2 of 2 (trainer.max_restarts), from the last checkpoint: {first}" in run.said.getvalue()
    lines = [json.loads(line) for line in run.folder.restarts_file.read_text().splitlines()]
    assert [(line["restart"], line["after_step"], line["reason"]) for line in lines] == [(1, 2, first), (2, 3, first)]


def test_one_loss_more_than_allowed_ends_the_run_with_it(tmp_path: Path) -> None:
    with pytest.raises(ActorLostError, match="rank 1"):
        Run(tmp_path / "three", lost(), lost(), lost()).go()
    with pytest.raises(ActorLostError, match="rank 1"):
        Run(tmp_path / "off", lost(), max_restarts=0).go()


@pytest.mark.parametrize(
    "error",
    [
        lost("start"),
        ActorError("a loss that raises"),
        ConfigError([]),
        MemoryLimitError("one row"),
        EngineError("refused"),
        StopRequested("SIGTERM", 3),
        ZeroDivisionError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_nothing_else_is_attempted_again_nor_workers_that_never_worked(tmp_path: Path, error: Exception) -> None:
    run = Run(tmp_path, error)
    with pytest.raises(type(error)):
        run.go()
    assert len(run.modes) == 1


def test_a_loss_is_answered_though_closing_what_was_left_failed_too(tmp_path: Path) -> None:
    try:
        try:
            raise lost()
        finally:
            raise OSError("a dead disk")
    except OSError as error:
        closing = error
    assert Run(tmp_path / "closing", closing).go() == 1

    stopped = StopRequested("SIGINT", 1)
    stopped.__context__ = lost()
    with pytest.raises(StopRequested):
        Run(tmp_path / "stopped", stopped).go()


def cluster_of(**placement: Any) -> Config:
    """Two nodes of 4 GPUs for the policy."""
    stated: dict[str, Any] = {
        "backend": "ray",
        "ray_address": "auto",
        "allow_fewer_workers": True,
        "policy_num_nodes": 2,
        "policy_num_gpus_per_node": 4,
        **placement,
    }
    return Config(
        generator=GeneratorConfig(n_samples_per_prompt=3),
        trainer=TrainerConfig(train_batch_size=8, policy_mini_batch_size=8, critic_mini_batch_size=8),
        strategy=StrategyConfig(name="fsdp2"),
        placement=PlacementConfig(**stated),
    )


def test_fewer_ranks_are_the_most_that_the_batch_sizes_allow() -> None:
    config = cluster_of()
    assert validate_config(config) == []
    sizes = [
        (each.placement.policy_num_nodes, each.placement.policy_num_gpus_per_node, each.placement.policy_num_workers)
        for each in smaller(config)
    ]
    # 24 rows are divided by 8, 6, 4, 3, 2 and 1 ranks; 7 and 5 would be refused
    assert sizes == [(2, 3, 6), (2, 2, 4), (1, 4, 4), (1, 3, 3), (2, 1, 2), (1, 2, 2), (1, 1, 1)]
    fits = [each for each in smaller(config) if missing_room(layout_of(each), [{"CPU": 4.0, "GPU": 4.0}]) is None]
    assert fits[0].placement.policy_num_workers == 4


def test_engines_follow_the_devices_that_are_left() -> None:
    config = cluster_of(colocate_all=True)
    config = replace(config, generator=replace(config.generator, backend="vllm", vllm=VLLMConfig(num_engines=8)))
    fewer = next(each for each in smaller(config) if each.placement.policy_num_nodes == 1)
    assert fewer.generator.vllm.count(fewer.placement) == fewer.placement.policy_num_workers == 4


@pytest.mark.parametrize(
    ("placement", "trainer"),
    [({"ray_address": ""}, {}), ({}, {"docs_per_step": 8})],
)
def test_fewer_workers_are_refused_where_they_could_not_help_or_would_train_another_run(
    placement: dict[str, Any], trainer: dict[str, Any]
) -> None:
    config = cluster_of(policy_num_nodes=1, **placement)
    config = replace(config, trainer=replace(config.trainer, **trainer))
    assert "placement.allow_fewer_workers" in [violation.field for violation in validate_config(config)]


@pytest.mark.parametrize(
    ("said", "broken"),
    [
        ("[/__w/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:24980", True),
        ("[/__w/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation", True),
        ("NCCL error in: x.cpp:1, ncclRemoteError: A call failed possibly due to a network error", True),
        ("NCCL error in: x.cpp:1, ncclInvalidUsage: This usually reflects invalid usage of NCCL library", False),
        ("shape '[2, 3]' is invalid for input of size 5", False),
    ],
)
def test_a_collective_that_broke_off_for_a_peer_is_told_from_a_defect(said: str, broken: bool) -> None:
    assert is_broken_collective(RuntimeError(said)) is broken
