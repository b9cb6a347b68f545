"""A trajectory that is drawn k times is trained as k copies of it are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from skyrl_train.algorithms.filters import sampling_weights, with_sample_counts
from skyrl_train.algorithms.step_columns import with_step_columns
from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.steps import close_mini_batch
from skyrl_train.config.algorithm import AlgorithmConfig, FilterConfig, OffPolicyConfig
from skyrl_train.parts import LOSS_REDUCTIONS
from tests.support.layouts import fixed_rollouts, scored_batch
from tests.support.learner_cases import make_batch

COUNTS = [2, 0, 1, 3, 0, 0]
"""Of six trajectories of three prompts; none of the last prompt is drawn."""


def batch_of_six() -> TrainingInputBatch:
    return make_batch([5, 9, 6, 4, 7, 8])


@pytest.mark.parametrize("reduction", sorted(LOSS_REDUCTIONS))
def test_counted_trajectories_weigh_what_copies_of_them_do(reduction: str) -> None:
    batch = batch_of_six()
    counted = close_mini_batch(
        batch.with_columns(sample_count=torch.tensor(COUNTS, dtype=torch.int32)),
        loss_reduction=reduction,
        max_sequence_length_for_norm=9,
    )
    rows = [row for row, count in enumerate(COUNTS) for _ in range(count)]
    copies = batch.take(rows).with_columns(trajectory_index=torch.arange(len(rows), dtype=torch.int32))
    expected = close_mini_batch(copies, loss_reduction=reduction, max_sequence_length_for_norm=9)
    assert replace(counted.denominators, num_rows=0) == replace(expected.denominators, num_rows=0)
    whole = [float(counted.batch.take([row])["loss_weights"].sum()) for row in range(6)]
    by_copies = [0.0] * 6
    for place, row in enumerate(rows):
        by_copies[row] += float(expected.batch.take([place])["loss_weights"].sum())
    assert whole == pytest.approx(by_copies, abs=1e-15)


def test_advantages_are_normalized_over_the_copies() -> None:
    batch = batch_of_six()
    batch = batch.with_columns(advantages=torch.arange(len(batch["advantages"]), dtype=torch.float32))
    rows = [row for row, count in enumerate(COUNTS) for _ in range(count)]
    counted, copied = (
        close_mini_batch(
            each, loss_reduction="token_mean", max_sequence_length_for_norm=9, normalize_advantages=True
        ).batch
        for each in (batch.with_columns(sample_count=torch.tensor(COUNTS, dtype=torch.int32)), batch.take(rows))
    )
    for place, row in enumerate(rows):
        torch.testing.assert_close(
            counted.take([row])["advantages"], copied.take([place])["advantages"], rtol=0, atol=0
        )


@pytest.mark.parametrize(
    "config",
    [
        AlgorithmConfig(entropy_quantile=0.5),
        AlgorithmConfig(off_policy=OffPolicyConfig(weight="token", weight_high=9.0, batch_normalize=True)),
        AlgorithmConfig(off_policy=OffPolicyConfig(weight="sequence", weight_high=9.0, batch_normalize=True)),
    ],
)
def test_statistics_over_the_step_are_taken_over_the_copies(config: AlgorithmConfig) -> None:
    batch = batch_of_six()
    numbers = torch.linspace(0, 1, batch.num_tokens)
    batch = batch.with_columns(old_logprobs=-numbers, rollout_logprobs=-2 * numbers)
    rows = [row for row, count in enumerate(COUNTS) for _ in range(count)]
    counted, copied = (
        with_step_columns(each, config, lambda _what, of: -of["old_logprobs"])[0]
        for each in (batch.with_columns(sample_count=torch.tensor(COUNTS, dtype=torch.int32)), batch.take(rows))
    )
    for place, row in enumerate(rows):
        weights = (each.take([index])["policy_weights"] for each, index in ((counted, row), (copied, place)))
        torch.testing.assert_close(*weights, rtol=1e-12, atol=0)


@pytest.mark.parametrize("reduction", sorted(LOSS_REDUCTIONS))
def test_all_turns_of_a_trajectory_count_as_often_as_the_trajectory_in_one_row(reduction: str) -> None:
    weights, counts = {}, {}
    for step_wise in (False, True):
        drawn = with_sample_counts(
            scored_batch(fixed_rollouts(), step_wise=step_wise), FilterConfig(resample="pow"), seed=3
        )
        closed = close_mini_batch(drawn, loss_reduction=reduction, max_sequence_length_for_norm=9).batch
        rows = closed["trajectory_index"].tolist()
        counts[step_wise] = {(row, count) for row, count in zip(rows, drawn["sample_count"].tolist())}
        of_token = torch.repeat_interleave(closed["trajectory_index"].long(), closed.lengths)
        weights[step_wise] = torch.zeros(8, dtype=torch.float64).index_add_(
            0, of_token[closed["loss_mask"]], closed["loss_weights"][closed["loss_mask"]].double()
        )
    assert counts[True] == counts[False]
    assert sum(count for _, count in counts[True]) == 7, "one of eight failed and is never drawn"
    assert max(count for _, count in counts[True]) > 1
    torch.testing.assert_close(weights[True], weights[False], rtol=1e-6, atol=0)


def test_draws_are_a_function_of_seed_and_step_and_follow_the_scores() -> None:
    batch = batch_of_six()
    rewards = torch.zeros(batch.num_tokens)
    rewards[batch.row_offsets[1:] - 1] = torch.tensor([0.0, -3.0, 0.0, 4.0, 0.0, 0.0])
    batch = batch.with_columns(rewards=rewards)
    config = FilterConfig(resample="pow")
    one, again = (with_sample_counts(batch, config, seed=1)["sample_count"].tolist() for _ in range(2))
    assert one == again
    assert sum(one) == 6
    assert [one[row] for row in (0, 2, 4, 5)] == [0, 0, 0, 0]
    totals = sum(with_sample_counts(batch, config, seed=seed)["sample_count"].double() for seed in range(300))
    assert float(totals[3] / totals[1]) == pytest.approx(16 / 9, rel=0.2)  # type: ignore[index]
    assert with_sample_counts(batch, FilterConfig(), seed=1) is batch


def test_the_weights_by_hand() -> None:
    scores = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    for name, expected in (("pow", [1.0, 4.0, 0.25]), ("max_min", [1.0, 1.0, 0.0]), ("max_random", [0.4, 0.1, 0.1])):
        assert sampling_weights(scores, FilterConfig(resample=name)).tolist() == pytest.approx(expected, abs=1e-7)  # type: ignore[arg-type]
