from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from skyrl_train.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs, gae, grpo, maxrl, opo, rloo
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.errors import BatchError
from tests.support.advantage_oracles import (
    ADVANTAGE_ORACLES,
    Sample,
    Step,
    advantage_error,
    advantage_inputs_of,
    by_trajectory,
    estimator_with_arguments,
)

GROUP_ESTIMATORS = ("grpo", "rloo", "reinforce++_baseline", "maxrl", "opo")
OUTCOME = AlgorithmConfig(gamma=0.9)
TURN_RETURN = AlgorithmConfig(gamma=0.9, step_rewards="turn_return")


def sample(*rewards: float, prompt: int = 0, actions: int = 2, failed: bool = False) -> Sample:
    """A turn of `actions` actions and one context token for each reward."""
    return Sample(prompt=prompt, steps=[step(reward, *[0.0] * actions) for reward in rewards], failed=failed)


def step(reward: float, *values: float, context: int = 1) -> Step:
    zeros = [0.0] * len(values)
    return Step(context=context, values=list(values), reward=reward, old_logprobs=zeros, ref_logprobs=zeros)


def advantages(
    name: str, samples: list[Sample], config: AlgorithmConfig, *, step_wise: bool = False
) -> list[list[float]]:
    inputs = advantage_inputs_of(samples, step_wise=step_wise)
    return by_trajectory(estimator_with_arguments(name)(inputs, config).advantages, inputs, len(samples))


def test_every_registered_estimator_has_an_oracle() -> None:
    assert set(ADVANTAGE_ORACLES) == set(ADVANTAGE_ESTIMATORS)


@pytest.mark.parametrize("config", [OUTCOME, TURN_RETURN, replace(OUTCOME, normalize_by_std=False)])
@pytest.mark.parametrize("name", sorted(ADVANTAGE_ESTIMATORS))
def test_estimator_equals_its_formula_whether_trajectories_are_split_into_turns_or_not(
    name: str, config: AlgorithmConfig
) -> None:
    assert max(advantage_error(name, seed, config) for seed in range(12)) < 1e-13


def test_grpo_divides_by_the_sample_deviation() -> None:
    assert advantages("grpo", [sample(1.0), sample(0.0), sample(0.0)], AlgorithmConfig()) == [
        pytest.approx([2 / 3**0.5] * 2),
        pytest.approx([-1 / 3**0.5] * 2),
        pytest.approx([-1 / 3**0.5] * 2),
    ]


def test_without_the_deviation_grpo_is_reward_minus_mean() -> None:
    found = advantages("grpo", [sample(1.0), sample(0.0)], AlgorithmConfig(normalize_by_std=False))
    assert found == [[0.5, 0.5], [-0.5, -0.5]]


def test_rloo_takes_the_mean_of_the_others() -> None:
    assert advantages("rloo", [sample(3.0), sample(1.0), sample(2.0)], AlgorithmConfig()) == [
        [1.5, 1.5],
        [-1.5, -1.5],
        [0.0, 0.0],
    ]


def test_maxrl_weighs_the_one_success_of_four_by_three() -> None:
    samples = [sample(1.0), sample(0.0), sample(0.0), sample(0.0)]
    assert advantages("maxrl", samples, AlgorithmConfig()) == [[3.0, 3.0]] + 3 * [[-1.0, -1.0]]


def test_maxrl_refuses_negative_scores() -> None:
    with pytest.raises(BatchError, match="at least 0; one is -1"):
        advantages("maxrl", [sample(-1.0), sample(1.0)], AlgorithmConfig())


def test_opo_weighs_the_baseline_by_length() -> None:
    samples = [sample(1.0, actions=1), sample(0.0, actions=3)]
    assert advantages("opo", samples, AlgorithmConfig()) == [[0.75], [-0.25] * 3]


def test_gae_of_two_tokens_by_hand() -> None:
    inputs = advantage_inputs_of([Sample(prompt=0, steps=[step(1.0, 0.5, 0.25)])], step_wise=False)
    output = gae(inputs, AlgorithmConfig(gamma=0.5), gae_lambda=0.5)
    # delta_1 = 1 - 0.25 = 0.75; delta_0 = 0.5 * 0.25 - 0.5 = -0.375; A_0 = -0.375 + 0.25 * 0.75 = -0.1875
    assert output.advantages.tolist() == [[0.0, -0.1875, 0.75]]
    assert output.returns.tolist() == [[0.0, 0.3125, 1.0]]


def test_gae_skips_observation_tokens_and_continues_in_the_next_turn() -> None:
    config = AlgorithmConfig(gamma=0.9)
    turns = [step(0.5, 0.1, 0.2, context=2), step(1.0, 0.3, context=3)]
    unbroken = [step(0.0, 0.1), step(0.5, 0.2, context=0), step(1.0, 0.3, context=0)]
    apart = advantages("gae", [Sample(prompt=0, steps=turns)], config, step_wise=True)
    assert apart == [pytest.approx(advantages("gae", [Sample(prompt=0, steps=unbroken)], config)[0], abs=1e-15)]


