"""Environments in worker processes on the nodes of Ray: as without Ray, whatever they do there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from skyrl_train.cluster.environment_workers import RayWorkers
from skyrl_train.cluster.session import RaySession
from skyrl_train.config.data import EnvironmentConfig
from skyrl_train.errors import ConfigError
from skyrl_train.rollout.hosts import LocalWorkers
from tests.reliability.hostile_environments import HOSTILE
from tests.support.command_runs import records, run_command
from tests.support.hostile_play import Played
from tests.support.process_trees import descendants

pytestmark = pytest.mark.cluster

ENVIRONMENT = EnvironmentConfig(env_class=HOSTILE, worker_memory_gb=0.5)


@pytest.fixture
def on_ray(session: RaySession) -> Iterator[Played]:
    played = Played(RayWorkers(ENVIRONMENT, session, timeout_s=120))
    yield played
    played.close()


def test_bad_environments_fail_on_ray_as_they_do_on_this_machine(on_ray: Played) -> None:
    deeds = [
        "nothing",
        "os._exit",
        "a catastrophic regular expression",
        "nothing",
        "ten gigabytes",
        "reward 3",
        "nothing",
    ]
    deeds += ["a segmentation fault", "the end of its supervisor", "nothing"]
    here = Played(LocalWorkers.of(ENVIRONMENT))
    try:
        assert [on_ray.play(deed) for deed in deeds] == [here.play(deed) for deed in deeds]
    finally:
        here.close()


def test_a_worker_on_ray_has_none_of_the_trainers_keys(on_ray: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cret-value-1")
    said = on_ray.play("a key of the trainer")
    assert "KeyError: 'WANDB_API_KEY'" in said


def test_workers_end_with_the_actor_that_started_them(session: RaySession) -> None:
    before = set(descendants(os.getpid()))
    played = Played(RayWorkers(ENVIRONMENT, session, timeout_s=120))
    assert played.play("a daemon left behind") == "reward 1.0"
    played.close()
    left = [
        pid
        for pid in set(descendants(os.getpid())) - before
        if b"env_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert left == []


def test_an_environment_that_is_not_what_it_should_be_is_told_before_the_first_call(session: RaySession) -> None:
    host = RayWorkers(
        EnvironmentConfig(env_class="tests.support.fakes:Nothing", worker_memory_gb=1.0), session, timeout_s=120
    )
    played = Played(host)
    try:
        with pytest.raises(ConfigError, match=r"environment.env_class: must name an importable"):
            played.play("nothing")
    finally:
        played.close()


def test_an_actor_that_dies_costs_what_was_running_there_alone(session: RaySession) -> None:
    host = RayWorkers(ENVIRONMENT, session, timeout_s=120)
    played = Played(host)
    try:
        assert played.play("nothing") == "reward 1.0"
        for node in host._nodes:
            ray.kill(node.actor)
        assert [played.play("nothing") for _ in range(3)][1:] == ["reward 1.0"] * 2
    finally:
        played.close()


@pytest.mark.nightly
def test_a_reward_function_scores_on_ray_what_it_scores_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(
        "def score(completion, answer):\n    return (len(completion) % 7 + len(str(answer))) / 10\n"
    )
    monkeypatch.chdir(tmp_path)  # where a command is started modules are found, by actors too
    monkeypatch.delenv("PYTHONPATH", raising=False)
    small = (
        "platform=cpu",
        "environment.reward=my_rewards:score",
        "environment.isolation=process",
        "data.validation=[]",
    )
    small += ("generator.n_samples_per_prompt=4", "trainer.train_batch_size=4", "trainer.policy_mini_batch_size=4")
    small += ("trainer.total_steps=1", "trainer.export_hf=false")
    found = {}
    for name, layout in (("here", ()), ("ray", ("placement=ray", "environment.placement=ray"))):
        run_command(tmp_path / name, *small, *layout)
        rollouts = records(tmp_path / name, "rollouts/train_step_000001.parquet")
        found[name] = [(each["turns"], each["reward"]) for each in rollouts]
    assert len({reward for _, reward in found["here"]}) > 1
    assert found["ray"] == found["here"]
