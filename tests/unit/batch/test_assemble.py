from __future__ import annotations

import math
from dataclasses import replace

import pytest

from skyrl_train.batch.steps.minibatch import ages_in
from skyrl_train.errors import BatchError
from skyrl_train.runs import assembler
from skyrl_train.types import Trajectory, Turn
from tests.support.batch_builders import failed_trajectory, make_config, make_rollouts, make_trajectory, make_turn

TWO_TURNS = (make_turn([1, 2], [3, 4], reward=0.5), make_turn([1, 2, 3, 4, 9], [5], reward=1.0))
ONE_TURN = (make_turn([1, 2], [6], reward=2.0),)

ROWS = ("per_trajectory", "per_turn")


def assembled(*trajectories, step_wise=False, n_samples=1, prompts=None, **sizes):
    rollouts = make_rollouts(*trajectories, n_samples=n_samples)
    prompts = prompts or len(rollouts.prompts)
    config = make_config(prompts=prompts, n_samples=n_samples, **{"mini_batch": prompts, **sizes})
    return assembler(config, rows=ROWS[step_wise])(rollouts, step=4, weight_version=2)


def test_one_row_per_trajectory_holds_all_its_turns():
    batch = assembled(make_trajectory("a", 0, *TWO_TURNS))
    assert batch["input_ids"].tolist() == [1, 2, 3, 4, 9, 5]
    assert batch["loss_mask"].tolist() == [False, False, True, True, False, True]
    assert batch["rewards"].tolist() == [0, 0, 0, 0.5, 0, 1]
    assert batch["rollout_logprobs"].tolist() == [0, 0, -3, -4, 0, -5]
    assert batch["is_last_step"].tolist() == [True]


def test_step_wise_each_turn_is_a_row_with_its_own_response():
    batch = assembled(make_trajectory("a", 0, *TWO_TURNS), step_wise=True)
    assert batch.padded("input_ids").tolist() == [[1, 2, 3, 4, 0, 0], [1, 2, 3, 4, 9, 5]]
    assert batch.padded("loss_mask").int().tolist() == [[0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1]]
    assert batch.padded("rewards").tolist() == [[0, 0, 0, 0.5, 0, 0], [0, 0, 0, 0, 0, 1]]
    assert batch["trajectory_index"].tolist() == [0, 0]
    assert batch["step_index"].tolist() == [0, 1]
    assert batch["is_last_step"].tolist() == [False, True]


def test_returns_of_turns_with_nothing_between_them_need_rows_of_their_own():
    touching = (make_turn([1, 2], [3, 4]), make_turn([1, 2, 3, 4], [5]))
    rollouts = make_rollouts(make_trajectory("a", 0, *TWO_TURNS), make_trajectory("b", 0, *touching), n_samples=1)
    config = make_config(prompts=2, mini_batch=2, n_samples=1)

    def rows(step_rewards, *, step_wise):
        algorithm = replace(config.trainer.algorithm, step_rewards=step_rewards)
        changed = replace(config, trainer=replace(config.trainer, algorithm=algorithm))
        return assembler(changed, rows=ROWS[step_wise])(
            rollouts,
            step=1,
            weight_version=0,
        ).num_rows

    assert rows("outcome", step_wise=False) == 2
    assert rows("turn_return", step_wise=True) == 4
    with pytest.raises(BatchError, match="trajectory b/0, turn 1: nothing was observed after turn 0"):
        rows("turn_return", step_wise=False)


def test_rows_are_numbered_by_prompt_and_sample():
    batch = assembled(
        make_trajectory("a", 0, *TWO_TURNS),
        make_trajectory("a", 1, *ONE_TURN),
        make_trajectory("b", 0, *ONE_TURN),
        make_trajectory("b", 1, *TWO_TURNS),
        step_wise=True,
        n_samples=2,
    )
    assert batch.metadata.uids == ("a", "a", "a", "b", "b", "b")
    assert batch["prompt_index"].tolist() == [0, 0, 0, 1, 1, 1]
    assert batch["trajectory_index"].tolist() == [0, 0, 1, 2, 3, 3]


def test_the_metadata_holds_prompts_and_mini_batches():
    batch = assembled(
        make_trajectory("a", 0, *TWO_TURNS), make_trajectory("b", 0, *ONE_TURN), step_wise=True, mini_batch=1
    )
    assert batch.metadata.prompt_end_indices == (2, 3)
    assert batch.metadata.policy_mini_batch_boundaries == ((0, 2), (2, 3))
    assert batch.metadata.critic_mini_batch_boundaries is None
    assert (batch.metadata.global_step, batch.metadata.weight_version) == (4, 2)


