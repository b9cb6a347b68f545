"""Arrays in Ray's object store: what a run computes of them is what it computes of those of one process, whoever dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from pyarrow.parquet import read_table

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.plane import DataPlane, StoredTurn, arrays_of, facts_in, placed, trajectories_of
from skyrl_train.cluster.session import RaySession
from skyrl_train.cluster.stored import RayPlane, StoredArrays, put_arrays, put_durably
from skyrl_train.config.models import PlacementConfig
from skyrl_train.errors import ActorLostError, BatchError, SaveError
from skyrl_train.runs import assembler
from skyrl_train.trainers import RolloutLog, batch_metrics, rollout_metrics, steps
from skyrl_train.types import RolloutBatch
from tests.support.fakes_trainer import failed_trajectory, make_config, make_prompts, make_trajectory, make_turn

pytestmark = pytest.mark.cluster

PLACEMENT = PlacementConfig(backend="ray", start_timeout_s=600.0, call_timeout_s=300.0, silence_timeout_s=60.0)


@pytest.fixture(scope="module")
def plane(session: RaySession) -> Iterator[RayPlane]:
    opened = RayPlane(session, PLACEMENT, num_threads=1, together="prompt")
    yield opened
    opened.close()


def rollouts(seed: int = 0, *, prompts: int = 4, tokens: int = 3) -> RolloutBatch:
    """Groups of three, one trajectory of each of which failed."""
    draw = np.random.default_rng(seed)
    made = []
    for prompt in make_prompts(prompts):
        first, response = draw.integers(1, 99, 4).tolist(), draw.integers(1, 99, tokens).tolist()
        others = (
            make_trajectory(
                make_turn(first, response, reward=float(draw.random())),
                make_turn([*first, *response, 7], (5, 6), reward=1.0),
                sample=0,
            ),
            make_trajectory(make_turn(first, response[::-1], reward=0.25), sample=1),
            failed_trajectory(sample=2),
        )
        made += [replace(each, prompt_uid=prompt.uid) for each in others]
    return RolloutBatch(prompts=tuple(make_prompts(prompts)), trajectories=tuple(made), n_samples_per_prompt=3)


def settings(folder: Path, prompts: int = 4) -> Any:
    config = make_config(folder, train_batch_size=prompts, policy_mini_batch_size=2)
    return replace(config, generator=replace(config.generator, n_samples_per_prompt=3))


def whole_step(
    plane: RayPlane | DataPlane, folder: Path, made: RolloutBatch
) -> tuple[TrainingInputBatch, dict[str, float]]:
    """Rows, advantages, metrics and the log of one step."""
    config = settings(folder, len(made.prompts))
    held = plane.hold(made)
    batch = plane.make_rows(assembler(config), held, step=1, weight_version=0)
    batch = plane.add_columns(steps.estimate, batch, config.trainer.algorithm, kl_coef=0.0, seed=1)
    log = RolloutLog(folder / "rollouts", plane=plane)
    log.write(held, batch, step=1)
    log.flush()
    log.close()
    return batch, {**rollout_metrics(held), **plane.ask(batch_metrics, batch, config.trainer.algorithm)}


def test_a_step_is_that_of_one_process_to_the_last_bit(plane: RayPlane, tmp_path: Path) -> None:
    made = rollouts()
    here, metrics_here = whole_step(DataPlane(), tmp_path / "here", made)
    there, metrics_there = whole_step(plane, tmp_path / "there", made)
    assert all(isinstance(turn, StoredTurn) for each in plane.hold(made).trajectories for turn in each.turns)
    assert metrics_there == metrics_here
    assert {*there.token_columns} == {*here.token_columns}
    for name, column in {**here.token_columns, **here.row_columns}.items():
        assert torch.equal(there[name], column), name
    assert there.metadata == here.metadata
    files = [tmp_path / each / "rollouts" / "train_step_000001.parquet" for each in ("here", "there")]
    assert read_table(files[0]).equals(read_table(files[1]))


def test_what_a_worker_refuses_is_raised_as_in_one_process(plane: RayPlane, tmp_path: Path) -> None:
    config = settings(tmp_path, prompts=2)
    held = plane.hold(rollouts())
    with pytest.raises(BatchError, match="train_batch_size=2 were expected"):
        plane.make_rows(assembler(config), held, step=1, weight_version=0)
    batch = plane.make_rows(assembler(settings(tmp_path)), held, step=1, weight_version=0)
    (tmp_path / "file").touch()
    log = RolloutLog(tmp_path / "file" / "rollouts", plane=plane)
    log.write(held, batch, step=1)
    with pytest.raises(SaveError, match="Make room"):
        log.flush()
    log.close()


@pytest.mark.parametrize("num_steps", [20, pytest.param(200, marks=pytest.mark.nightly)])
def test_what_a_step_put_is_released_with_it(plane: RayPlane, tmp_path: Path, num_steps: int) -> None:
    config, before, used = settings(tmp_path), used_bytes(), list[int]()
    of_a_step = sum(len(each.turns) * 20_000 for each in rollouts().trajectories) * 20
    for step in range(num_steps):
        held = plane.hold(rollouts(step, tokens=20_000))
        batch = plane.make_rows(assembler(config), held, step=step, weight_version=step)
        batch = plane.add_columns(steps.estimate, batch, config.trainer.algorithm, kl_coef=0.0, seed=1)
        used.append(used_bytes() - before)
        del held, batch
        ends = time.monotonic() + 20  # Ray releases what nobody refers to some moments later
        while step % 5 == 4 and used_bytes() - before > 2 * of_a_step and time.monotonic() < ends:
            time.sleep(0.2)
    print(f"\nbytes in the store, each tenth of {num_steps} steps: {used[:: num_steps // 10]}; of a step {of_a_step}")
    assert max(used) < 10 * of_a_step
    ends = time.monotonic() + 60
    while used_bytes() > before and time.monotonic() < ends:
        time.sleep(0.5)
    assert used_bytes() <= before


def used_bytes() -> int:
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    reply = get_memory_info_reply(get_state_from_address(ray.get_runtime_context().gcs_address))
    return int(reply.store_stats.object_store_bytes_used)


def test_what_does_not_fit_is_told_before_and_measured_after(plane: RayPlane) -> None:
    assert plane.room_warning(10**6) == ""
    assert "a step's rollouts and rows may take 900 TB, and Ray's object store has" in plane.room_warning(9 * 10**14)
    assert plane.take_metrics() == {}, "nothing was spilled"


class Engine:
    """Has rollouts arise in a process of its own."""

    def roll_out(self, folder: str, name: str, seed: int, dies: str = "") -> tuple[StoredArrays, dict[str, Any]]:
        arrays = arrays_of(rollouts(seed, tokens=50_000).trajectories)
        if dies == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        source = put_durably(arrays, Path(folder) / name) if folder else put_arrays(arrays)
        if dies == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return source, facts_in(arrays)

    def pid(self) -> int:
        return os.getpid()


def engine(session: RaySession) -> Any:
    tests = Path(__file__).parents[1]
    env = session.runtime_env(1)
    env["env_vars"]["PYTHONPATH"] += f"{os.pathsep}{tests.parent}{os.pathsep}{tests}"
    return ray.remote(max_restarts=0)(Engine).options(num_cpus=0, runtime_env=env).remote()


def end(actor: Any) -> None:
    os.kill(ray.get(actor.pid.remote(), timeout=60), signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actor.pid.remote(), timeout=60)


def require_gone(source: StoredArrays) -> None:
    """Ray finds out some moments later that the owner is gone; what it still has of the object until then is freed."""
    ends = time.monotonic() + 10
    while time.monotonic() < ends:
        try:
            ray.get(source.reference, timeout=1)
        except ray.exceptions.RayError:
            return
        time.sleep(0.5)
    ray._private.internal_api.free([source.reference], local_only=False)


def as_batch(source: StoredArrays, facts: dict[str, Any]) -> RolloutBatch:
    return replace(rollouts(), trajectories=tuple(trajectories_of(source, facts)))


def test_what_was_accepted_outlives_who_put_it(session: RaySession, plane: RayPlane, tmp_path: Path) -> None:
    owner = engine(session)
    source, facts = ray.get(owner.roll_out.remote(str(tmp_path), "one.safetensors", 3), timeout=120)
    end(owner)
    require_gone(source)
    expected = rollouts(3, tokens=50_000)
    assert as_batch(source, facts).trajectories == expected.trajectories
    # A worker that never saw the object reads the file, too.
    made = plane.make_rows(assembler(settings(tmp_path)), as_batch(source, facts), step=1, weight_version=0)
    here = assembler(settings(tmp_path))(expected, step=1, weight_version=0)
    assert torch.equal(made["input_ids"], here["input_ids"])


def test_without_a_file_the_loss_of_who_put_it_is_an_error_with_a_name(
    session: RaySession, plane: RayPlane, tmp_path: Path
) -> None:
    owner = engine(session)
    source, facts = ray.get(owner.roll_out.remote("", "", 3), timeout=120)
    end(owner)
    require_gone(source)
    lost = as_batch(source, facts)
    assert rollout_metrics(lost)["reward/mean"] > 0, "facts are here"
    with pytest.raises(ActorLostError, match="arrays of rows are gone from the object store"):
        plane.make_rows(assembler(settings(tmp_path)), lost, step=1, weight_version=0)


@pytest.mark.parametrize("dies", ["before", "after"])
def test_what_nobody_was_told_of_is_made_again_and_there_is_one_of_it(
    session: RaySession, tmp_path: Path, dies: str
) -> None:
    doomed, other = engine(session), engine(session)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(doomed.roll_out.remote(str(tmp_path), "one.safetensors", 3, dies), timeout=120)
    source, facts = ray.get(other.roll_out.remote(str(tmp_path), "one.safetensors", 3), timeout=120)
    assert [path.name for path in tmp_path.iterdir()] == ["one.safetensors"]
    assert as_batch(source, facts).trajectories == rollouts(3, tokens=50_000).trajectories
    end(other)


def test_a_damaged_file_is_no_rollout(session: RaySession, tmp_path: Path) -> None:
    owner = engine(session)
    source, facts = ray.get(owner.roll_out.remote(str(tmp_path), "one.safetensors", 3), timeout=120)
    end(owner)
    require_gone(source)
    file = tmp_path / "one.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ActorLostError, match="cannot be read"):
        as_batch(source, facts).trajectories[0].turns[0].response_token_ids.tolist()


def test_a_worker_that_dies_is_named(session: RaySession, tmp_path: Path) -> None:
    mortal = RayPlane(session, PLACEMENT, num_threads=1)
    held = mortal.hold(rollouts())
    assert placed(held) is not None
    os.kill(mortal.ask(os.getpid), signal.SIGKILL)
    with pytest.raises(ActorLostError, match=r"data worker rank 0 .* died in phase data"):
        mortal.make_rows(assembler(settings(tmp_path)), held, step=1, weight_version=0)
    mortal.close()


def test_rollouts_that_no_array_can_hold_stay_where_they_are(plane: RayPlane, tmp_path: Path) -> None:
    made = rollouts()
    odd = replace(made.trajectories[0], metrics={"odd": np.float32(1.5)})
    made = replace(made, trajectories=(odd, *made.trajectories[1:]))
    assert plane.hold(made) is made
    batch, metrics = whole_step(plane, tmp_path, made)
    assert metrics["env/odd"] == 1.5
    assert not isinstance(batch.token_columns, dict), "its rows are in the store all the same"
    assert read_table(tmp_path / "rollouts" / "train_step_000001.parquet").num_rows == 16


def test_objects_are_no_arrays(session: RaySession) -> None:
    with pytest.raises(TypeError, match="Python objects"):
        put_arrays({"text": np.array(["a", None], dtype=object)})
