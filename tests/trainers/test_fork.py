"""A fork: a new run that begins at a checkpoint of another, with settings changed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config import Config
from skyrl_train.errors import ConfigError
from skyrl_train.telemetry import read_metrics
from skyrl_train.trainers.checkpoints.changes import settings_of
from skyrl_train.trainers.checkpoints.state import DataFingerprint, TrainerState
from skyrl_train.trainers.resume import find_start
from tests.support.fakes_trainer import FakeLearner, FakeRun, fake_run, make_config, make_prompts, send_signal_at
from tests.support.kills import Killed, killed_in
from tests.support.sft_runs import sft_run


def forked(root: Path, parent: Path, *, changes: dict[str, Any] | None = None, **parts: Any) -> FakeRun:
    """A fork, in `root`, of the run in `parent`; `changes` of `trainer`."""
    config = make_config(root, **{"resume_mode": "fork", "resume_path": str(parent), **(changes or {})})
    return fake_run(root, config=config, **parts)


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """Of a run that ended after step 2."""
    fake_run(tmp_path / "parent", config=make_config(tmp_path / "parent", total_steps=2)).run()
    return tmp_path / "parent"


@pytest.mark.slow
def test_a_fork_keeps_weights_optimizer_and_place_and_begins_curves_of_its_own(tmp_path: Path, parent: Path) -> None:
    learner = FakeLearner()
    run = forked(tmp_path / "fork", parent, changes={"update_epochs_per_batch": 2}, learner=learner)
    run.run()
    alone = fake_run(tmp_path / "alone")
    alone.run()
    kept = [prompts for purpose, _, prompts in alone.generator.calls if purpose == "train"][2:]
    assert [prompts for purpose, _, prompts in run.generator.calls if purpose == "train"] == kept
    assert [record["step"] for record in read_metrics(run.folder.metrics_file)] == [2, 3, 4]
    assert learner.num_optimizer_steps == 4 + 2 * 4
    assert (parent / "complete.json").is_file()
    again = fake_run(tmp_path / "same", config=make_config(tmp_path / "same", total_steps=2)).run()
    assert again is not None
    assert read_metrics(parent / "metrics.jsonl")[-1]["step"] == 2


def test_without_changes_a_fork_trains_as_the_run_would_have(tmp_path: Path, parent: Path) -> None:
    run = forked(tmp_path / "fork", parent)
    run.run()
    fake_run(tmp_path / "alone").run()
    name = "export/model.json"
    assert (tmp_path / "fork" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()


def test_record_and_first_lines_list_what_changed(tmp_path: Path, parent: Path) -> None:
    run = forked(tmp_path / "fork", parent, changes={"update_epochs_per_batch": 2, "eval_interval": 1})
    run.run()
    lines = run.output.getvalue()
    checkpoint = parent / "checkpoints" / "step_000002"
    assert f"forking from {checkpoint}, after step 2 of 4" in lines
    assert "trainer.update_epochs_per_batch was 1 and is 2" in lines
    record = json.loads(run.folder.fork_file.read_text())
    assert (record["checkpoint"], record["global_step"]) == (str(checkpoint), 2)
    changed = {change["setting"]: (change["was"], change["is"]) for change in record["changed"]}
    assert changed["trainer.update_epochs_per_batch"] == (1, 2)
    assert changed["trainer.eval_interval"] == (2, 1)
    assert changed["trainer.total_steps"] == (2, 4)


@pytest.mark.slow
def test_a_stopped_fork_goes_on_with_the_same_command_and_with_latest(tmp_path: Path, parent: Path) -> None:
    root = tmp_path / "fork"
    whole = forked(tmp_path / "whole", parent)
    whole.run()
    for mode in ("fork", "latest"):
        run = forked(root / mode, parent, on_call=send_signal_at(3))
        with pytest.raises(BaseException, match="SIGTERM"):
            run.run()
        path = str(parent) if mode == "fork" else ""
        again = forked(root / mode, parent, changes={"resume_mode": mode, "resume_path": path})
        again.run()
        assert "resuming from" in again.output.getvalue()
        assert [step for purpose, step, _ in again.generator.calls if purpose == "train"] == [4]
        assert not (root / mode / "previous-1").exists()
        assert (root / mode / "export/model.json").read_text() == (tmp_path / "whole/export/model.json").read_text()
        assert again.folder.fork_file.is_file()


def test_a_fork_that_was_killed_before_its_first_checkpoint_begins_again_and_leaves_nothing(
    tmp_path: Path, parent: Path
) -> None:
    root = tmp_path / "fork"
    forked(tmp_path / "whole", parent).run()
    with pytest.raises(Killed):
        forked(root, parent, on_call=killed_in(4, "train")).run()
    assert any((root / "rollouts").iterdir())
    again = forked(root, parent)
    again.run()
    assert "forking from" in again.output.getvalue()
    assert not (root / "previous-1").exists()
    assert (root / "export/model.json").read_text() == (tmp_path / "whole/export/model.json").read_text()
    assert again.folder.fork_file.is_file()


def test_a_fork_needs_a_folder_of_its_own_and_steps_to_do(tmp_path: Path, parent: Path) -> None:
    run = forked(parent, parent, changes={"total_steps": 2})
    with pytest.raises(ConfigError) as refused:
        run.run()
    problems = {violation.field: violation for violation in refused.value.violations}
    assert set(problems) == {"output_dir", "trainer.total_steps"}
    steps = int(problems["trainer.total_steps"].remedy.rpartition("=")[2])
    assert forked(tmp_path / "fork", parent, changes={"total_steps": steps}).run() is not None


def test_changed_prompts_fork_and_begin_with_their_first(tmp_path: Path, parent: Path) -> None:
    run = forked(tmp_path / "fork", parent, prompts=make_prompts(12))
    run.run()
    assert "the training prompts changed: 8 then, 12 now" in run.output.getvalue()
    assert "the data go on at position 0, which was 2" in run.output.getvalue()


def test_a_weight_that_is_stated_anew_replaces_what_a_controller_had_made_of_it(tmp_path: Path) -> None:
    def config(root: Path, coef: float, **trainer: Any) -> Config:
        base = make_config(root, total_steps=4, **trainer)
        algorithm = replace(base.trainer.algorithm, kl_reward_coef=coef, kl_controller="adaptive")
        return replace(base, trainer=replace(base.trainer, algorithm=algorithm))

    first = fake_run(tmp_path / "parent", config=config(tmp_path / "parent", 0.5), reference=FakeLearner("reference"))
    first.run()
    moved = TrainerState.read(first.checkpoints.latest() or tmp_path).kl_controller.coef
    assert moved != 0.5
    for coef, expected in ((0.5, moved), (0.25, 0.25)):
        changes = {"resume_mode": "fork", "resume_path": str(tmp_path / "parent")}
        fork = replace(config(tmp_path / "fork", coef, **changes))
        fork = replace(fork, trainer=replace(fork.trainer, total_steps=6))
        data = DataFingerprint.of(first.prompts)
        start = find_start(
            fork.trainer,
            settings_of(fork),
            type(fork),
            forked(tmp_path / "fork", tmp_path).folder,
            first.checkpoints,
            data=data,
            total_steps=6,
        )
        assert start.state is not None
        assert start.state.kl_controller.coef == expected


def test_a_reference_that_moved_stays_where_it_is_though_it_moves_no_more(tmp_path: Path) -> None:
    def config(root: Path, interval: int, **trainer: Any) -> Config:
        base = make_config(root, **trainer)
        algorithm = replace(base.trainer.algorithm, kl_loss_coef=0.1, ref_update_interval=interval)
        return replace(base, trainer=replace(base.trainer, algorithm=algorithm))

    moved = FakeLearner("reference")
    fake_run(tmp_path / "parent", config=config(tmp_path / "parent", 1, total_steps=2), reference=moved).run()
    assert moved.weight != 0.0
    fork = config(tmp_path / "fork", 0, resume_mode="fork", resume_path=str(tmp_path / "parent"))
    kept = FakeLearner("reference")
    fake_run(tmp_path / "fork", config=fork, reference=kept, on_call=send_signal_at(9)).run()
    assert kept.weight == moved.weight
    longer = replace(fork, trainer=replace(fork.trainer, resume_mode="latest", resume_path="", total_steps=5))
    resumed = FakeLearner("reference")
    fake_run(tmp_path / "fork", config=longer, reference=resumed).run()
    assert resumed.weight == moved.weight


@pytest.mark.slow
def test_a_critic_may_join_and_another_one_replaces_it(tmp_path: Path, parent: Path) -> None:
    def with_critic(root: Path, path: str, **trainer: Any) -> Config:
        base = make_config(root, **trainer)
        return replace(base, critic=replace(base.critic, model=replace(base.critic.model, path=path)))

    joined = with_critic(tmp_path / "joined", "policy", resume_mode="fork", resume_path=str(parent))
    run = fake_run(tmp_path / "joined", config=joined, critic=FakeLearner("critic", weight=3.0))
    run.run()
    assert "the critic begins from its own path, not from the checkpoint" in run.output.getvalue()
    for path, expected in (("policy", 8), ("elsewhere", 4)):
        root = tmp_path / path
        again = with_critic(root, path, total_steps=6, resume_mode="fork", resume_path=str(tmp_path / "joined"))
        critic = FakeLearner("critic", weight=3.0)
        fake_run(root, config=again, critic=critic).run()
        assert critic.num_optimizer_steps == expected


def test_supervised_training_forks_too(tmp_path: Path) -> None:
    first = sft_run(tmp_path / "parent", num_steps=2)
    first.run()
    whole = sft_run(tmp_path / "whole", num_steps=4)
    whole.run()
    fork = sft_run(tmp_path / "fork", num_steps=4, resume_mode="fork", resume_path=str(tmp_path / "parent"))
    fork.run()
    assert fork.learner.batches == whole.learner.batches[2:]
    assert fork.learner.weight == whole.learner.weight
    assert [record["step"] for record in read_metrics(fork.folder.metrics_file)] == [2, 3, 4]
    assert "trainer.num_steps was 2 and is 4" in fork.output.getvalue()
