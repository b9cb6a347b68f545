"""Whole runs of the loop, with fakes."""

import gc
import json
import os
import signal
import time
from dataclasses import replace

import pytest
from pyarrow.parquet import read_table

from skyrl_train.config import RolloutsConfig
from skyrl_train.errors import ActorLostError, BatchError, NonFiniteError, SkyrlTrainError, StopRequested
from skyrl_train.telemetry import MetricsLog, phase_seconds, read_metrics
from skyrl_train.telemetry.records import read_rollouts, read_timeline, write_rollouts
from skyrl_train.telemetry.trackers import draw_learning_curve
from skyrl_train.trainers.checkpoints.state import TrainerState
from skyrl_train.trainers.loop import _start_up_uncollected
from tests.support.fakes_trainer import FakeGenerator, FakeLearner, fake_run, make_config


def test_the_number_of_optimizer_steps_is_the_plans(tmp_path):
    run = fake_run(tmp_path, config=make_config(tmp_path, update_epochs_per_batch=3))
    run.run()
    assert run.learner.num_optimizer_steps == run.plan.total_optimizer_steps == 24
    assert run.learner.num_closed_prompts == [2] * 24
    assert read_metrics(run.folder.metrics_file)[-1]["total/optimizer_steps"] == 24


def test_step_wise_rows_do_not_change_the_number_of_optimizer_steps(tmp_path):
    config = make_config(tmp_path)
    run = fake_run(tmp_path, config=replace(config, generator=replace(config.generator, step_wise_trajectories=True)))
    run.run()
    assert run.learner.num_optimizer_steps == 8
    assert max(record.get("batch/rows", 0) for record in read_metrics(run.folder.metrics_file)) > 8


def test_the_engine_has_the_policys_weights_before_each_rollout(tmp_path):
    run = fake_run(tmp_path)
    run.run()
    assert run.engine.versions == [0, 1, 2, 3, 4]
    assert run.engine.weight == run.learner.weight
    assert run.learner.steps_and_versions[::2] == [(1, 0), (2, 1), (3, 2), (4, 3)]


class StaleGenerator(FakeGenerator):
    """Samples with weights that are far from the trainer's."""

    def _trajectory(self, prompt, sample, step, purpose):
        trajectory = super()._trajectory(prompt, sample, step, purpose)
        turns = (replace(turn, response_logprobs=turn.response_logprobs - 1.5) for turn in trajectory.turns)
        return replace(trajectory, turns=tuple(turns))


def test_an_engine_that_does_not_serve_the_trainers_weights_is_warned_about(tmp_path):
    right, stale = fake_run(tmp_path / "right"), fake_run(tmp_path / "stale")
    stale.generator = StaleGenerator(stale.engine)
    right.run()
    stale.run()
    assert "log-probabilities" not in right.output.getvalue()
    said = " ".join(stale.output.getvalue().split())
    assert "mismatch/logprob_diff_mean is 1.5: the engine's log-probabilities are not those of the trainer's" in said


class BehindGenerator(FakeGenerator):
    """Its engine does not take the weights of step 2."""

    def _trajectory(self, prompt, sample, step, purpose):
        trajectory = super()._trajectory(prompt, sample, step, purpose)
        turns = (replace(turn, weight_versions=((0, min(1, step - 1)),)) for turn in trajectory.turns)
        return replace(trajectory, turns=tuple(turns))


def test_a_batch_that_older_weights_sampled_is_refused_before_an_update(tmp_path):
    run = fake_run(tmp_path)
    run.generator = BehindGenerator(run.engine)
    with pytest.raises(
        BatchError, match=r"prompt 'p\d': .* by weights of version 1, and the learner has those of version 2"
    ):
        run.run()
    assert {step for step, _ in run.learner.steps_and_versions} == {1, 2}


