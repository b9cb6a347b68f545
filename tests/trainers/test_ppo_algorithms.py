"""What algorithms ask of the loop: filters, dynamic sampling, the KL controller, the critic's warm-up."""

from dataclasses import replace

import pytest

from skyrl_train.errors import StopRequested
from skyrl_train.telemetry import read_metrics
from skyrl_train.telemetry.records import read_rollouts
from skyrl_train.trainers.checkpoints.state import TrainerState
from tests.support.fakes_trainer import FakeLearner, fake_run, make_config, records_without_timings, send_signal_at


def config_with(folder, *, filters=None, trainer=None, **algorithm):
    config = make_config(folder, **(trainer or {}))
    before = config.trainer.algorithm
    changed = replace(before, **algorithm, filters=replace(before.filters, **(filters or {})))
    return replace(config, trainer=replace(config.trainer, algorithm=changed))


def dynamic_run(folder, **parts):
    config = config_with(folder, filters={"dynamic_sampling": "filter"})
    return fake_run(folder, config=config, learner=FakeLearner(lr=0.01), **parts)


def test_dynamic_sampling_takes_as_many_prompt_batches_as_it_needs(tmp_path):
    run = dynamic_run(tmp_path)
    run.run()
    records = read_metrics(run.folder.metrics_file)[1:]
    assert all(record["batch/rows"] == 8 for record in records)
    batches = [record["sampling/batches"] for record in records]
    assert max(batches) > 1
    assert records[-1]["total/prompts"] == 4 * sum(batches)
    assert TrainerState.read(tmp_path / "checkpoints" / "step_000004").data_position == sum(batches)
    kept = read_rollouts(tmp_path / "rollouts" / "train_step_000001.parquet")[1]
    rewards = [trajectory.reward for trajectory in kept.trajectories]
    assert all(first != second for first, second in zip(rewards[::2], rewards[1::2]))


def test_dynamic_sampling_resumes_identically(tmp_path):
    dynamic_run(tmp_path / "alone").run()
    with pytest.raises(StopRequested):
        dynamic_run(tmp_path / "stopped", on_call=send_signal_at(3)).run()
    dynamic_run(tmp_path / "stopped").run()
    expected = records_without_timings(tmp_path / "alone" / "metrics.jsonl")
    assert records_without_timings(tmp_path / "stopped" / "metrics.jsonl") == expected


def test_filtered_prompts_carry_no_loss(tmp_path):
    run = fake_run(tmp_path, config=config_with(tmp_path, filters={"zero_variance": True}))
    run.run()
    first = read_metrics(run.folder.metrics_file)[1]
    assert first["group/zero_variance"] > 0
    assert 0 < first["batch/trained_tokens"] < first["response_length/mean"] * 8
    assert run.learner.num_optimizer_steps == 8


def test_shaped_rewards_are_trained_on_while_the_environments_are_reported(tmp_path):
    filters = {"overlong_soft_share": 1.0, "overlong_max_length": 2, "overlong_penalty": 4.0}
    fake_run(tmp_path / "shaped", config=config_with(tmp_path / "shaped", filters=filters)).run()
    fake_run(tmp_path / "plain").run()
    name = "rollouts/train_step_000001.parquet"
    shaped = read_rollouts(tmp_path / "shaped" / name)[1].trajectories
    plain = read_rollouts(tmp_path / "plain" / name)[1].trajectories
    assert [trajectory.reward for trajectory in shaped] == [trajectory.reward - 4.0 for trajectory in plain]
    first = [read_metrics(tmp_path / folder / "metrics.jsonl")[1]["reward/mean"] for folder in ("shaped", "plain")]
    assert first[0] == first[1]


def adaptive_run(folder, **parts):
    config = config_with(
        folder, kl_controller="adaptive", kl_reward_coef=0.5, kl_target=1e-5, kl_horizon=8, trainer={"ckpt_interval": 1}
    )
    return fake_run(folder, config=config, reference=FakeLearner("reference"), **parts)


