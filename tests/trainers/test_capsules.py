"""A run keeps the capsules of its last steps, whole at any moment, and one of a step that is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.errors import BatchError, NonFiniteError
from skyrl_train.runs.capsule import open_capsule
from skyrl_train.runs.capsule_bisect import bisect
from skyrl_train.trainers.capsules.record import Capsule, read_batch, steps_in
from skyrl_train.trainers.checkpoints.folder import sha256_of, verify
from skyrl_train.trainers.checkpoints.state import TrainerState
from skyrl_train.types import RolloutBatch
from tests.support.fakes_trainer import FakeGenerator, FakeLearner, FakeRun, fake_run, make_config
from tests.support.kills import Killed, killed_in
from tests.support.sft_runs import RecordingLearner, sft_run


def capsuled(root: Path, *, keep: int = 2, **parts: Any) -> FakeRun:
    return fake_run(root, config=make_config(root, capsules=keep), **parts)


def test_the_last_capsules_stay_with_the_states_before_and_after_each(tmp_path: Path) -> None:
    run = capsuled(tmp_path)
    run.run()
    root = run.folder.capsules
    assert (steps_in(root), steps_in(root / "states")) == ([3, 4], [2, 3, 4])
    for step in (3, 4):
        folder = root / f"step_{step:06d}"
        verify(folder)
        capsule = Capsule.read(folder)
        rollouts = run.folder.rollouts / capsule.rollouts
        assert (capsule.step, capsule.refusal) == (step, None)
        assert capsule.rollouts.startswith(f"train_step_{step:06d}")
        assert capsule.rollouts_sha256 == sha256_of(rollouts) == sha256_of(folder / capsule.rollouts)
        assert (folder / capsule.rollouts).samefile(rollouts)
        assert capsule.config_sha256 == sha256_of(run.folder.config_file)
        assert "policy/grad_norm" in capsule.metrics
        batch = read_batch(folder / "batch.safetensors")
        assert (batch.metadata.global_step, batch.metadata.weight_version) == (step, step - 1)
        assert "advantages" in batch
        state = root / "states" / f"step_{step:06d}"
        verify(state)
        assert TrainerState.read(state).global_step == step
    last, checkpoint = (root_ / "step_000004" / "policy" for root_ in (root / "states", run.folder.checkpoints))
    assert (last / "learner.json").read_bytes() == (checkpoint / "learner.json").read_bytes()


def test_a_run_without_capsules_is_byte_for_byte_what_it_is_with_them(tmp_path: Path) -> None:
    """What they are not about: rollouts, weights and metrics."""
    alone, kept = (capsuled(tmp_path / name, keep=keep) for name, keep in (("alone", 0), ("kept", 2)))
    alone.run()
    kept.run()
    assert not alone.folder.capsules.exists()
    names = {path.relative_to(alone.root) for path in alone.folder.rollouts.iterdir()}
    assert names == {path.relative_to(kept.root) for path in kept.folder.rollouts.iterdir()}
    for name in (*names, Path("export/model.json"), Path("checkpoints/step_000004/policy/learner.json")):
        assert (alone.root / name).read_bytes() == (kept.root / name).read_bytes()
    metrics = alone.folder.metrics_file.read_text()
    assert "timing/capsule" not in metrics
    assert "timing/capsule" in kept.folder.metrics_file.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("killed_at", [2, 4])
def test_a_run_that_was_killed_has_the_same_capsules_when_it_is_resumed(tmp_path: Path, killed_at: int) -> None:
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    capsuled(undisturbed).run()
    with pytest.raises(Killed):
        capsuled(killed, on_call=killed_in(killed_at, "train")).run()
    capsuled(killed).run()
    for name in ("step_000003/batch.safetensors", "states/step_000002/policy/learner.json"):
        assert (killed / "capsules" / name).read_bytes() == (undisturbed / "capsules" / name).read_bytes()
    assert steps_in(killed / "capsules") == [3, 4]
    for folder in (*(killed / "capsules").glob("step_*"), *(killed / "capsules" / "states").glob("step_*")):
        verify(folder)


def test_capsules_behind_the_checkpoint_that_is_resumed_are_made_again(tmp_path: Path) -> None:
    """Step 3 had one when the run was killed in step 4; it goes on behind step 2, where nothing of step 3 is true yet."""
    with pytest.raises(Killed):
        capsuled(tmp_path, on_call=killed_in(4, "train")).run()
    assert steps_in(tmp_path / "capsules") == [2, 3]
    with pytest.raises(Killed):
        capsuled(tmp_path, on_call=killed_in(3, "train")).run()
    assert steps_in(tmp_path / "capsules") == [2]


@pytest.mark.parametrize("keep", [0, 2])
def test_a_refused_step_leaves_a_capsule_and_names_the_command(tmp_path: Path, keep: int) -> None:
    run = capsuled(tmp_path, keep=keep, learner=FakeLearner(fail_at=6))
    with pytest.raises(NonFiniteError) as refused:
        run.run()
    assert f"skyrl-capsule bisect {tmp_path} --step 3" in str(refused.value)
    folder = run.folder.capsules / "failed" / "step_000003"
    verify(folder)
    refusal = Capsule.read(folder).refusal
    assert refusal is not None
    assert (refusal.learner, refusal.optimizer_steps) == ("policy", 1)
    assert "optimizer step 2 of 2" in refusal.error
    weight, _, num_steps = (folder / "policy" / "learner.json").read_text().strip("[]").split(",")
    assert (float(weight), int(num_steps)) == (run.learner.weight, 5)  # as they were when it was refused
    assert "advantages" in read_batch(folder / "batch.safetensors")
    assert steps_in(run.folder.capsules) == ([1, 2] if keep else [])


def test_a_step_that_is_finished_at_the_second_try_takes_the_place_of_its_refusal(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError):
        capsuled(tmp_path, learner=FakeLearner(fail_at=6)).run()
    capsuled(tmp_path).run()
    assert steps_in(tmp_path / "capsules") == [3, 4]
    assert steps_in(tmp_path / "capsules" / "failed") == []


def test_a_capsule_that_cannot_be_kept_is_a_warning_beside_the_error(tmp_path: Path) -> None:
    run = capsuled(tmp_path, keep=0, learner=FakeLearner(fail_at=6))
    run.folder.create()
    run.folder.capsules.write_text("a file where a folder should be")
    with pytest.raises(NonFiniteError) as refused:
        run.run()
    assert "skyrl-capsule" not in str(refused.value)
    assert "no capsule of step 3 could be kept" in run.output.getvalue()


class Planted(FakeGenerator):
    """Changes a turn of one trajectory behind every check."""

    plant: Callable[[Any], Any]

    def generate(self, prompts: Any, **asked: Any) -> RolloutBatch:
        rollouts = super().generate(prompts, **asked)
        if asked["purpose"] != "train" or asked["global_step"] != 2:
            return rollouts
        trajectories = list(rollouts.trajectories)
        turns = trajectories[3].turns
        trajectories[3] = replace(trajectories[3], turns=(self.plant(turns[0]), *turns[1:]))
        return replace(rollouts, trajectories=tuple(trajectories))


def test_a_reward_that_is_no_number_is_traced_to_its_turn(tmp_path: Path) -> None:
    run = capsuled(tmp_path, keep=0)
    run.generator = Planted(run.engine)
    run.generator.plant = lambda turn: replace(turn, reward=math.nan)
    with pytest.raises(BatchError, match="skyrl-capsule bisect"):
        run.run()
    found = bisect(open_capsule(tmp_path, 2), outlier=False)
    assert found.is_found
    assert "reward is nan" in found.lines[0]
    uid = run.generator.calls[-1][2][1]
    assert f"trajectory {uid}/1, turn 0" in found.lines[1]


def test_an_engines_log_probability_that_is_no_number_is_traced_to_its_token(tmp_path: Path) -> None:
    run = capsuled(tmp_path, keep=0, learner=FakeLearner(fail_at=3))
    run.generator = Planted(run.engine)
    run.generator.plant = lambda turn: replace(turn, response_logprobs=(-1.0, math.nan))
    with pytest.raises(NonFiniteError):
        run.run()
    found = bisect(open_capsule(tmp_path, 2), outlier=False)
    assert "logprobs is nan" in found.lines[0]
    uid = run.generator.calls[-1][2][1]
    assert f"trajectory {uid}/1, turn 0, response token 1" in found.lines[1]


def test_supervised_steps_have_capsules_too_and_a_refused_one_names_the_command(tmp_path: Path) -> None:
    run = sft_run(tmp_path, learner=RecordingLearner(fail_at=4), capsules=2)
    with pytest.raises(NonFiniteError) as refused:
        run.run()
    assert f"skyrl-capsule bisect {tmp_path} --step 4" in str(refused.value)
    root = run.folder.capsules
    assert (steps_in(root), steps_in(root / "states"), steps_in(root / "failed")) == ([2, 3], [1, 2, 3], [4])
    for folder in (root / "step_000003", root / "failed" / "step_000004"):
        verify(folder)
        capsule = Capsule.read(folder)
        assert capsule.total_steps == run.total_steps
        assert capsule.denominators is not None
        batch = read_batch(folder / "batch.safetensors")
        assert capsule.denominators.num_tokens == int(batch["loss_mask"].sum())
        assert float(batch["loss_weights"].sum()) == pytest.approx(1.0)
    assert Capsule.read(root / "step_000003").metrics["batch/examples"] == 4.0


def test_a_supervised_run_without_capsules_keeps_the_refused_step_alone(tmp_path: Path) -> None:
    run = sft_run(tmp_path, learner=RecordingLearner(fail_at=2))
    with pytest.raises(NonFiniteError, match="--step 2"):
        run.run()
    assert [each.name for each in run.folder.capsules.iterdir()] == ["failed"]