def test_the_critic_has_its_own_mini_batches():
    batch = assembled(make_trajectory("a", 0, *ONE_TURN), make_trajectory("b", 0, *ONE_TURN), critic_mini_batch=1)
    assert batch.metadata.policy_mini_batch_boundaries == ((0, 2),)
    assert batch.metadata.critic_mini_batch_boundaries == ((0, 1), (1, 2))


@pytest.mark.parametrize("step_wise", [False, True])
def test_a_failed_trajectory_becomes_one_placeholder_without_loss(step_wise):
    batch = assembled(
        make_trajectory("a", 0, *ONE_TURN),
        failed_trajectory("a", 1, *TWO_TURNS),
        failed_trajectory("b", 0),
        make_trajectory("b", 1, *ONE_TURN),
        step_wise=step_wise,
        n_samples=2,
    )
    assert batch["is_padding"].tolist() == [False, True, True, False]
    assert batch.metadata.uids == ("a", "a", "b", "b")
    assert batch["trajectory_index"].tolist() == [0, 1, 2, 3]
    assert batch.padded("input_ids").tolist()[1] == [0, 0, 0]
    assert batch["loss_mask"].sum() == 2
    assert batch["rewards"].sum() == 4


def test_a_turn_that_does_not_extend_the_one_before_needs_rows_per_turn():
    stripped = make_turn([1, 2, 8], [5])
    trajectory = make_trajectory("a", 0, TWO_TURNS[0], stripped)
    with pytest.raises(BatchError, match=r"trajectory a/0, turn 1: .*generator\.step_wise_trajectories=true"):
        assembled(trajectory)
    assert assembled(trajectory, step_wise=True).num_rows == 2


@pytest.mark.parametrize("prompt", [[1, 2, 3, 7, 9], [1, 8, 3, 4, 9]], ids=["response rewritten", "history rewritten"])
def test_a_turn_whose_prompt_rewrites_what_came_before_does_not_share_its_row(prompt):
    with pytest.raises(BatchError, match=r"turn 1: its prompt does not begin with the tokens of turn 0"):
        assembled(make_trajectory("a", 0, TWO_TURNS[0], make_turn(prompt, [5])))


def test_turns_of_a_tree_have_a_row_each_with_the_tokens_from_their_root_down():
    branches = (*TWO_TURNS, make_turn([1, 2, 3, 4, 8], [6]), make_turn([7], [8]))
    trajectory = make_trajectory("a", 0, *branches)
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 0, None]
    batch = assembled(trajectory, step_wise=True)
    rows = [ids[:length].tolist() for ids, length in zip(batch.padded("input_ids"), batch.lengths)]
    assert rows == [[1, 2, 3, 4], [1, 2, 3, 4, 9, 5], [1, 2, 3, 4, 8, 6], [7, 8]]
    assert batch["loss_mask"].int().tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 1]
    with pytest.raises(BatchError, match=r"turn 2: its prompt does not begin with the tokens of turn 1"):
        assembled(trajectory)


def test_tokens_that_an_agent_loop_put_into_a_response_have_no_loss():
    forced = make_turn([1, 2], [3, 4, 5], reward=1.0, loss_mask=[True, False, True])
    batch = assembled(make_trajectory("a", 0, forced), make_trajectory("b", 0, *ONE_TURN))
    assert batch["loss_mask"].int().tolist() == [0, 0, 1, 0, 1, 0, 0, 1]
    assert batch["response_mask"].int().tolist() == [0, 0, 1, 1, 1, 0, 0, 1]
    assert "response_mask" not in assembled(make_trajectory("b", 0, *ONE_TURN))


def versions_of(*versions, step_wise=False):
    """The column for one trajectory of two turns, `p p r r o s`, sampled by these runs; the learner has version 2."""
    turns = [replace(turn, weight_versions=runs) for turn, runs in zip(TWO_TURNS, versions)]
    batch = assembled(make_trajectory("a", 0, *turns), step_wise=step_wise)
    return batch["weight_version"].tolist() if "weight_version" in batch else None


def test_each_token_knows_the_version_that_sampled_it():
    assert versions_of([(0, 1)], [(0, 2)]) == [2, 2, 1, 1, 2, 2]
    assert versions_of([(0, 0), (1, 1)], [(0, 2)]) == [2, 2, 0, 1, 2, 2]
    assert versions_of([(0, 0), (1, 1)], [(0, 1)], step_wise=True) == [2, 2, 0, 1, *[2, 2, 2, 2, 2, 1]]


