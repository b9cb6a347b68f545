from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from skyrl_train.algorithms.estimate import estimate_advantages
from skyrl_train.algorithms.filters import (
    differing_prompts,
    is_cut_off,
    mask_rows,
    shape_rewards,
    soft_overlong_penalty,
)
from skyrl_train.batch import TrainingInputBatch
from skyrl_train.config import Config, TrainerConfig
from skyrl_train.config.algorithm import AlgorithmConfig, FilterConfig
from skyrl_train.errors import BatchError
from skyrl_train.runs import assembler
from skyrl_train.types import Failure, FailureKind, Outcome, Prompt, RolloutBatch, StopReason, Trajectory, Turn
from tests.support.fakes_trainer import make_trajectory, make_turn

ROWS = ("per_trajectory", "per_turn")


def trajectory(
    uid: str,
    sample: int,
    *rewards: float,
    stop: StopReason = StopReason.STOP,
    length: int = 2,
    outcome: Outcome = Outcome.DONE,
) -> Trajectory:
    """A turn of `length` tokens for each reward; the last one stops for `stop`."""
    turns: list[Turn] = []
    prompt: tuple[int, ...] = (1, 2)
    for number, reward in enumerate(rewards):
        response = tuple(range(10, 10 + length))
        turns.append(
            make_turn(
                prompt, response, reward=reward, stop_reason=stop if number == len(rewards) - 1 else StopReason.STOP
            )
        )
        prompt = (*prompt, *response, 3)
    return make_trajectory(*turns, uid=uid, sample=sample, outcome=outcome)


def failed(uid: str, sample: int) -> Trajectory:
    failure = Failure(kind=FailureKind.ENGINE_ERROR, message="x", turn_index=0)
    return Trajectory(prompt_uid=uid, sample_index=sample, turns=(), outcome=Outcome.FAILED, failure=failure)


def rollouts(*groups: list[Trajectory]) -> RolloutBatch:
    return RolloutBatch(
        prompts=tuple(Prompt(uid=group[0].prompt_uid, messages=()) for group in groups),
        trajectories=tuple(one for group in groups for one in group),
        n_samples_per_prompt=len(groups[0]),
    )


def assembled(batch: RolloutBatch, *, step_wise: bool) -> TrainingInputBatch:
    size = len(batch.prompts)
    trainer = TrainerConfig(train_batch_size=size, policy_mini_batch_size=size, critic_mini_batch_size=size)
    return assembler(Config(trainer=trainer), rows=ROWS[step_wise])(batch, step=1, weight_version=0)


def rewards(batch: RolloutBatch) -> list[list[float]]:
    return [[turn.reward for turn in one.turns] for one in batch.trajectories]


class TestShapeRewards:
    def test_nothing_configured_changes_nothing(self) -> None:
        batch = rollouts([trajectory("a", 0, 1.0, stop=StopReason.LENGTH)])
        assert shape_rewards(batch, FilterConfig()) is batch

    def test_a_trajectory_that_did_not_end_by_itself_gets_0_for_all_turns(self) -> None:
        cut, aborted, whole = (
            trajectory("a", number, 0.5, 1.0, stop=stop)
            for number, stop in enumerate((StopReason.LENGTH, StopReason.ABORT, StopReason.STOP))
        )
        found = shape_rewards(rollouts([cut, aborted, whole]), FilterConfig(zero_reward_on_non_stop=True))
        assert rewards(found) == [[0.0, 0.0], [0.0, 0.0], [0.5, 1.0]]

    def test_what_did_not_stop_is_scaled_and_then_penalised(self) -> None:
        cut, whole = (
            trajectory("a", number, 0.5, 1.0, stop=stop)
            for number, stop in enumerate((StopReason.LENGTH, StopReason.STOP))
        )
        found = shape_rewards(rollouts([cut, whole]), FilterConfig(non_stop_scale=0.5, non_stop_penalty=0.25))
        assert rewards(found) == [[0.25, 0.25], [0.5, 1.0]]

    def test_the_total_is_bounded_last_and_the_last_turn_pays(self) -> None:
        batch = rollouts([trajectory("a", 0, 0.5, 4.0), trajectory("a", 1, -3.0, 1.0), failed("a", 2)])
        found = shape_rewards(batch, FilterConfig(reward_clip_low=-1.0, reward_clip_high=2.0))
        assert rewards(found) == [[0.5, 1.5], [-3.0, 2.0], []]
        above = shape_rewards(batch, FilterConfig(reward_clip_high=2.0, overlong_soft_share=1.0, overlong_max_length=1))
        assert [sum(each) for each in rewards(above)] == [2.0, -3.0, 0]

    def test_the_soft_penalty_goes_to_the_last_turn(self) -> None:
        batch = rollouts([trajectory("a", 0, 0.25, 1.0, length=9), failed("a", 1)])
        found = shape_rewards(batch, FilterConfig(overlong_soft_share=0.2, overlong_max_length=10))
        assert rewards(found) == [[0.25, 0.5], []]

    def test_the_soft_penalty_by_hand(self) -> None:
        config = FilterConfig(overlong_soft_share=0.2, overlong_max_length=20_480)
        lengths = (1, 16_384, 18_432, 20_480, 30_000)
        assert [soft_overlong_penalty(n, config) for n in lengths] == pytest.approx([0.0, 0.0, -0.5, -1.0, -1.0])


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (trajectory("a", 0, 1.0), False),
        (trajectory("a", 0, 1.0, stop=StopReason.LENGTH), True),
        (trajectory("a", 0, 1.0, outcome=Outcome.CONTEXT_FULL), True),
        (trajectory("a", 0, 1.0, outcome=Outcome.MAX_TURNS), False),
        (failed("a", 0), False),
    ],
)
def test_what_counts_as_cut_off(one: Trajectory, expected: bool) -> None:
    assert is_cut_off(one) is expected