def test_recorded_rollouts_may_be_of_any_version(tmp_path):
    config = make_config(tmp_path)
    run = fake_run(tmp_path, config=replace(config, generator=replace(config.generator, backend="replay")))
    run.generator = BehindGenerator(run.engine)
    run.generator.is_recorded = True
    run.run()
    assert [step for step, _ in run.learner.steps_and_versions[::2]] == [1, 2, 3, 4]


class IndifferentGenerator(FakeGenerator):
    """Rewards every answer alike."""

    def _trajectory(self, prompt, sample, step, purpose):
        trajectory = super()._trajectory(prompt, sample, step, purpose)
        return replace(trajectory, turns=tuple(replace(turn, reward=0.25) for turn in trajectory.turns[:1]))


def test_steps_without_a_gradient_are_told_once(tmp_path):
    usual, indifferent = fake_run(tmp_path / "usual"), fake_run(tmp_path / "indifferent")
    indifferent.generator = IndifferentGenerator(indifferent.engine)
    usual.run()
    indifferent.run()
    said = " ".join(usual.output.getvalue().split())
    assert said.count("have no gradient") == 1
    assert "warning: step 3: the samples of a prompt all have the same reward in 4 of 4 groups, 1 in all" in said
    said = " ".join(indifferent.output.getvalue().split())
    assert said.count("have no gradient") == 1
    assert "warning: step 1: the samples of a prompt all have the same reward in 4 of 4 groups, 0.25 in all" in said


def test_each_step_takes_the_next_batch_of_prompts_and_evaluations_always_use_the_same_seeds(tmp_path):
    run = fake_run(tmp_path)
    run.run()
    train = [(step, uids) for purpose, step, uids in run.generator.calls if purpose == "train"]
    assert [step for step, _ in train] == [1, 2, 3, 4]
    assert sorted(train[0][1] + train[1][1]) == [f"p{index}" for index in range(8)]
    assert [step for purpose, step, _ in run.generator.calls if purpose == "eval"] == [0, 0, 0]


def test_evaluations_happen_before_at_the_interval_and_after(tmp_path):
    run = fake_run(tmp_path, config=make_config(tmp_path, total_steps=5))
    result = run.run()
    assert result is not None
    assert [evaluation.global_step for evaluation in result.evaluations] == [0, 2, 4, 5]
    records = read_metrics(run.folder.metrics_file)
    assert [record["step"] for record in records if "eval/accuracy" in record] == [0, 2, 4, 5]
    assert records[0]["eval/accuracy"] < records[-1]["eval/accuracy"]


def test_without_held_out_prompts_nothing_is_evaluated(tmp_path):
    run = fake_run(tmp_path, held_out=[])
    run.run()
    records = read_metrics(run.folder.metrics_file)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert not any(name.startswith("eval/") for record in records for name in record)
    assert not run.folder.evaluation_file.exists()


def test_the_run_folder_holds_everything(tmp_path):
    run = fake_run(tmp_path)
    run.run()
    assert {path.name for path in tmp_path.iterdir()} == {
        ".lock",
        "checkpoints",
        "complete.json",
        "config.yaml",
        "environment.json",
        "evaluation.json",
        "export",
        "learning_curve.png",
        "metrics.jsonl",
        "plan.json",
        "rollouts",
        "timeline.jsonl",
        "timeline.png",
    }
    assert {path.name for path in (tmp_path / "rollouts").iterdir()} == {
        *(f"train_step_00000{step}.parquet" for step in (1, 2, 3, 4)),
        *(f"eval_step_00000{step}.parquet" for step in (0, 2, 4)),
    }
    assert json.loads((tmp_path / "export" / "model.json").read_text()) == run.learner.weight
    state = TrainerState.read(tmp_path / "checkpoints" / "step_000004")
    assert (state.global_step, state.data_position, state.weight_version) == (4, 4, 4)


def test_rollouts_are_logged_with_the_advantages_of_their_step(tmp_path):
    run = fake_run(tmp_path)
    run.run()
    file = tmp_path / "rollouts" / "train_step_000001.parquet"
    assert read_rollouts(file)[1].n_samples_per_prompt == 2
    turns = read_table(file).to_pylist()
    assert all(len(turn["advantages"]) == len(turn["response_token_ids"]) for turn in turns)
    assert any(value != 0 for turn in turns for value in turn["advantages"])


