"""Killed, stopped and resumed runs equal one that was left alone."""

import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_train.config.data import CurriculumConfig
from skyrl_train.errors import CheckpointError, ConfigError, SkyrlTrainError, StopRequested
from skyrl_train.rollout.stream import ReplayGenerator
from skyrl_train.system.files import json_line
from skyrl_train.telemetry import read_metrics
from skyrl_train.telemetry.records import encode_trajectory, pairs_of, read_rollouts
from skyrl_train.trainers.checkpoints.state import TrainerState
from skyrl_train.trainers.evaluation.evaluate import read_evaluations
from tests.support.fakes_trainer import (
    FakeLearner,
    fake_run,
    make_config,
    make_prompts,
    records_without_timings,
    send_signal_at,
)
from tests.support.kills import Killed, killed_in


def undisturbed(folder: Path, **changes) -> list[dict]:
    run = fake_run(folder, config=make_config(folder, **changes))
    run.run()
    return records_without_timings(run.folder.metrics_file)


@pytest.mark.parametrize(
    ("step", "purpose"), [(1, "train"), (3, "train"), (4, "train"), (1, "eval"), (2, "eval"), (3, "eval")]
)
def test_a_killed_run_that_is_resumed_writes_the_same_metrics_and_weights(tmp_path, step, purpose):
    expected = undisturbed(tmp_path / "alone")
    folder = tmp_path / "killed"
    with pytest.raises(Killed):
        fake_run(folder, on_call=killed_in(step, purpose)).run()
    run = fake_run(folder)
    run.run()
    assert records_without_timings(run.folder.metrics_file) == expected
    assert (folder / "export" / "model.json").read_text() == (tmp_path / "alone" / "export" / "model.json").read_text()
    for name in (path.name for path in (tmp_path / "alone" / "rollouts").iterdir()):
        assert (folder / "rollouts" / name).read_bytes() == (tmp_path / "alone" / "rollouts" / name).read_bytes()
    assert read_evaluations(run.folder.evaluation_file) == read_evaluations(tmp_path / "alone" / "evaluation.json")


def as_older_versions_wrote(folder: Path) -> None:
    """Makes JSON lines of the run's rollouts."""
    for path in folder.glob("*.parquet"):
        ((step, batch),) = read_rollouts(path).items()
        head = {"global_step": step, "purpose": path.name.partition("_")[0]}
        lines = [json_line({**head, **encode_trajectory(*pair)}) for pair in pairs_of(batch)]
        path.with_suffix(".jsonl").write_bytes(b"".join(lines))
        path.unlink()


def test_a_run_that_wrote_json_lines_goes_on_with_parquet(tmp_path):
    expected = undisturbed(tmp_path / "alone")
    folder = tmp_path / "killed"
    with pytest.raises(Killed):
        fake_run(folder, on_call=killed_in(4, "train")).run()
    as_older_versions_wrote(folder / "rollouts")
    assert (folder / "rollouts" / "train_step_000003.jsonl").exists()
    run = fake_run(folder)
    run.run()
    assert records_without_timings(run.folder.metrics_file) == expected
    names = sorted(path.name for path in (folder / "rollouts").glob("train*"))
    assert names == [f"train_step_00000{step}" for step in ("1.jsonl", "2.jsonl", "3.parquet", "4.parquet")]
    replays = [ReplayGenerator(each / "rollouts") for each in (folder, tmp_path / "alone")]
    assert replays[0].prompts == replays[1].prompts
    assert replays[0].num_steps == 4


def test_a_run_with_a_curriculum_takes_the_same_prompts_after_a_resume(tmp_path):
    def config(folder: Path):
        made = make_config(folder)
        return replace(made, data=replace(made.data, curriculum=CurriculumConfig(enabled=True, exploration=0.5)))

    fake_run(tmp_path / "alone", config=config(tmp_path / "alone")).run()
    folder = tmp_path / "killed"
    with pytest.raises(Killed):
        fake_run(folder, config=config(folder), on_call=killed_in(3, "train")).run()
    fake_run(folder, config=config(folder)).run()
    both = [records_without_timings(each / "metrics.jsonl") for each in (folder, tmp_path / "alone")]
    assert both[0] == both[1]
    assert both[0][-1]["curriculum/tried"] > 0
    rates = [
        TrainerState.read(each / "checkpoints" / "step_000004").solve_rates for each in (folder, tmp_path / "alone")
    ]
    assert rates[0] == rates[1]
    assert rates[0]


