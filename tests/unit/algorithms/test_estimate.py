from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from skyrl_train.algorithms import estimate
from skyrl_train.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs, AdvantageOutput
from skyrl_train.algorithms.estimate import estimate_advantages, groups_of_whole_prompts, token_positions
from skyrl_train.batch import BatchMetadata, TrainingInputBatch, component_column, offsets_of
from skyrl_train.config.algorithm import AlgorithmConfig, OffPolicyConfig
from skyrl_train.errors import BatchError
from tests.support.advantage_oracles import (
    ADVANTAGE_ARGUMENTS,
    advantage_inputs_of,
    estimator_with_arguments,
    random_samples,
)


def batch_of(inputs: AdvantageInputs) -> TrainingInputBatch:
    """The same rows as a training batch, in float64."""
    width = inputs.rewards.shape[1]
    real = inputs.loss_mask | inputs.loss_mask.flip(1).cumsum(1).flip(1).bool()
    lengths = real.sum(1).clamp(min=2)
    kept = torch.arange(width) < lengths[:, None]

    def flat(column: Tensor | None) -> Tensor:
        assert column is not None
        return column[kept]

    names = ("rewards", "loss_mask", "values", "old_logprobs", "ref_logprobs", "sum_pi_squared")
    assert inputs.greedy_rewards is not None
    assert inputs.reward_components is not None
    return TrainingInputBatch(
        token_columns={
            "input_ids": torch.ones(int(lengths.sum()), dtype=torch.int32),
            **{name: flat(getattr(inputs, name)) for name in names},
        },
        row_columns={
            "prompt_index": inputs.prompt_index,
            "trajectory_index": inputs.trajectory_index,
            "step_index": inputs.step_index.int(),
            "is_last_step": inputs.is_last_step,
            "is_padding": inputs.is_padding,
            "greedy_rewards": inputs.greedy_rewards,
            component_column("correct"): inputs.reward_components[:, 0],
            component_column("length"): inputs.reward_components[:, 1],
        },
        row_offsets=offsets_of(lengths),
        metadata=BatchMetadata(uids=tuple(str(int(p)) for p in inputs.prompt_index), global_step=1, weight_version=0),
    )


@pytest.fixture(params=[False, True], ids=["rows", "turns"])
def inputs(request: pytest.FixtureRequest) -> AdvantageInputs:
    return advantage_inputs_of(random_samples(5, binary_rewards=True), step_wise=request.param)


@pytest.mark.parametrize("name", sorted(ADVANTAGE_ESTIMATORS))
def test_a_batch_gets_what_the_estimator_says(name: str, inputs: AdvantageInputs) -> None:
    config = AlgorithmConfig(advantage_estimator=name)
    batch = estimate_advantages(batch_of(inputs), config)
    output = ADVANTAGE_ESTIMATORS[name](inputs, config)
    trained = inputs.loss_mask
    assert batch["returns"].dtype == torch.float64
    assert torch.allclose(batch["returns"][batch["loss_mask"]], output.returns[trained], atol=1e-14)
    if output.whiten_over_batch is None:
        scale = 1.0 if output.scale_over_batch is None else output.scale_over_batch[0] / output.scale_over_batch[1]
        expected = scale * output.advantages[trained]
        assert torch.allclose(batch["advantages"][batch["loss_mask"]], expected, atol=1e-14)
    assert not batch["advantages"][~batch["loss_mask"]].any()