@pytest.mark.parametrize("step_wise", [False, True])
@pytest.mark.parametrize("config", [OUTCOME, TURN_RETURN])
@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
class TestGroupsWithoutDifference:
    def test_a_group_of_one_gives_exactly_0(self, name: str, config: AlgorithmConfig, step_wise: bool) -> None:
        assert advantages(name, [sample(0.7, 0.1)], config, step_wise=step_wise) == [[0.0] * 4]

    def test_a_group_of_equal_rewards_gives_exactly_0(
        self, name: str, config: AlgorithmConfig, step_wise: bool
    ) -> None:
        assert advantages(name, [sample(0.1, 0.2), sample(0.1, 0.2)], config, step_wise=step_wise) == [[0.0] * 4] * 2

    def test_failed_trajectories_leave_the_group(self, name: str, config: AlgorithmConfig, step_wise: bool) -> None:
        found = advantages(name, [sample(1.0), sample(0.0, failed=True)], config, step_wise=step_wise)
        assert found == [[0.0, 0.0], []]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rewards_that_differ_by_rounding_alone_are_equal(dtype: torch.dtype) -> None:
    inputs = advantage_inputs_of([sample(0.1, 0.2), sample(0.3)], step_wise=False, dtype=dtype)
    assert not grpo(inputs, AlgorithmConfig()).advantages.any()


def test_rewards_that_differ_by_little_are_not_equal() -> None:
    inputs = advantage_inputs_of([sample(1.0), sample(1.00001)], step_wise=False, dtype=torch.float32)
    assert grpo(inputs, AlgorithmConfig()).advantages.abs().max() == pytest.approx(0.5**0.5)


def test_turn_return_compares_the_same_turn_of_different_trajectories() -> None:
    samples = [sample(1.0, 2.0, actions=1), sample(0.0, 0.0, actions=1), sample(5.0, actions=1)]
    config = AlgorithmConfig(normalize_by_std=False, step_rewards="turn_return", gamma=0.5)
    # First turns: 1 + 0.5 * 2 = 2, 0 and 5; second turns: 2 and 0.
    assert advantages("grpo", samples, config, step_wise=True) == [
        pytest.approx([2 - 7 / 3, 1.0]),
        pytest.approx([-7 / 3, -1.0]),
        pytest.approx([5 - 7 / 3]),
    ]


def test_outcome_adds_up_the_rewards_of_all_turns() -> None:
    config = AlgorithmConfig(normalize_by_std=False)
    found = advantages("grpo", [sample(1.0, 0.0, 2.0, actions=1), sample(1.0, actions=1)], config, step_wise=True)
    assert found == [[1.0] * 3, [-1.0]]


@pytest.mark.parametrize("name", ["grpo", "gae", "reinforce++"])
@pytest.mark.parametrize("config", [OUTCOME, TURN_RETURN])
def test_a_reward_on_a_token_that_is_not_trained_counts_for_what_came_before(
    name: str, config: AlgorithmConfig
) -> None:
    def inputs(reward_position: int) -> AdvantageInputs:
        base = advantage_inputs_of([sample(0.0, 0.0), sample(0.0, 0.5)], step_wise=False)
        rewards = base.rewards.clone()
        rewards[0, reward_position] = 1.0
        return replace(base, rewards=rewards)

    # Tokens: context 0, actions 1 and 2, context 3, actions 4 and 5.
    on_action, on_observation = (ADVANTAGE_ESTIMATORS[name](inputs(position), config) for position in (2, 3))
    assert torch.equal(on_action.advantages, on_observation.advantages)
    assert on_action.advantages.any()


def test_a_trajectory_without_trained_tokens_still_counts_in_its_group() -> None:
    inputs = advantage_inputs_of([sample(1.0), sample(0.0)], step_wise=False)
    mask = inputs.loss_mask.clone()
    mask[1] = False
    found = grpo(replace(inputs, loss_mask=mask), AlgorithmConfig(normalize_by_std=False)).advantages
    assert found.tolist() == [[0.0, 0.5, 0.5], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("name", sorted(ADVANTAGE_ESTIMATORS))
def test_a_batch_of_padding_rows_gives_zeros(name: str) -> None:
    inputs = advantage_inputs_of([sample(0.0, failed=True)] * 2, step_wise=True)
    assert not ADVANTAGE_ESTIMATORS[name](inputs, AlgorithmConfig()).advantages.any()


@pytest.mark.parametrize("name", sorted(ADVANTAGE_ESTIMATORS))
def test_the_order_of_rows_does_not_matter(name: str) -> None:
    samples = [sample(1.0, 0.5), sample(0.0, 0.25, 0.5), sample(0.5, prompt=1), sample(0.0, prompt=1)]
    inputs = advantage_inputs_of(samples, step_wise=True)
    order = torch.tensor([4, 0, 6, 2, 5, 1, 3])
    columns = {key: column[order] for key, column in vars(inputs).items() if column is not None}
    straight = ADVANTAGE_ESTIMATORS[name](inputs, OUTCOME).advantages[order]
    assert torch.allclose(
        straight, ADVANTAGE_ESTIMATORS[name](AdvantageInputs(**columns), OUTCOME).advantages, atol=1e-15
    )


@pytest.mark.parametrize("name", sorted(ADVANTAGE_ESTIMATORS))
def test_inputs_are_left_as_they_are_and_the_dtype_is_kept(name: str) -> None:
    inputs = advantage_inputs_of([sample(1.0), sample(0.0)], step_wise=False, dtype=torch.float32)
    before = {key: column.clone() for key, column in vars(inputs).items() if column is not None}
    output = ADVANTAGE_ESTIMATORS[name](inputs, AlgorithmConfig())
    assert output.advantages.dtype == output.returns.dtype == torch.float32
    assert all(torch.equal(column, getattr(inputs, key)) for key, column in before.items())


def test_returns_of_group_estimators_are_the_scores() -> None:
    inputs = advantage_inputs_of([sample(1.0, 2.0, actions=1), sample(0.0, actions=1)], step_wise=True)
    for estimator in (grpo, rloo, opo, maxrl):
        returns = estimator(inputs, AlgorithmConfig()).returns
        assert by_trajectory(returns, inputs, 2) == [[3.0, 3.0], [0.0]]
