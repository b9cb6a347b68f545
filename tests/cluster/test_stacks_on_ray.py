"""Where a rank or an engine of a run on Ray hangs, its log says what each process was doing."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_train.cluster.engine_group import EngineGroup, GroupEngine
from skyrl_train.cluster.session import RaySession
from skyrl_train.errors import ActorLostError
from skyrl_train.runs.construction import engine_settings
from skyrl_train.telemetry.logs import stacks
from skyrl_train.types import GenerationRequest, SamplingParams
from skyrl_train.weight_sync import DeviceSharing, RouteContext, SyncRecords, WeightSync
from skyrl_train.weight_sync.transports import auto
from tests.support.command_runs import RAY, start_command, wait_for
from tests.support.ray_learners import SLOT, make_config

pytestmark = pytest.mark.cluster

LOSS = """
import os, time

def hangs(inputs, config):
    print("pid", os.getpid(), "hangs")
    time.sleep(600)
"""


@pytest.mark.nightly
def test_a_rank_that_hangs_leaves_the_stacks_of_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_losses.py").write_text(LOSS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    status, said = wait_for(
        start_command(
            tmp_path / "run",
            "platform=cpu",
            "strategy=fsdp2",
            "generator=hf",
            "environment.isolation=process",
            "environment.placement=ray",
            "data.validation=[]",
            "generator.n_samples_per_prompt=2",
            "trainer.train_batch_size=4",
            "trainer.policy_mini_batch_size=4",
            "trainer.total_steps=1",
            "trainer.max_restarts=0",
            "trainer.algorithm.policy_loss=my_losses:hangs",
            *RAY,
            "placement.policy_num_workers=2",
            "placement.silence_timeout_s=120",
        )
    )
    assert status == 2
    assert "did not answer within 120 s. It is alive" in said
    assert "in hangs" not in said, "stacks are for the log"
    log = (tmp_path / "run" / "run.log").read_text(encoding="utf-8").rpartition("What every process is doing")[2]
    for role in ("trainer", "environments of a node", "supervisor of environments", "worker of environments"):
        assert f"\n{role}, pid " in log
    ranks = log.split("\npolicy worker, pid ")[1:]
    assert len(ranks) == 2
    assert all("my_losses.py" in each and "in hangs" in each for each in ranks)


def test_an_engine_that_hangs_is_told_with_the_others_before_it_is_ended(
    session: RaySession, model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stacks.begin("tests")
    caplog.set_level(logging.INFO)
    config = make_config(model_folder)
    config = replace(config, generator=replace(config.generator, backend="hf"), output_dir=str(tmp_path))
    group = EngineGroup("hf", engine_settings(config), config.placement, session, [SLOT], num_threads=1, max_restarts=0)
    sharing = DeviceSharing(group.living, wait_ready=group.wait_ready)
    routes = RouteContext(files=tmp_path / "weights", node_folder=tmp_path, timeout_s=60.0)
    updates = WeightSync(group.for_update, auto, routes, sharing, SyncRecords(tmp_path / "sync.jsonl"))
    engine = GroupEngine(group, sharing, updates, silence_timeout_s=3.0)
    group.wait_ready()
    identity = group.actors[0].identity
    assert identity is not None
    assert f"inference engine, pid {identity.pid}:" in stacks.of_run()
    request = GenerationRequest(
        request_id="1", prompt_token_ids=(5, 6), sampling=SamplingParams(max_generate_length=4), seed=1
    )
    os.kill(identity.pid, signal.SIGSTOP)
    try:
        with pytest.raises(ActorLostError, match="no inference engine is left"):
            asyncio.run(asyncio.wait_for(engine.generate(request), 60))
    finally:
        os.kill(identity.pid, signal.SIGCONT)
        engine.close()
    assert f"inference engine, pid {identity.pid}: is stopped by a signal (state T)" in caplog.text
    assert "tests, pid" in caplog.text