@pytest.mark.parametrize("name", sorted(ADVANTAGE_ESTIMATORS))
def test_the_size_of_the_groups_that_are_padded_does_not_matter(
    name: str, inputs: AdvantageInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AlgorithmConfig(advantage_estimator=name)
    whole = estimate_advantages(batch_of(inputs), config)
    pieces = [
        group.tolist()
        for group in groups_of_whole_prompts(inputs.prompt_index, batch_of(inputs).lengths, max_padded_tokens=1)
    ]
    assert len(pieces) == len(set(inputs.prompt_index.tolist()))
    monkeypatch.setattr(estimate.groups_of_whole_prompts, "__kwdefaults__", {"max_padded_tokens": 1})
    split = estimate_advantages(batch_of(inputs), config)
    assert torch.allclose(whole["advantages"], split["advantages"], atol=1e-14)


def test_reinforce_pp_is_whitened_over_all_trained_tokens(inputs: AdvantageInputs) -> None:
    batch = estimate_advantages(batch_of(inputs), AlgorithmConfig(advantage_estimator="reinforce++"))
    trained = batch["advantages"][batch["loss_mask"]]
    assert float(trained.mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(trained.std()) == pytest.approx(1.0)


def test_reinforce_pp_baseline_keeps_the_0_of_groups_without_difference(inputs: AdvantageInputs) -> None:
    config = AlgorithmConfig(advantage_estimator="reinforce++_baseline")
    batch = estimate_advantages(batch_of(inputs), config)
    raw = ADVANTAGE_ESTIMATORS["reinforce++_baseline"](inputs, config)
    values = raw.advantages[inputs.loss_mask]
    expected = (values - values.mean()) / values.std()
    assert raw.whiten_over_batch is not None
    differs = raw.whiten_over_batch[inputs.loss_mask]
    assert not differs.all()
    assert torch.allclose(batch["advantages"][batch["loss_mask"]], torch.where(differs, expected, 0.0), atol=1e-13)


def test_gpg_scales_by_the_trajectories_of_the_batch_over_those_whose_group_differs(inputs: AdvantageInputs) -> None:
    batch = estimate_advantages(batch_of(inputs), AlgorithmConfig(advantage_estimator="gpg", normalize_by_std=False))
    raw = ADVANTAGE_ESTIMATORS["gpg"](inputs, AlgorithmConfig(normalize_by_std=False))
    assert raw.scale_over_batch is not None
    total, teaching = raw.scale_over_batch
    real = inputs.trajectory_index[~inputs.is_padding]
    taught = {int(t) for t in real if raw.advantages[inputs.trajectory_index == t].any()}
    assert (total, teaching) == (len(real.unique()), len(taught))
    assert 0 < teaching < total
    expected = total / teaching * raw.advantages[inputs.loss_mask]
    assert torch.allclose(batch["advantages"][batch["loss_mask"]], expected, atol=1e-14)


@pytest.mark.parametrize("components", [{}, {"correct": 1.0, "length": 0.01}])
def test_gdpo_is_whitened_and_each_reward_counts_by_its_own_spread(
    inputs: AdvantageInputs, components: dict[str, float]
) -> None:
    config = AlgorithmConfig(advantage_estimator="gdpo", reward_components=components)
    found = estimate_advantages(batch_of(inputs), config)["advantages"]
    larger = replace(config, reward_components={name: 10 * weight for name, weight in components.items()})
    assert found.any()
    assert torch.allclose(estimate_advantages(batch_of(inputs), larger)["advantages"], found, atol=1e-12)


def test_kl_is_taken_from_each_tokens_reward_and_the_column_stays(inputs: AdvantageInputs) -> None:
    batch = batch_of(inputs)
    config = AlgorithmConfig(advantage_estimator="gae", kl_estimator="k1", kl_reward_coef=0.1)
    found = estimate_advantages(batch, config)
    assert inputs.old_logprobs is not None
    assert inputs.ref_logprobs is not None
    penalty = torch.where(inputs.loss_mask, inputs.old_logprobs - inputs.ref_logprobs, 0.0)
    by_hand = ADVANTAGE_ESTIMATORS["gae"](replace(inputs, rewards=inputs.rewards - 0.1 * penalty), config).advantages
    assert torch.equal(found["rewards"], batch["rewards"])
    assert torch.allclose(found["advantages"][batch["loss_mask"]], by_hand[inputs.loss_mask], atol=1e-13)
    other = estimate_advantages(batch, config, kl_reward_coef=0.0)
    assert not torch.allclose(found["advantages"], other["advantages"])


def test_kl_in_the_reward_without_a_reference_is_refused(inputs: AdvantageInputs) -> None:
    batch = batch_of(inputs)
    columns = {name: column for name, column in batch.token_columns.items() if name != "ref_logprobs"}
    with pytest.raises(BatchError, match="needs ref_logprobs"):
        estimate_advantages(replace(batch, token_columns=columns), AlgorithmConfig(kl_reward_coef=0.1))


def test_rollout_logprobs_that_are_not_finite_are_refused_where_the_loss_needs_them(inputs: AdvantageInputs) -> None:
    batch = batch_of(inputs)
    rollout = torch.where(batch["loss_mask"], -1.0, math.nan)
    config = AlgorithmConfig(off_policy=OffPolicyConfig(weight="token"))
    estimate_advantages(batch.with_columns(rollout_logprobs=rollout), config)
    rollout[batch["loss_mask"].nonzero()[0]] = math.nan
    estimate_advantages(batch.with_columns(rollout_logprobs=rollout), AlgorithmConfig())
    with pytest.raises(BatchError, match=r"rollout_logprobs of row 0 \(prompt 0, trajectory 0, step 0\) is nan"):
        estimate_advantages(batch.with_columns(rollout_logprobs=rollout), config)
    with pytest.raises(BatchError, match="needs rollout_logprobs"):
        estimate_advantages(batch, AlgorithmConfig(policy_loss="dppo"))


def lucky_numbers(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutput:
    """A user's own estimator: seven for every trained token."""
    seven = 7.0 * inputs.loss_mask.to(inputs.rewards.dtype)
    return AdvantageOutput(advantages=seven, returns=seven)


def broken_numbers(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutput:
    return AdvantageOutput(advantages=inputs.rewards / 0, returns=inputs.rewards)


def test_an_estimator_of_ones_own_is_found_by_module_and_name(inputs: AdvantageInputs) -> None:
    batch = estimate_advantages(batch_of(inputs), AlgorithmConfig(advantage_estimator=f"{__name__}:lucky_numbers"))
    assert batch["advantages"].tolist() == (7.0 * batch["loss_mask"]).tolist()


def test_an_estimator_of_ones_own_that_returns_nan_is_named(inputs: AdvantageInputs) -> None:
    with pytest.raises(BatchError, match=r"advantages from advantage estimator '.*:broken_numbers' of row \d"):
        estimate_advantages(batch_of(inputs), AlgorithmConfig(advantage_estimator=f"{__name__}:broken_numbers"))


def test_dummy_rows_change_nothing(inputs: AdvantageInputs) -> None:
    batch = batch_of(inputs)
    config = AlgorithmConfig(advantage_estimator="reinforce++_baseline")
    padded = estimate_advantages(batch.pad_rows(3), config)
    assert torch.equal(padded["advantages"][: batch.num_tokens], estimate_advantages(batch, config)["advantages"])
    assert not padded["advantages"][batch.num_tokens :].any()


def test_groups_hold_all_rows_of_a_prompt_and_stay_under_the_cap() -> None:
    prompt_index = torch.tensor([0, 1, 0, 2, 1])
    lengths = torch.tensor([4, 2, 3, 9, 2])
    groups = groups_of_whole_prompts(prompt_index, lengths, max_padded_tokens=16)
    assert [group.tolist() for group in groups] == [[0, 2, 1, 4], [3]]


def test_token_positions_of_rows_in_any_order() -> None:
    assert token_positions(torch.tensor([0, 2, 5, 6]), torch.tensor([2, 0])).tolist() == [5, 0, 1]


def undeclared(inputs: AdvantageInputs, config: AlgorithmConfig, *, name: str) -> AdvantageOutput:
    output: AdvantageOutput = estimator_with_arguments(name)(inputs, config)
    return output


@pytest.mark.parametrize("step_rewards", ["outcome", "turn_return"])
@pytest.mark.parametrize("name", sorted(ADVANTAGE_ESTIMATORS))
def test_tokens_that_our_estimators_do_not_read_are_left_out(name: str, step_rewards: str) -> None:
    """As a custom part that declares nothing, the same function is shown whole rows and every column."""
    for seed in range(4):
        batch = batch_of(advantage_inputs_of(random_samples(seed, binary_rewards=True), step_wise=seed % 2 == 0))
        config = AlgorithmConfig(
            advantage_estimator={"_target_": name, **ADVANTAGE_ARGUMENTS.get(name, {})},
            step_rewards=step_rewards,
            gamma=0.9,
        )  # type: ignore[arg-type]
        whole = replace(config, advantage_estimator={"_target_": "test_estimate:undeclared", "name": name})
        found, expected = estimate_advantages(batch, config), estimate_advantages(batch, whole)
        assert torch.equal(found["advantages"], expected["advantages"])
        assert torch.equal(found["returns"], expected["returns"])


def test_an_error_names_the_position_in_the_whole_row() -> None:
    batch = batch_of(advantage_inputs_of(random_samples(5, binary_rewards=True), step_wise=False))
    mask = torch.zeros_like(batch["loss_mask"])
    mask[batch.row_offsets[1:] - 1] = True
    values = torch.where(mask, torch.nan, batch["values"])
    last = int(batch.lengths[0]) - 1
    with pytest.raises(BatchError, match=rf"values of row 0 .* is nan at position {last}"):
        estimate_advantages(
            batch.with_columns(loss_mask=mask, values=values), AlgorithmConfig(advantage_estimator="gae")
        )