@pytest.mark.slow
@pytest.mark.parametrize("policy_mini_batch_size", [2, 4])
def test_entropies_are_kept_where_they_are_asked_for_and_change_nothing_else(tmp_path, policy_mini_batch_size):
    """Mini-batches of 4 are whole batches, whose policy is not scored otherwise; of two mini-batches the second is."""

    class Counting(FakeLearner):
        num_forwards = 0
        num_updates = 0

        def forward(self, batch):
            self.num_forwards += 1
            assert "entropies" not in batch
            return super().forward(batch)

        def forward_backward(self, mini_batch):
            assert "entropies" not in mini_batch.batch
            self.num_updates += 1
            is_second = policy_mini_batch_size == 2 and self.num_updates % 2 == 0
            assert ("old_logprobs" in mini_batch.batch) == is_second
            return super().forward_backward(mini_batch)

    found = []
    for name, columns in (("without", ("policy_logprobs",)), ("with", ("policy_logprobs", "entropies"))):
        config = make_config(tmp_path / name, policy_mini_batch_size=policy_mini_batch_size)
        run = fake_run(tmp_path / name, config=replace(config, rollouts=RolloutsConfig(columns=columns)))
        run.learner = Counting()
        run.run()
        rows = read_table(run.folder.rollouts / "train_step_000003.parquet").to_pylist()
        found.append((run.learner.weight, run.learner.num_forwards, [row.pop("entropies") for row in rows], rows))
    (weight, num_forwards, nothing, rows), (same, with_entropies, entropies, same_rows) = found
    assert (weight, rows) == (same, same_rows)
    assert (num_forwards, with_entropies) == ((4, 4) if policy_mini_batch_size == 2 else (0, 4))
    assert set(nothing) == {None}
    assert [set(each) for each in entropies] == [{0.5}] * len(rows)


def test_a_record_means_that_the_rollouts_of_its_step_are_on_disk(tmp_path, monkeypatch):
    missing: list[int] = []

    def write_slowly(*args, **kwargs):
        time.sleep(0.05)
        return write_rollouts(*args, **kwargs)

    class WatchingLog(MetricsLog):
        def log(self, metrics, *, step):
            names = [f"train_step_00000{step}.parquet"] if step else ["eval_step_000000.parquet"]
            missing.extend(step for name in names if not (tmp_path / "rollouts" / name).exists())
            super().log(metrics, step=step)

    monkeypatch.setattr("skyrl_train.trainers.rollout_sink.write_rollouts", write_slowly)
    monkeypatch.setattr("skyrl_train.telemetry.metrics_log.MetricsLog", WatchingLog)
    fake_run(tmp_path).run()
    assert missing == []


def test_the_phases_of_a_step_add_up_to_the_step(tmp_path):
    run = fake_run(tmp_path)
    run.run()
    for record in read_metrics(run.folder.metrics_file):
        seconds = phase_seconds(record)
        assert sum(seconds.values()) == pytest.approx(record["timing/step"], rel=0.05)
        assert 0.0 <= record["timing/wait/sync"] <= seconds["sync"]


def test_what_ran_when_is_written_step_after_step(tmp_path):
    run = fake_run(tmp_path)
    run.run()
    lines = read_timeline(run.folder.timeline_file)
    assert [line.step for line in lines] == [0, 1, 2, 3, 4, 4], "the last has what followed the record of step 4"
    assert {name for name, _, _ in lines[0].learner} == {"sync", "evaluate", "log"}
    assert {"generate", "update", "sync", "evaluate", "checkpoint"} <= {
        name for line in lines for name, _, _ in line.learner
    }