def test_a_kill_between_record_and_checkpoint_repeats_the_step(tmp_path, monkeypatch):
    expected = undisturbed(tmp_path / "alone")
    run = fake_run(tmp_path / "killed")
    begin = run.checkpoints.begin

    def killed_before(step):
        if step == 4:
            raise Killed
        return begin(step)

    monkeypatch.setattr(run.checkpoints, "begin", killed_before)
    with pytest.raises(Killed):
        run.run()
    assert len(read_metrics(run.folder.metrics_file)) == 5
    fake_run(tmp_path / "killed").run()
    assert records_without_timings(run.folder.metrics_file) == expected


def test_a_kill_after_the_last_checkpoint_only_finishes_the_run(tmp_path, monkeypatch):
    expected = undisturbed(tmp_path / "alone")
    learner = FakeLearner()
    run = fake_run(tmp_path / "killed", learner=learner)

    def killed(folder):
        raise Killed

    monkeypatch.setattr(learner, "export_hf", killed)
    with pytest.raises(Killed):
        run.run()
    again = fake_run(tmp_path / "killed")
    result = again.run()
    assert result is not None
    assert result.global_step == 4
    assert not any(purpose == "train" for purpose, _, _ in again.generator.calls)
    assert records_without_timings(run.folder.metrics_file) == expected
    assert (tmp_path / "killed" / "export" / "model.json").exists()
    assert "before (step 0)" in again.output.getvalue()