def test_the_kl_controller_moves_the_weight_and_is_resumed(tmp_path):
    adaptive_run(tmp_path / "alone").run()
    coefs = [record["kl/reward_coef"] for record in read_metrics(tmp_path / "alone" / "metrics.jsonl")[1:]]
    assert coefs[:2] == pytest.approx([0.5, 0.4])
    assert coefs[2] > coefs[1]
    with pytest.raises(StopRequested):
        adaptive_run(tmp_path / "stopped", on_call=send_signal_at(2)).run()
    adaptive_run(tmp_path / "stopped").run()
    expected = records_without_timings(tmp_path / "alone" / "metrics.jsonl")
    assert records_without_timings(tmp_path / "stopped" / "metrics.jsonl") == expected


def test_during_the_critics_warm_up_only_the_critic_learns(tmp_path):
    config = config_with(tmp_path, advantage_estimator="gae", critic_warmup_steps=3)
    config = replace(config, critic=replace(config.critic, model=replace(config.critic.model, path="policy")))
    run = fake_run(tmp_path, config=config, critic=FakeLearner("critic"))
    run.run()
    assert run.critic is not None
    assert run.critic.num_optimizer_steps == 8
    assert run.learner.num_optimizer_steps == run.plan.total_optimizer_steps == 2


def moving_reference_run(folder, **parts):
    config = config_with(folder, kl_loss_coef=0.1, ref_update_interval=2, trainer={"ckpt_interval": 1})
    return fake_run(folder, config=config, reference=FakeLearner("reference"), **parts)


def test_the_reference_becomes_the_policy_every_so_many_steps_and_is_resumed(tmp_path):
    run = moving_reference_run(tmp_path / "alone")
    run.run()
    assert run.reference is not None
    assert run.reference.weight == run.learner.weight
    distance = [record["kl/reference"] for record in read_metrics(run.folder.metrics_file)[1:]]
    assert distance[0] == distance[2] == 0
    assert min(distance[1], distance[3]) > 0
    with pytest.raises(StopRequested):
        moving_reference_run(tmp_path / "stopped", on_call=send_signal_at(3)).run()
    moving_reference_run(tmp_path / "stopped").run()
    expected = records_without_timings(tmp_path / "alone" / "metrics.jsonl")
    assert records_without_timings(tmp_path / "stopped" / "metrics.jsonl") == expected


def test_a_fixed_reference_is_in_no_checkpoint(tmp_path):
    config = config_with(tmp_path, kl_loss_coef=0.1)
    fake_run(tmp_path, config=config, reference=FakeLearner("reference", weight=0.5)).run()
    assert not (tmp_path / "checkpoints" / "step_000004" / "reference").exists()


def test_replacement_fills_a_batch_with_copies_and_resumes_identically(tmp_path):
    def run(folder, **parts):
        config = config_with(folder, filters={"dynamic_sampling": "replace"})
        return fake_run(folder, config=config, learner=FakeLearner(lr=0.01), **parts)

    run(tmp_path / "alone").run()
    records = read_metrics(tmp_path / "alone" / "metrics.jsonl")[1:]
    assert all(record["batch/rows"] == 8 for record in records)
    kept = [
        read_rollouts(tmp_path / "alone" / "rollouts" / f"train_step_{step:06d}.parquet")[step] for step in (1, 2, 3, 4)
    ]
    assert any("#copy" in prompt.uid for rollouts in kept for prompt in rollouts.prompts)
    with pytest.raises(StopRequested):
        run(tmp_path / "stopped", on_call=send_signal_at(2)).run()
    run(tmp_path / "stopped").run()
    expected = records_without_timings(tmp_path / "alone" / "metrics.jsonl")
    assert records_without_timings(tmp_path / "stopped" / "metrics.jsonl") == expected


def test_overlong_responses_carry_no_loss_and_the_critics_part_is_resumed(tmp_path):
    def run(folder, **parts):
        config = config_with(folder, filters={"overlong": True}, advantage_estimator="gae", critic_warmup_steps=1)
        config = replace(config, critic=replace(config.critic, model=replace(config.critic.model, path="policy")))
        return fake_run(folder, config=config, critic=FakeLearner("critic"), **parts)

    run(tmp_path / "alone").run()
    with pytest.raises(StopRequested):
        run(tmp_path / "stopped", on_call=send_signal_at(3)).run()
    run(tmp_path / "stopped").run()
    expected = records_without_timings(tmp_path / "alone" / "metrics.jsonl")
    assert records_without_timings(tmp_path / "stopped" / "metrics.jsonl") == expected
    assert "critic/explained_variance" in expected[1]