def test_failed_trajectories_are_counted_and_have_no_share_in_the_reward(tmp_path):
    run = fake_run(tmp_path, is_broken=lambda step, prompt, sample: step == 1 and (prompt == 0 or sample == 1))
    run.run()
    first = read_metrics(run.folder.metrics_file)[1]
    assert first["failures/count"] == 5
    assert first["failures/fraction"] == 5 / 8
    assert first["failures/environment_error"] == 5
    assert first["batch/rows"] == 3
    rewards = [
        t.reward
        for t in read_rollouts(tmp_path / "rollouts" / "train_step_000001.parquet")[1].trajectories
        if not t.failed
    ]
    assert first["reward/mean"] == pytest.approx(sum(rewards) / 3)
    assert run.learner.num_optimizer_steps == 8


def test_a_batch_of_failures_alone_has_no_reward_at_all(tmp_path):
    run = fake_run(tmp_path, is_broken=lambda step, prompt, sample: step == 2)
    run.run()
    record = read_metrics(run.folder.metrics_file)[2]
    assert record["failures/fraction"] == 1.0
    assert "reward/mean" not in record
    assert "response_length/mean" not in record
    assert run.learner.num_optimizer_steps == 8


def test_a_non_finite_gradient_stops_the_run_and_leaves_the_checkpoint(tmp_path):
    run = fake_run(tmp_path, learner=FakeLearner(fail_at=6))
    with pytest.raises(NonFiniteError) as refused:
        run.run()
    message = str(refused.value)
    assert "training step 3, policy: optimizer step 2 of 2 (epoch 1, mini-batch 2)" in message
    assert "step_000002; it was not touched" in message
    assert [record["step"] for record in read_metrics(run.folder.metrics_file)] == [0, 1, 2]
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == ["step_000002"]
    assert sorted(path.name for path in (tmp_path / "rollouts").glob("*_step_000003*")) == [
        "failed_step_000003.parquet"
    ]
    assert run.engine.versions == [0, 1, 2]
    assert not (tmp_path / "complete.json").exists()


def test_a_run_stopped_by_a_non_finite_gradient_resumes_from_the_checkpoint(tmp_path):
    with pytest.raises(NonFiniteError):
        fake_run(tmp_path, learner=FakeLearner(fail_at=6)).run()
    run = fake_run(tmp_path)
    assert run.run() is not None
    assert [record["step"] for record in read_metrics(run.folder.metrics_file)] == [0, 1, 2, 3, 4]


def test_a_run_that_keeps_few_rollouts_resumes_without_those_that_it_deleted(tmp_path):
    config = replace(make_config(tmp_path), rollouts=RolloutsConfig(keep_last=1))
    with pytest.raises(NonFiniteError):
        fake_run(tmp_path, config=config, learner=FakeLearner(fail_at=6)).run()
    # those of step 2 went when step 3's were written, which the failed ones replaced
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["failed_step_000003.parquet"]
    run = fake_run(tmp_path, config=config)
    assert run.run() is not None
    assert [record["step"] for record in read_metrics(run.folder.metrics_file)] == [0, 1, 2, 3, 4]
    kept = sorted(path.name for path in run.folder.rollouts.iterdir())
    assert kept == ["eval_step_000004.parquet", "train_step_000004.parquet"]


class LostLearner(FakeLearner):
    """Its rank dies in the third step, in which the user asks for an end first."""

    def __init__(self, signum=None):
        super().__init__()
        self.signum = signum

    def optim_step(self):
        if self.num_optimizer_steps == 5:
            if self.signum is not None:
                os.kill(os.getpid(), self.signum)
            raise ActorLostError("policy worker rank 1 died", phase="update")
        return super().optim_step()


def test_a_lost_worker_is_what_the_run_ends_with_unless_a_signal_asked_for_the_end_before(tmp_path):
    with pytest.raises(ActorLostError):
        fake_run(tmp_path / "lost", learner=LostLearner()).run()
    with pytest.raises(StopRequested) as stopped:
        fake_run(tmp_path / "both", learner=LostLearner(signal.SIGTERM)).run()
    assert (stopped.value.signal_name, stopped.value.global_step) == ("SIGTERM", 2)
    assert (tmp_path / "both" / "checkpoints" / "step_000002").is_dir()