@pytest.mark.parametrize(("signum", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT")])
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(tmp_path, signum, name):
    expected = undisturbed(tmp_path / "alone")
    before = signal.getsignal(signum)
    run = fake_run(tmp_path / "stopped", on_call=send_signal_at(3, signum))
    with pytest.raises(StopRequested) as stopped:
        run.run()
    assert (stopped.value.signal_name, stopped.value.global_step) == (name, 3)
    assert signal.getsignal(signum) is before
    assert [record["step"] for record in read_metrics(run.folder.metrics_file)] == [0, 1, 2, 3]
    assert run.checkpoints.latest() == run.folder.checkpoints / "step_000003"
    again = fake_run(tmp_path / "stopped")
    again.run()
    assert f"resuming from {run.folder.checkpoints / 'step_000003'}, after step 3 of 4" in again.output.getvalue()
    assert records_without_timings(run.folder.metrics_file) == expected


def test_a_signal_during_the_first_evaluation_stops_before_the_first_step(tmp_path):
    expected = undisturbed(tmp_path / "alone")

    def on_call(step, purpose):
        if purpose == "eval":
            signal.raise_signal(signal.SIGTERM)

    run = fake_run(tmp_path / "stopped", on_call=on_call)
    with pytest.raises(StopRequested):
        run.run()
    assert run.checkpoints.latest() == run.folder.checkpoints / "step_000000"
    fake_run(tmp_path / "stopped").run()
    assert records_without_timings(run.folder.metrics_file) == expected


def test_off_the_main_thread_the_loop_runs_without_handlers(tmp_path):
    run = fake_run(tmp_path)
    thread = threading.Thread(target=run.run)
    thread.start()
    thread.join(timeout=60)
    assert len(read_metrics(run.folder.metrics_file)) == 5


def test_a_complete_run_is_left_alone_and_says_so(tmp_path):
    fake_run(tmp_path).run()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    run = fake_run(tmp_path)
    assert run.run() is None
    assert "this run is complete (4 steps); nothing to do" in run.output.getvalue()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_more_steps_go_on_where_the_complete_run_ended(tmp_path):
    expected = undisturbed(tmp_path / "alone", total_steps=6)
    fake_run(tmp_path / "longer").run()
    run = fake_run(tmp_path / "longer", config=make_config(tmp_path / "longer", total_steps=6))
    run.run()
    assert [step for purpose, step, _ in run.generator.calls if purpose == "train"] == [5, 6]
    assert records_without_timings(run.folder.metrics_file) == expected


def test_a_run_that_goes_on_is_not_complete_until_it_ends_again(tmp_path):
    fake_run(tmp_path).run()
    longer = make_config(tmp_path, total_steps=6)
    with pytest.raises(Killed):
        fake_run(tmp_path, config=longer, on_call=killed_in(5, "train")).run()
    assert not (tmp_path / "complete.json").exists()
    assert fake_run(tmp_path, config=longer).run() is not None


def test_evaluations_and_rollouts_after_the_checkpoint_are_cut(tmp_path):
    config = make_config(tmp_path, eval_interval=1, ckpt_interval=2)
    with pytest.raises(Killed):
        fake_run(tmp_path, config=config, on_call=killed_in(4, "train")).run()
    assert [entry.global_step for entry in read_evaluations(tmp_path / "evaluation.json")] == [0, 1, 2, 3]
    assert (tmp_path / "rollouts" / "train_step_000003.parquet").exists()
    with pytest.raises(Killed):
        fake_run(tmp_path, config=config, on_call=killed_in(3, "train")).run()
    assert [entry.global_step for entry in read_evaluations(tmp_path / "evaluation.json")] == [0, 1, 2]
    assert (tmp_path / "rollouts" / "train_step_000002.parquet").exists()
    assert not (tmp_path / "rollouts" / "train_step_000003.parquet").exists()


def test_resume_mode_none_keeps_the_old_run_in_previous(tmp_path):
    fake_run(tmp_path).run()
    old = (tmp_path / "metrics.jsonl").read_bytes()
    run = fake_run(tmp_path, config=make_config(tmp_path, resume_mode="none", total_steps=1))
    run.run()
    assert [record["step"] for record in read_metrics(run.folder.metrics_file)] == [0, 1]
    assert (tmp_path / "previous-1" / "metrics.jsonl").read_bytes() == old
    assert (tmp_path / "previous-1" / "checkpoints" / "step_000004" / "manifest.json").exists()
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == ["step_000001"]


def test_from_path_goes_back_within_a_run_and_later_resumes_do_not_jump_ahead(tmp_path):
    config = make_config(tmp_path, ckpt_interval=1, max_ckpts_to_keep=9)
    fake_run(tmp_path, config=config).run()
    expected = records_without_timings(tmp_path / "metrics.jsonl")
    path = str(tmp_path / "checkpoints" / "step_000002")
    back = replace(config, trainer=replace(config.trainer, resume_mode="from_path", resume_path=path))
    with pytest.raises(Killed):
        fake_run(tmp_path, config=back, on_call=killed_in(3, "train")).run()
    assert (tmp_path / "previous-1" / "checkpoints" / "step_000004").is_dir()
    run = fake_run(tmp_path, config=config)
    run.run()
    assert [step for purpose, step, _ in run.generator.calls if purpose == "train"] == [3, 4]
    assert records_without_timings(tmp_path / "metrics.jsonl") == expected


def test_from_path_branches_off_another_runs_folder_with_its_history(tmp_path):
    fake_run(tmp_path / "first").run()
    config = make_config(
        tmp_path / "second", resume_mode="from_path", resume_path=str(tmp_path / "first"), total_steps=5
    )
    run = fake_run(tmp_path / "second", config=config)
    run.run()
    assert [record["step"] for record in read_metrics(run.folder.metrics_file)] == [0, 1, 2, 3, 4, 5]
    assert [entry.global_step for entry in read_evaluations(run.folder.evaluation_file)] == [0, 2, 4, 5]
    assert len(read_metrics(tmp_path / "first" / "metrics.jsonl")) == 5


def test_from_path_without_a_path_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer\.resume_path"):
        fake_run(tmp_path, config=make_config(tmp_path, resume_mode="from_path")).run()


def test_changed_settings_are_refused_all_at_once_with_old_and_new_values(tmp_path):
    fake_run(tmp_path, config=make_config(tmp_path, total_steps=2)).run()
    config = make_config(tmp_path, policy_mini_batch_size=4)
    config = replace(config, seed=7, generator=replace(config.generator, max_turns=5))
    with pytest.raises(ConfigError) as refused:
        fake_run(tmp_path, config=config).run()
    found = {violation.field: violation for violation in refused.value.violations}
    assert set(found) == {"generator.max_turns", "seed", "trainer.policy_mini_batch_size"}
    assert found["seed"].value == "7"
    assert found["seed"].rule.endswith("which is 0")
    assert found["trainer.policy_mini_batch_size"].remedy.startswith(
        "Set trainer.policy_mini_batch_size=2, or begin another run there with trainer.resume_mode=fork"
    )
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3


def test_settings_that_training_does_not_depend_on_may_change(tmp_path):
    expected = undisturbed(tmp_path / "alone", eval_interval=0, ckpt_interval=3)
    folder = tmp_path / "changed"
    with pytest.raises(StopRequested):
        fake_run(folder, config=make_config(folder, eval_interval=0), on_call=send_signal_at(1)).run()
    config = replace(make_config(folder, eval_interval=0, ckpt_interval=3), run_name="renamed")
    config = replace(config, data=replace(config.data, train=("moved.jsonl",)))
    fake_run(folder, config=config).run()
    assert records_without_timings(folder / "metrics.jsonl") == expected


def test_another_layout_may_be_resumed_and_is_said(tmp_path):
    fake_run(tmp_path, config=make_config(tmp_path, total_steps=2)).run()
    run = fake_run(tmp_path, config=make_config(tmp_path, micro_train_batch_size_per_gpu=4))
    run.run()
    line = "trainer.micro_train_batch_size_per_gpu was 1 and is 4: the same training up to rounding"
    assert line in run.output.getvalue()


def test_another_layout_is_refused_where_it_decides_when_a_step_closes(tmp_path):
    fake_run(tmp_path, config=make_config(tmp_path, total_steps=2, docs_per_step=8)).run()
    run = fake_run(tmp_path, config=make_config(tmp_path, micro_train_batch_size_per_gpu=4, docs_per_step=8))
    with pytest.raises(ConfigError, match="micro_train_batch_size_per_gpu"):
        run.run()


def test_another_number_of_steps_is_refused_where_the_learning_rate_depends_on_it(tmp_path):
    def config(total_steps):
        base = make_config(tmp_path, total_steps=total_steps)
        optimizer = replace(base.trainer.policy.optimizer, schedule="cosine")
        policy = replace(base.trainer.policy, optimizer=optimizer)
        return replace(base, trainer=replace(base.trainer, policy=policy))

    fake_run(tmp_path, config=config(2)).run()
    with pytest.raises(ConfigError, match=r"trainer\.total_steps"):
        fake_run(tmp_path, config=config(4)).run()


def test_changed_prompts_are_refused(tmp_path):
    fake_run(tmp_path, config=make_config(tmp_path, total_steps=2)).run()
    with pytest.raises(CheckpointError, match=r"the training prompts changed.*trainer\.resume_mode=fork"):
        fake_run(tmp_path, prompts=make_prompts(8, answer="42")).run()


def test_a_damaged_trainer_state_is_named(tmp_path):
    run = fake_run(tmp_path, config=make_config(tmp_path, total_steps=2))
    run.run()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "trainer_state.json").write_text('{"format": 1, "global_step": 3}')
    with pytest.raises(CheckpointError, match=r"broken/trainer_state\.json cannot be used"):
        TrainerState.read(tmp_path / "broken")


def test_two_runs_cannot_write_to_one_folder(tmp_path):
    run = fake_run(tmp_path)
    run.folder.create()
    with run.folder.locked(), pytest.raises(SkyrlTrainError, match="being written by another run"):
        fake_run(tmp_path).run()


def test_what_a_killed_export_left_goes_with_the_next_start(tmp_path):
    config = make_config(tmp_path, total_steps=2)
    run = fake_run(tmp_path, config=replace(config, trainer=replace(config.trainer, export_hf=False)))
    leftover = run.folder.root / ".export.tmp"
    leftover.mkdir(parents=True)
    run.run()
    assert not leftover.exists()