def test_prompts_differ_by_the_rewards_of_trajectories_that_did_not_fail() -> None:
    batch = rollouts(
        [trajectory("a", 0, 1.0), trajectory("a", 1, 0.0)],
        [trajectory("b", 0, 1.0), trajectory("b", 1, 1.0)],
        [trajectory("c", 0, 1.0), failed("c", 1)],
        [trajectory("d", 0, 0.1, 0.2), trajectory("d", 1, 0.3)],
    )
    assert differing_prompts(batch) == (True, False, False, False)


@pytest.mark.parametrize("step_wise", [False, True])
class TestMaskRows:
    BATCH = rollouts(
        [trajectory("a", 0, 0.0, 1.0, stop=StopReason.LENGTH), trajectory("a", 1, 0.0)],
        [trajectory("b", 0, 1.0), trajectory("b", 1, 0.5, 0.5)],
        [trajectory("c", 0, 1.0), failed("c", 1)],
    )

    def trained(self, filters: FilterConfig, step_wise: bool) -> list[int]:
        """Trajectories with trained tokens."""
        before = assembled(self.BATCH, step_wise=step_wise)
        after = mask_rows(before, self.BATCH, AlgorithmConfig(filters=filters))
        assert torch.equal(after["rewards"], before["rewards"])
        assert after.metadata == before.metadata
        of_token = torch.repeat_interleave(after["trajectory_index"], after.lengths)
        return sorted(set(of_token[after["loss_mask"]].tolist()))

    def test_nothing_configured_changes_nothing(self, step_wise: bool) -> None:
        assert self.trained(FilterConfig(), step_wise) == [0, 1, 2, 3, 4]

    def test_overlong_leaves_all_turns_of_a_cut_off_trajectory_out(self, step_wise: bool) -> None:
        assert self.trained(FilterConfig(overlong=True), step_wise) == [1, 2, 3, 4]

    def test_zero_variance_leaves_prompts_with_equal_outcomes_out(self, step_wise: bool) -> None:
        assert self.trained(FilterConfig(zero_variance=True), step_wise) == [0, 1]

    def test_both(self, step_wise: bool) -> None:
        assert self.trained(FilterConfig(zero_variance=True, overlong=True), step_wise) == [1]

    def test_the_turns_of_a_cut_off_trajectory_are_compared_as_they_were_sampled(self, step_wise: bool) -> None:
        """RLOO of first turns with returns 1, 0, 3 and of second turns with 1, 0, 2; the first trajectory has no loss."""
        group = [
            trajectory("a", 0, 0.0, 1.0, stop=StopReason.LENGTH),
            trajectory("a", 1, 0.0, 0.0),
            trajectory("a", 2, 1.0, 2.0),
        ]
        config = AlgorithmConfig(
            advantage_estimator="rloo", step_rewards="turn_return", filters=FilterConfig(overlong=True)
        )
        masked = mask_rows(assembled(rollouts(group), step_wise=step_wise), rollouts(group), config)
        found = estimate_advantages(masked, config)
        assert found["advantages"][found["loss_mask"]].tolist() == [-2.0, -2.0, -1.5, -1.5, 2.5, 2.5, 1.5, 1.5]

    def test_the_length_of_a_cut_off_trajectory_weighs_in_the_baseline(self, step_wise: bool) -> None:
        """OPO's baseline of rewards 1 and 0 with 6 and 2 tokens is 0.75."""
        group = [trajectory("a", 0, 1.0, stop=StopReason.LENGTH, length=6), trajectory("a", 1, 0.0)]
        config = AlgorithmConfig(advantage_estimator="opo", filters=FilterConfig(overlong=True))
        masked = mask_rows(assembled(rollouts(group), step_wise=step_wise), rollouts(group), config)
        found = estimate_advantages(masked, config)
        assert found["advantages"][found["loss_mask"]].tolist() == [-0.75, -0.75]

    def test_rollouts_of_another_batch_are_refused(self, step_wise: bool) -> None:
        other = replace(self.BATCH, prompts=self.BATCH.prompts[:1], trajectories=self.BATCH.trajectories[:2])
        config = AlgorithmConfig(filters=FilterConfig(overlong=True))
        with pytest.raises(BatchError, match="trajectory 4 of the batch is not among the 2 rollouts"):
            mask_rows(assembled(self.BATCH, step_wise=step_wise), other, config)