def test_a_reference_is_scored_and_its_distance_reported(tmp_path):
    run = fake_run(tmp_path, reference=FakeLearner("reference"))
    run.run()
    records = read_metrics(run.folder.metrics_file)
    assert records[1]["kl/reference"] == 0.0
    assert records[-1]["kl/reference"] > 0.0
    assert run.reference is not None
    assert run.reference.num_optimizer_steps == 0


def test_a_critic_is_trained_and_saved_beside_the_policy(tmp_path):
    config = make_config(tmp_path)
    critic = replace(config.critic, model=replace(config.critic.model, path="policy"))
    algorithm = replace(config.trainer.algorithm, advantage_estimator="gae")
    config = replace(config, critic=critic, trainer=replace(config.trainer, algorithm=algorithm))
    run = fake_run(tmp_path, config=config, critic=FakeLearner("critic"))
    run.run()
    assert run.critic is not None
    assert run.critic.num_optimizer_steps == run.learner.num_optimizer_steps == 8
    assert read_metrics(run.folder.metrics_file)[-1]["critic/grad_norm"] > 0
    assert (tmp_path / "checkpoints" / "step_000004" / "critic").is_dir()


def test_the_console_has_a_line_a_step_and_the_table_of_both_evaluations(tmp_path):
    run = fake_run(tmp_path)
    run.run()
    lines = run.output.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("step ")] == [
        f"step {step}/4" for step in (1, 2, 3, 4)
    ]
    assert any(line.startswith("evaluation at step 0: accuracy 0.") for line in lines)
    table = next(line for line in lines if "before (step 0)" in line)
    assert "after (step 4)" in table
    assert any(line.split()[:2] == ["turns", "used"] for line in lines)


def test_the_table_of_one_evaluation_compares_it_with_nothing(tmp_path):
    run = fake_run(tmp_path, config=make_config(tmp_path, total_steps=1, eval_before_train=False, eval_interval=0))
    run.run()
    (heading,) = [line.split() for line in run.output.getvalue().splitlines() if line.split()[:1] == ["step"]][1:]
    assert heading == ["step", "1"]
    assert "before" not in run.output.getvalue()


def test_the_curve_is_drawn_from_the_runs_own_record(tmp_path):
    fake_run(tmp_path, config=make_config(tmp_path, total_steps=2), draw=draw_learning_curve).run()
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_curve_that_cannot_be_drawn_is_a_warning(tmp_path):
    def broken(*paths, title):
        raise RuntimeError("no font")

    run = fake_run(tmp_path, draw=broken)
    assert run.run() is not None
    assert "warning: learning_curve.png could not be drawn: RuntimeError: no font" in run.output.getvalue()


def test_that_nothing_draws_here_is_said_once(tmp_path, monkeypatch):
    def missing(*paths, title):
        raise SkyrlTrainError("matplotlib is not installed")

    monkeypatch.setattr("tests.support.fakes_trainer.quick_drawing", missing)
    run = fake_run(tmp_path, config=make_config(tmp_path, total_steps=1), draw=missing)
    run.run()
    assert run.output.getvalue().count("warning: no pictures: matplotlib is not installed") == 1


def test_the_final_export_replaces_an_older_one_as_a_whole(tmp_path):
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "stale.json").touch()
    run = fake_run(tmp_path, config=make_config(tmp_path, total_steps=1))
    run.run()
    assert [path.name for path in (tmp_path / "export").iterdir()] == ["model.json"]


def test_a_loop_freezes_what_there_was_and_thaws_it_but_not_what_its_caller_froze() -> None:
    gc.unfreeze()
    try:
        with _start_up_uncollected():
            assert gc.get_freeze_count() > len(gc.get_objects())
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()
    with _start_up_uncollected():
        pass
    assert gc.get_freeze_count() > len(gc.get_objects())
