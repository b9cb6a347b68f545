import math
from dataclasses import replace

import pytest
import torch

from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.doctor import engine_drift, silence_pays_text
from skyrl_train.runs import assembler
from skyrl_train.trainers.checkpoints.state import Totals
from skyrl_train.trainers.step_metrics import (
    batch_metrics,
    equal_groups,
    rollout_metrics,
    speed_metrics,
    step_totals,
)
from skyrl_train.types import FailureKind, Outcome, RolloutBatch, StopReason
from tests.support.fakes_trainer import failed_trajectory, make_config, make_prompts, make_trajectory, make_turn


def rollouts_of(*trajectories, n_samples=2) -> RolloutBatch:
    prompts = make_prompts(len(trajectories) // n_samples)
    named = [
        replace(trajectory, prompt_uid=f"p{index // n_samples}", sample_index=index % n_samples)
        for index, trajectory in enumerate(trajectories)
    ]
    return RolloutBatch(prompts=tuple(prompts), trajectories=tuple(named), n_samples_per_prompt=n_samples)


def batch_of(tmp_path, rollouts: RolloutBatch):
    count = len(rollouts.prompts)
    config = make_config(tmp_path, train_batch_size=count, policy_mini_batch_size=count)
    return assembler(config)(rollouts, step=1, weight_version=0)


TWO_TURNS = make_trajectory(
    make_turn((1, 2), (3, 4), stop_reason=StopReason.LENGTH),
    make_turn((1, 2, 3, 4, 9), (5,), reward=0.5),
    outcome=Outcome.MAX_TURNS,
    metrics={"solved": 0.0, "tools": 3.0},
)
ONE_TURN = make_trajectory(make_turn((1, 2), (3,), reward=1.0), metrics={"solved": 1.0})


def test_rollouts_in_numbers():
    broken = failed_trajectory(kind=FailureKind.ENGINE_TIMEOUT)
    metrics = rollout_metrics(rollouts_of(TWO_TURNS, ONE_TURN, ONE_TURN, broken))
    assert metrics == pytest.approx(
        {
            "reward/mean": 2.5 / 3,
            "reward/std": math.sqrt(2 * (1 / 6) ** 2 + (1 / 3) ** 2) / math.sqrt(3),
            "reward/max": 1.0,
            "reward/min": 0.5,
            "group/zero_variance": 0.0,
            "env/solved": 2 / 3,
            "env/tools": 3.0,
            "turns/mean": 4 / 3,
            "turns/max": 2.0,
            "response_length/mean": 5 / 3,
            "response_length/max": 3.0,
            "response_length/min": 1.0,
            "context_length/mean": 4.0,
            "context_length/max": 6.0,
            "stop/length": 0.25,
            "stop/stop": 0.75,
            "outcome/done": 2 / 3,
            "outcome/max_turns": 1 / 3,
            "failures/count": 1.0,
            "failures/fraction": 0.25,
            "failures/engine_timeout": 1.0,
        }
    )


def test_groups_of_equal_rewards_are_counted_among_groups_that_can_differ():
    metrics = rollout_metrics(rollouts_of(ONE_TURN, ONE_TURN, TWO_TURNS, ONE_TURN, ONE_TURN, failed_trajectory()))
    assert metrics["group/zero_variance"] == 0.5


def test_groups_without_a_gradient_are_told_where_nearly_all_are():
    grpo, gae = AlgorithmConfig(), AlgorithmConfig(advantage_estimator="gae")
    equal = rollouts_of(*[ONE_TURN] * 18, ONE_TURN, TWO_TURNS)
    told = equal_groups(equal, grpo, step=3)
    assert told.startswith(
        "step 3: the samples of a prompt all have the same reward in 9 of 10 groups, 1 in all of them: with "
        "advantage_estimator=grpo such groups have no gradient. Read rollouts/train_step_000003.parquet"
    )
    assert equal_groups(equal, gae, step=3) == ""
    assert equal_groups(rollouts_of(*[ONE_TURN] * 8, ONE_TURN, TWO_TURNS), grpo, step=3) == ""
    assert "in 2 of 2 groups: with" in equal_groups(rollouts_of(ONE_TURN, ONE_TURN, TWO_TURNS, TWO_TURNS), grpo, step=1)
    assert equal_groups(rollouts_of(*[failed_trajectory()] * 4), grpo, step=1) == ""


def test_the_engines_logprobs_are_compared_with_the_trainers(tmp_path):
    batch = batch_of(tmp_path, rollouts_of(TWO_TURNS, ONE_TURN))
    trained = batch["loss_mask"].nonzero().squeeze(1)
    old = batch["rollout_logprobs"].clone()
    old[trained[0]] += math.log(1.5)
    metrics = batch_metrics(batch.with_columns(old_logprobs=old), AlgorithmConfig(kl_estimator="k1"))
    assert metrics["batch/trained_tokens"] == 4
    assert metrics["mismatch/logprob_diff_max"] == pytest.approx(math.log(1.5), rel=1e-6)
    assert metrics["mismatch/logprob_diff_mean"] == pytest.approx(math.log(1.5) / 4, rel=1e-6)
    assert metrics["mismatch/ratio_mean"] == pytest.approx((1.5 + 3) / 4, rel=1e-6)
    assert metrics["mismatch/ratio_outside_10_percent"] == 0.25


def ages(metrics):
    return {name.removeprefix("off_policy/"): value for name, value in metrics.items() if "age" in name}


def test_the_ages_of_trained_tokens_are_counted_over_the_batch(tmp_path):
    """Trained tokens: three of the first trajectory, one of the second. The learner has version 20."""
    batch = batch_of(tmp_path, rollouts_of(TWO_TURNS, ONE_TURN))
    batch = replace(batch, metadata=replace(batch.metadata, weight_version=20))
    versions = torch.full((batch.num_tokens,), 7, dtype=torch.int32)  # what is not trained is not counted
    versions[batch["loss_mask"]] = torch.tensor([20, 19, 19, 1], dtype=torch.int32)
    assert ages(batch_metrics(batch.with_columns(weight_version=versions), AlgorithmConfig())) == {
        "age/mean": 21 / 4,
        "age/max": 19.0,
        "share/age_0": 0.25,
        "share/age_1": 0.5,
        "share/age_16": 0.25,
    }


def test_the_share_of_tokens_behind_an_update_within_their_turn(tmp_path):
    """Trained tokens: 3 and 4 in a turn of the first trajectory, 5 in the next one, 3 in one of the second."""
    batch = batch_of(tmp_path, rollouts_of(TWO_TURNS, ONE_TURN))

    def share(*versions):
        column = torch.zeros(batch.num_tokens, dtype=torch.int32)
        column[batch["loss_mask"]] = torch.tensor(versions, dtype=torch.int32)
        metrics = batch_metrics(batch.with_columns(weight_version=column), AlgorithmConfig())
        return metrics.get("off_policy/in_flight/share")

    assert share(-2, -2, -1, 0) is None
    assert share(-2, -1, -1, 0) == 0.25


def test_nothing_is_said_of_ages_unless_older_weights_may_sample(tmp_path):
    batch = batch_of(tmp_path, rollouts_of(TWO_TURNS, ONE_TURN))
    assert batch.metadata.max_staleness == 0
    assert ages(batch_metrics(batch, AlgorithmConfig())) == {}
    batch = replace(batch, metadata=replace(batch.metadata, max_staleness=1))
    fresh = {"age/mean": 0.0, "age/max": 0.0, "share/age_0": 1.0}
    assert ages(batch_metrics(batch, AlgorithmConfig())) == fresh


def test_the_distance_to_the_reference_is_a_mean_over_trained_tokens(tmp_path):
    batch = batch_of(tmp_path, rollouts_of(TWO_TURNS, ONE_TURN))
    old = torch.where(batch["loss_mask"], -1.0, 99.0)
    ref = torch.where(batch["loss_mask"], -1.5, 0.0)
    metrics = batch_metrics(batch.with_columns(old_logprobs=old, ref_logprobs=ref), AlgorithmConfig(kl_estimator="k1"))
    assert metrics["kl/reference"] == pytest.approx(0.5)


def test_rows_of_the_first_optimizer_step_were_not_scored_and_are_not_compared(tmp_path):
    """The first trajectory has three trained tokens, the second one."""
    batch = batch_of(tmp_path, rollouts_of(TWO_TURNS, ONE_TURN))
    of_second = batch["loss_mask"].clone()
    of_second[: batch.row_offsets[1]] = False
    old = torch.where(of_second, batch["rollout_logprobs"] + 0.25, 0.0)
    batch = batch.with_columns(old_logprobs=old, ref_logprobs=old - 0.5)
    batch = replace(batch, metadata=replace(batch.metadata, first_scored_row=1))
    metrics = batch_metrics(batch, AlgorithmConfig(kl_estimator="k1"))
    assert metrics["score/policy_pass_skipped"] == 0.75
    assert metrics["mismatch/logprob_diff_mean"] == metrics["mismatch/logprob_diff_max"] == pytest.approx(0.25)
    assert metrics["kl/reference"] == pytest.approx(0.5)


def test_a_batch_of_failures_compares_nothing(tmp_path):
    batch = batch_of(tmp_path, rollouts_of(failed_trajectory(), failed_trajectory()))
    batch = batch.with_columns(old_logprobs=torch.zeros(batch.num_tokens))
    assert batch_metrics(batch, AlgorithmConfig()) == {
        "batch/rows": 0.0,
        "batch/tokens": 4.0,
        "batch/trained_tokens": 0.0,
    }


def test_totals_add_up(tmp_path):
    rollouts = rollouts_of(TWO_TURNS, failed_trajectory())
    step = step_totals(rollouts, batch_of(tmp_path, rollouts), optimizer_steps=2)
    assert step == Totals(prompts=1, trajectories=2, tokens=8, optimizer_steps=2, failed_trajectories=1)
    assert step.plus(step).metrics()["total/tokens"] == 16.0


def test_rates_lie_under_timing(tmp_path):
    batch = batch_of(tmp_path, rollouts_of(TWO_TURNS, ONE_TURN))
    rates = speed_metrics({"timing/step": 3.0, "timing/generate": 2.0}, batch)
    assert rates == {"timing/tokens_per_s": 3.0, "timing/generated_tokens_per_s": 2.0}


def test_tokens_of_older_weights_are_no_sign_of_an_engine_with_wrong_ones():
    far = {"mismatch/logprob_diff_mean": 0.6}
    assert "mismatch/logprob_diff_mean is 0.6" in engine_drift(far)
    assert engine_drift({**far, "off_policy/age/max": 0.0})
    assert engine_drift({**far, "off_policy/age/max": 1.0}) == ""


def test_a_policy_that_says_less_and_less_for_its_reward_is_warned_of():
    playing = [(0.5, -0.48), (1.0, -0.14), (0.8, -0.2)]
    silent = [(5.0, -0.05), (6.0, 0.0), (6.0, 0.0)]
    assert "env/invalid_actions rises with the reward, 0.77 to 5.7 a trajectory" in silence_pays_text(
        [*playing, *silent]
    )
    for seen in (
        [],
        playing,
        silent,
        [*silent, *playing],
        [(number, -reward) for number, reward in [*playing, *silent]],
    ):
        assert silence_pays_text(seen) == ""
