"""Rollouts that engines' actors make and put themselves: what they are, and what is left of them whoever dies when."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from skyrl_train.batch.plane import DataPlane, StoredTurn, placed
from skyrl_train.cluster.engine_group import EngineGroup, GroupEngine
from skyrl_train.cluster.group_rollouts import GroupRollouts
from skyrl_train.cluster.session import RaySession
from skyrl_train.cluster.stored import RayPlane
from skyrl_train.config import Config
from skyrl_train.config.models import GeneratorConfig
from skyrl_train.data import load_prompts
from skyrl_train.errors import ActorLostError, EngineError, SaveError
from skyrl_train.interfaces import Generator
from skyrl_train.runs.construction import engine_settings, rollouts_beside
from skyrl_train.types import RolloutBatch, SamplingParams
from skyrl_train.weight_sync import DeviceSharing, RouteContext, SyncRecords, WeightSync
from skyrl_train.weight_sync.transports import auto
from tests.support.engines_apart import MadeUp, tell, texts_of
from tests.support.ray_learners import SLOT, make_config

pytestmark = pytest.mark.cluster

NUM_PROMPTS, NUM_SAMPLES = 12, 3


def config_of(folder: Path) -> Config:
    return replace(
        make_config(Path("unused")),
        model=Config().model,
        generator=GeneratorConfig(backend="tests.support.engines_apart:MadeUp"),
        output_dir=str(folder),
    )


def make(generator: Generator, *, step: int = 1, purpose: str = "train") -> RolloutBatch:
    """The same trajectories on every call of a step: seeds are derived. One prompt is there twice."""
    prompts = load_prompts(["builtin:word_problems/train"], limit=NUM_PROMPTS - 1)
    return generator.generate(
        [*prompts, prompts[2]],
        n_samples_per_prompt=NUM_SAMPLES,
        sampling=SamplingParams(max_generate_length=64),
        global_step=step,
        purpose=purpose,
    )


@dataclass(frozen=True, kw_only=True)
class Running:
    folder: Path
    group: EngineGroup
    rollouts: GroupRollouts


@contextmanager
def running(session: RaySession, folder: Path, *, engines: int = 2, max_restarts: int = 0) -> Iterator[Running]:
    config = config_of(folder)
    group = EngineGroup(
        config.generator.backend,
        engine_settings(config),
        config.placement,
        session,
        [SLOT] * engines,
        num_threads=1,
        max_restarts=max_restarts,
        rollouts=partial(rollouts_beside, config),
    )
    sharing = DeviceSharing(group.living, wait_ready=group.wait_ready)
    settings = RouteContext(files=folder / "weights", node_folder=folder, timeout_s=60.0)
    updates = WeightSync(group.for_update, auto, settings, sharing, SyncRecords(folder / "sync.jsonl"))
    engine = GroupEngine(group, sharing, updates, silence_timeout_s=60.0)
    rollouts = GroupRollouts(engine, folder / "segments", max_failed_fraction=0.5)
    try:
        yield Running(folder=folder, group=group, rollouts=rollouts)
    finally:
        rollouts.close()
        engine.close()


@pytest.fixture(scope="module")
def both(session: RaySession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(session, tmp_path_factory.mktemp("run"), max_restarts=20) as found:
        yield found


@pytest.fixture
def two(both: Running) -> Running:
    """Two engines that live: those that died in the test before were started again."""
    ends = time.monotonic() + 600
    while not all(both.group.alive) and time.monotonic() < ends:
        both.group.for_update()  # those that wait for weights, of which there are none here
        time.sleep(0.2)
    assert both.group.alive == [True, True]
    return both


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], RolloutBatch]:
    """What one process makes of a step."""
    config = config_of(tmp_path_factory.mktemp("inline"))

    def of_step(step: int) -> RolloutBatch:
        from skyrl_train.model import load_tokenizer

        engine = MadeUp(engine_settings(config), load_tokenizer(config.model))
        engine.weight_version, engine.lease = -1, MadeUp.lease.__get__(engine)  # type: ignore[attr-defined]
        generator = rollouts_beside(config, engine)  # type: ignore[arg-type]
        try:
            return make(generator, step=step)
        finally:
            generator.close()

    return of_step


def require_same(found: RolloutBatch, wanted: RolloutBatch) -> None:
    assert found.trajectories == wanted.trajectories
    assert found.prompts == wanted.prompts
    assert not any(each.failed for each in found.trajectories)


def segments(running: Running, step: int = 1) -> list[str]:
    return sorted(each.name for each in (running.folder / "segments" / f"step_{step:06d}").iterdir())


def kill(running: Running, *indices: int) -> None:
    for index in indices:
        actor = running.group.actors[index]
        assert actor.identity is not None
        os.kill(actor.identity.pid, signal.SIGKILL)
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(actor.handle.ping.remote(), timeout=60)


def wait_until_gone(found: RolloutBatch) -> None:
    """Ray finds out some moments later that owners are gone, and with them what they put."""
    ends, there = time.monotonic() + 300, placed(found)
    assert there is not None
    sources: Sequence[Any] = there.sources
    left = [each.reference for each in sources]
    while left and time.monotonic() < ends:
        try:
            ray.get(left[-1], timeout=60)
            time.sleep(0.5)
        except ray.exceptions.ObjectLostError:
            left.pop()
    assert not left


def test_they_are_those_of_one_process_by_reference(two: Running, expected: Callable[[int], RolloutBatch]) -> None:
    heard: list[tuple[int, int]] = []
    two.rollouts.on_progress = lambda done, total: heard.append((done, total))
    found = make(two.rollouts)
    assert all(isinstance(turn, StoredTurn) for each in found.trajectories for turn in each.turns)
    require_same(found, expected(1))
    assert heard[-1] == (36, 36)
    assert [done for done, _ in heard] == sorted(done for done, _ in heard)
    assert segments(two) == [f"train-1-{start:06d}-0.safetensors" for start in range(0, 12, 2)]
    by_owner = {each.reference.owner_address() for each in placed(found).sources}  # type: ignore[union-attr]
    assert len(by_owner) == 2, "both engines put what they made"


@pytest.mark.parametrize(("step", "when"), [(2, "answer"), (3, "before"), (4, "after")])
def test_an_engine_dies_over_a_part_and_every_sample_is_there_once(
    two: Running, expected: Callable[[int], RolloutBatch], step: int, when: str
) -> None:
    tell(two.folder, when)
    found = make(two.rollouts, step=step)
    assert not (two.folder / when).exists(), "it died"
    require_same(found, expected(step))
    accepted = sorted(each.file.name for each in placed(found).sources)  # type: ignore[union-attr]
    assert len({name.rpartition("-")[0] for name in accepted}) == 6, "each part was accepted once"
    assert {*accepted} <= {*segments(two, step)}
    assert any(name.endswith("-1.safetensors") for name in accepted), "one was made again"


def test_what_was_accepted_outlives_all_engines(
    session: RaySession, two: Running, expected: Callable[[int], RolloutBatch]
) -> None:
    found = make(two.rollouts, step=5)
    kill(two, 0, 1)
    wait_until_gone(found)
    require_same(found, expected(5))
    plane = RayPlane(session, config_of(two.folder).placement, num_threads=1)
    assert plane.ask(texts_of, found) == DataPlane().ask(texts_of, expected(5)), "a worker reads the files, too"
    plane.close()
    with pytest.raises(ActorLostError, match="no inference engine is left"):  # until the next weights come
        make(two.rollouts, step=6)


def test_what_a_run_before_left_is_removed_and_without_an_engine_a_step_ends(
    session: RaySession, tmp_path: Path
) -> None:
    stale = tmp_path / "segments" / "step_000007"
    stale.mkdir(parents=True)
    (stale / "train-7-000000-0.safetensors").write_bytes(b"cut o")
    with running(session, tmp_path, engines=1) as one:
        assert not stale.exists()
        make(one.rollouts)
        kill(one, 0)
        with pytest.raises(ActorLostError, match="no inference engine is left"):
            make(one.rollouts, step=2)
    assert not list((tmp_path / "segments").iterdir()), "closed"


def test_too_many_failures_end_the_step_and_are_told_with_what_was_made(two: Running) -> None:
    (two.folder / "refuse").touch()
    try:
        with pytest.raises(EngineError, match="trajectories failed, more than") as raised:
            make(two.rollouts)
    finally:
        (two.folder / "refuse").unlink()
    assert raised.value.trajectories
    assert all(trajectory.failed for _, trajectory in raised.value.trajectories)
    assert len(make(two.rollouts).trajectories) == 36


def test_a_disk_that_takes_no_segment_is_told(two: Running) -> None:
    segments = two.folder / "segments"
    shutil.rmtree(segments)
    segments.touch()
    with pytest.raises(SaveError, match="Make room on that disk"):
        make(two.rollouts)
    segments.unlink()


@pytest.mark.parametrize("num_steps", [20, pytest.param(200, marks=pytest.mark.nightly)])
def test_what_a_step_put_is_released_with_it(two: Running, num_steps: int) -> None:
    make(two.rollouts, step=0)
    before, used = used_bytes(), list[int]()
    for step in range(1, num_steps + 1):
        found = make(two.rollouts, step=step)
        used.append(used_bytes())
        assert [each.name for each in (two.folder / "segments").iterdir()] == [f"step_{step:06d}"]
        del found
    print(f"\nbytes in the store, each tenth of {num_steps} steps: {used[:: num_steps // 10]}; before: {before}")
    assert max(used) < before + 5 * max(used[0], before), "some steps may wait for Ray to release them"
    ends = time.monotonic() + 60
    while used_bytes() > before and time.monotonic() < ends:
        time.sleep(0.5)
    assert used_bytes() <= before


def used_bytes() -> int:
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    reply = get_memory_info_reply(get_state_from_address(ray.get_runtime_context().gcs_address))
    return int(reply.store_stats.object_store_bytes_used)