def test_there_is_no_such_column_where_the_learners_version_sampled_all():
    assert versions_of([(0, 2)], [(0, 2)]) is None


def test_a_placeholder_and_dummy_rows_have_no_age():
    old = replace(ONE_TURN[0], weight_versions=[(0, 1)])
    batch = assembled(make_trajectory("a", 0, old), failed_trajectory("b", 0)).pad_rows(1)
    assert batch.take([1, 0])["weight_version"].tolist() == [2, 2, 2, 2, 1]
    assert ages_in(batch).found == (1,)
    assert ages_in(batch.take([1])).found == ()


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused(reward):
    with pytest.raises(BatchError, match=r"trajectory a/0, turn 0: the reward is"):
        assembled(make_trajectory("a", 0, make_turn([1], [2], reward=reward)))


def test_rollouts_without_recorded_logprobs_have_no_such_column():
    bare = replace(ONE_TURN[0], response_logprobs=())
    assert "rollout_logprobs" not in assembled(make_trajectory("a", 0, bare))
    with pytest.raises(BatchError, match=r"log-prob"):
        assembled(make_trajectory("a", 0, *ONE_TURN), make_trajectory("b", 0, bare))


def test_a_turn_without_response_is_refused():
    with pytest.raises(BatchError, match=r"trajectory a/0, turn 0: .*at least one prompt and one response token"):
        assembled(make_trajectory("a", 0, make_turn([1], [])))


def test_a_trajectory_without_turns_is_refused():
    with pytest.raises(BatchError, match=r"trajectory a/0 did not fail and yet has no turn"):
        assembled(make_trajectory("a", 0))


def test_trajectories_out_of_order_are_refused():
    trajectories = [make_trajectory("a", 0, *ONE_TURN), make_trajectory("b", 0, *ONE_TURN)]
    rollouts = make_rollouts(*trajectories, n_samples=1)
    swapped = type(rollouts)(prompts=rollouts.prompts[::-1], trajectories=rollouts.trajectories, n_samples_per_prompt=1)
    with pytest.raises(BatchError, match=r"trajectory 0 belongs to 'a', but 'b' was expected"):
        assembler(make_config(prompts=2, mini_batch=1), rows="per_trajectory")(
            swapped,
            step=0,
            weight_version=0,
        )


def test_a_batch_of_another_size_than_configured_is_refused():
    with pytest.raises(BatchError, match=r"1 prompt .*train_batch_size=2"):
        assembled(make_trajectory("a", 0, *ONE_TURN), prompts=2)


def in_pairs(trajectory: Trajectory, *, size: int = 2) -> list[tuple[Turn, ...]]:
    return [trajectory.turns[start : start + size] for start in range(0, len(trajectory.turns), size)]


def last_turn(trajectory: Trajectory) -> list[tuple[Turn, ...]]:
    return [trajectory.turns[-1:]]


def test_custom_rows_hold_turns_in_order():
    three = (*TWO_TURNS, make_turn([1, 2, 3, 4, 9, 5, 8], [7], reward=0.25))
    rollouts = make_rollouts(make_trajectory("a", 0, *three), n_samples=1)
    config = make_config(prompts=1, mini_batch=1)
    rows = {"_target_": "test_assemble:in_pairs", "size": 2}
    batch = assembler(config, rows=rows)(rollouts, step=0, weight_version=0)
    assert batch.lengths.tolist() == [6, 8]
    assert batch["input_ids"].tolist() == [1, 2, 3, 4, 9, 5, 1, 2, 3, 4, 9, 5, 8, 7]
    assert batch["loss_mask"].int().tolist() == [0, 0, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1]
    assert (batch["step_index"].tolist(), batch["is_last_step"].tolist()) == ([0, 1], [False, True])
    assert batch["rewards"].sum() == 1.75


def test_custom_rows_that_lose_a_turn_are_refused():
    rollouts = make_rollouts(make_trajectory("a", 0, *TWO_TURNS), n_samples=1)
    config = make_config(prompts=1, mini_batch=1)
    with pytest.raises(
        BatchError, match=r"trajectory a/0: test_assemble:last_turn must put each of its 2 turns into one"
    ):
        assembler(config, rows="test_assemble:last_turn")(rollouts, step=0, weight_version=0)
