from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl_train.algorithms.losses.policy import POLICY_LOSSES, PolicyLossInputs, PolicyLossOutput, policy_loss
from skyrl_train.config.algorithm import AlgorithmConfig, OffPolicyConfig
from skyrl_train.errors import BatchError, ConfigError
from skyrl_train.telemetry import Max, Min, merge_metrics
from tests.support.loss_oracles import (
    LOSS_CASES,
    LOSS_ORACLES,
    LossCase,
    columns_of,
    loss_error,
    loss_with,
    random_loss_inputs,
)

ALL = sorted(POLICY_LOSSES)


def one_token(ratio: float, advantage: float, old: float = -1.0) -> PolicyLossInputs:
    def column(value: float) -> Tensor:
        return torch.tensor([[value]], dtype=torch.float64)

    return PolicyLossInputs(
        logprobs=column(old + math.log(ratio)).requires_grad_(),
        old_logprobs=column(old),
        rollout_logprobs=column(old),
        advantages=column(advantage),
        loss_mask=torch.tensor([[True]]),
    )


def loss_of(name: str, inputs: PolicyLossInputs, config: AlgorithmConfig | None = None) -> float:
    return float(POLICY_LOSSES[name](inputs, config or AlgorithmConfig()).token_losses.detach().sum())


def gradient_on_policy(name: str, case: LossCase, dtype: torch.dtype, noise: float, seed: int | None) -> Tensor:
    """The gradient where old and rollout log-probabilities are the policy's but for random noise (None: exactly).

    One turn in three consists of tokens that the policy is certain of, whose log-probabilities are all 0 but for noise.
    """
    drawn = random_loss_inputs(9, num_rows=6)
    generator = torch.Generator().manual_seed(seed or 0)
    certain = torch.arange(6).unsqueeze(1) % 3 == 1

    def near(column: Tensor) -> Tensor:
        size = 0.0 if seed is None else noise
        moved = column.detach() + size * torch.randn(column.shape, generator=generator, dtype=torch.float64)
        return moved.clamp(max=0).to(dtype)

    scored = torch.where(certain, torch.zeros_like(drawn.logprobs), drawn.old_logprobs)
    inputs = PolicyLossInputs(
        logprobs=near(scored).requires_grad_(),
        old_logprobs=near(scored),
        rollout_logprobs=near(scored),
        advantages=drawn.advantages.to(dtype),
        loss_mask=drawn.loss_mask,
    )
    config, arguments = case
    (gradient,) = torch.autograd.grad(loss_with(name, arguments)(inputs, config).token_losses.sum(), inputs.logprobs)
    return gradient


def test_the_penalty_of_kl_cov_is_flat_within_the_rounding_of_the_type_that_computed() -> None:
    loss = loss_with("kl_cov", {"kl_cov": {"share": 1.0, "coef": 1.0}})
    for ratio, dtype, expected in ((1.01, None, 1.0), (1.01, torch.bfloat16, 0.0), (1.2, torch.bfloat16, 1.0)):
        inputs = replace(one_token(ratio, 0.0), compute_dtype=dtype)
        losses = loss(inputs, AlgorithmConfig()).token_losses
        (slope,) = torch.autograd.grad(losses.sum(), inputs.logprobs)
        assert float(slope) == expected
        assert float(losses.detach()) == pytest.approx(math.log(ratio)), "the value is exact everywhere"


def test_cispo_tells_the_range_of_its_ratio_and_how_much_is_clamped_on_either_side() -> None:
    ratios = torch.tensor([[0.5, 1.0, 1.1, 3.0, 4.0]], dtype=torch.float64)
    inputs = PolicyLossInputs(
        logprobs=ratios.log(),
        old_logprobs=torch.zeros_like(ratios),
        advantages=torch.ones_like(ratios),
        loss_mask=torch.tensor([[True, True, True, True, False]]),
    )
    metrics = POLICY_LOSSES["cispo"](inputs, AlgorithmConfig()).metrics
    values = {name.removeprefix("policy/"): metric.value for name, metric in metrics.items()}
    assert values == pytest.approx(
        {
            "ratio": 1.4,
            "approx_kl": (5.6 - 4 - math.log(0.5 * 1.1 * 3)) / 4,
            "ratio_min": 0.5,
            "ratio_max": 3.0,
            "clip_fraction": 0.5,
            "ratio_clamped_low_fraction": 0.25,
            "ratio_clamped_high_fraction": 0.25,
        }
    )


def test_every_registered_loss_has_an_oracle() -> None:
    assert set(LOSS_ORACLES) == set(POLICY_LOSSES)


@pytest.mark.parametrize("case", LOSS_CASES)
@pytest.mark.parametrize("name", ALL)
def test_loss_and_gradient_equal_the_formula(name: str, case: LossCase) -> None:
    assert max(loss_error(name, seed, case) for seed in range(10)) < 1e-13


def test_regular_clips_a_good_token_above_and_a_bad_one_below() -> None:
    assert loss_of("regular", one_token(1.5, 2.0)) == pytest.approx(-2.4)
    assert loss_of("regular", one_token(0.5, -2.0)) == pytest.approx(1.6)
    assert loss_of("regular", one_token(0.5, 2.0)) == pytest.approx(-1.0)


def test_clip_higher_moves_only_the_upper_bound() -> None:
    config = AlgorithmConfig(eps_clip_high=0.28)
    assert loss_of("regular", one_token(1.5, 1.0), config) == pytest.approx(-1.28)
    assert loss_of("regular", one_token(0.5, -1.0), config) == pytest.approx(0.8)


def test_dual_clip_bounds_the_loss_of_a_bad_token() -> None:
    assert loss_of("dual_clip", one_token(50.0, -1.0)) == pytest.approx(3.0)
    assert loss_of("regular", one_token(50.0, -1.0)) == pytest.approx(50.0)


def test_cispo_keeps_a_gradient_where_ppo_has_none() -> None:
    for name, expected in (("cispo", -1.2), ("regular", 0.0)):
        inputs = one_token(1.5, 1.0)
        POLICY_LOSSES[name](inputs, AlgorithmConfig()).token_losses.sum().backward()
        assert inputs.logprobs.grad is not None
        assert float(inputs.logprobs.grad) == pytest.approx(expected)


def test_sapo_has_the_policy_gradient_at_ratio_one() -> None:
    inputs = one_token(1.0, 2.0)
    POLICY_LOSSES["sapo"](inputs, AlgorithmConfig()).token_losses.sum().backward()
    assert inputs.logprobs.grad is not None
    assert float(inputs.logprobs.grad) == pytest.approx(-2.0)


def test_gspo_gives_all_tokens_of_a_turn_the_same_ratio() -> None:
    inputs = PolicyLossInputs(
        logprobs=torch.tensor([[-1.0, -2.0, -9.0]], dtype=torch.float64),
        old_logprobs=torch.tensor([[-1.2, -2.4, 0.0]], dtype=torch.float64),
        advantages=torch.full((1, 3), 1.0, dtype=torch.float64),
        loss_mask=torch.tensor([[True, True, False]]),
    )
    config = AlgorithmConfig(eps_clip_high=1.0)
    expected = -math.exp(0.3)
    assert POLICY_LOSSES["gspo"](inputs, config).token_losses[0].tolist() == pytest.approx([expected, expected, 0.0])


def test_gmpo_bounds_each_token_before_the_mean_and_only_on_the_side_its_advantage_would_push_it() -> None:
    inputs = PolicyLossInputs(
        logprobs=torch.tensor([[-1.0, -3.0]], dtype=torch.float64, requires_grad=True),
        old_logprobs=torch.tensor([[-2.0, -2.0]], dtype=torch.float64),
        advantages=torch.ones((1, 2), dtype=torch.float64),
        loss_mask=torch.ones((1, 2), dtype=torch.bool),
    )
    losses = POLICY_LOSSES["gmpo"](inputs, AlgorithmConfig(eps_clip_low=0.4, eps_clip_high=0.4)).token_losses
    (gradient,) = torch.autograd.grad(losses.mean(), inputs.logprobs)
    ratio = math.exp(
        (0.4 - 1.0) / 2
    )  # log-ratios 1 and -1: the first is bounded, the second, which A > 0 pulls up, is not
    assert losses[0].tolist() == pytest.approx([-ratio, -ratio])
    assert gradient[0].tolist() == pytest.approx([0.0, -ratio / 2])


def test_vespo_weighs_a_sequence_of_ratio_one_by_one_and_fades_to_both_sides() -> None:
    for ratio, phi in ((1.0, 1.0), (3.0, 9 * math.exp(-6)), (0.3, 0.09 * math.exp(2.1))):
        assert loss_of("vespo", one_token(ratio, 1.0)) == pytest.approx(phi * (1 - math.log(ratio)))


def test_dppo_stops_a_step_out_of_the_region_but_not_one_back_into_it() -> None:
    config = AlgorithmConfig(eps_clip_low=0.1, eps_clip_high=0.1)
    half = math.log(0.5)
    assert loss_of("dppo", one_token(1.5, 1.0, half), config) == 0.0
    assert loss_of("dppo", one_token(1.5, -1.0, half), config) != 0.0
    assert loss_of("dppo", one_token(100.0, 1.0, math.log(1e-4)), config) != 0.0


def test_rollout_is_leaves_tokens_outside_the_range_out_on_both_sides() -> None:
    assert loss_of("rollout_is", one_token(1.3, -1.0)) == 0.0
    assert loss_of("rollout_is", one_token(0.7, 1.0)) == 0.0
    assert loss_of("rollout_is", one_token(1.1, 1.0)) == pytest.approx(-1.1 * (-1 + math.log(1.1)))


@pytest.mark.parametrize("name", ALL)
class TestEveryLoss:
    def test_junk_outside_the_mask_reaches_neither_loss_nor_gradient(self, name: str) -> None:
        inputs = random_loss_inputs(3)
        losses = POLICY_LOSSES[name](inputs, AlgorithmConfig()).token_losses
        (gradient,) = torch.autograd.grad(losses.sum(), inputs.logprobs)
        assert not losses[~inputs.loss_mask].any()
        assert not gradient[~inputs.loss_mask].any()
        assert torch.isfinite(losses).all()
        assert torch.isfinite(gradient).all()

    def test_grouping_rows_into_micro_batches_changes_nothing(self, name: str) -> None:
        config, arguments = LOSS_CASES[2]
        loss = loss_with(name, arguments)
        inputs = random_loss_inputs(4, num_rows=6)
        whole = loss(inputs, config)
        (expected,) = torch.autograd.grad(whole.token_losses.sum(), inputs.logprobs)
        for sizes in ([1] * 6, [2, 4], [5, 1]):
            outputs, start = [], 0
            for size in sizes:
                columns = {
                    key: None if column is None else column[start : start + size]
                    for key, column in vars(inputs).items()
                }
                outputs.append(loss(PolicyLossInputs(**columns), config))
                start += size
            joined = torch.cat([output.token_losses for output in outputs])
            (gradient,) = torch.autograd.grad(joined.sum(), inputs.logprobs)
            assert torch.allclose(joined, whole.token_losses, rtol=0, atol=1e-15)
            assert torch.allclose(gradient, expected, rtol=0, atol=1e-15)
            merged = merge_metrics(output.metrics for output in outputs)
            assert {key: metric.value for key, metric in merged.items()} == pytest.approx(
                {key: metric.value for key, metric in whole.metrics.items()}
            )

    def test_a_wider_padding_changes_nothing(self, name: str) -> None:
        inputs = random_loss_inputs(5)
        wide = PolicyLossInputs(
            **{key: torch.nn.functional.pad(column, (0, 4)) for key, column in columns_of(inputs).items()}  # type: ignore[arg-type]
        )
        width = inputs.loss_mask.shape[1]
        config, arguments = LOSS_CASES[2]
        narrow_losses, wide_losses = (loss_with(name, arguments)(one, config).token_losses for one in (inputs, wide))
        assert torch.allclose(wide_losses[:, :width], narrow_losses, rtol=0, atol=1e-15)

    def test_works_in_the_dtype_of_its_inputs_and_leaves_them_alone(self, name: str) -> None:
        inputs = random_loss_inputs(6)
        single = PolicyLossInputs(
            **{k: c if c.dtype == torch.bool else c.detach().float() for k, c in columns_of(inputs).items()}  # type: ignore[arg-type]
        )
        before = {key: column.clone() for key, column in columns_of(single).items()}
        assert POLICY_LOSSES[name](single, AlgorithmConfig()).token_losses.dtype == torch.float32
        assert all(torch.equal(before[k].nan_to_num(), column.nan_to_num()) for k, column in columns_of(single).items())

    def test_a_batch_without_trained_tokens_gives_zeros(self, name: str) -> None:
        inputs = random_loss_inputs(7)
        output = POLICY_LOSSES[name](replace(inputs, loss_mask=torch.zeros_like(inputs.loss_mask)), AlgorithmConfig())
        assert not output.token_losses.any()

    def test_an_absurd_ratio_gives_a_finite_loss_and_gradient(self, name: str) -> None:
        inputs = one_token(1.0, -1.0)
        inputs = replace(inputs, old_logprobs=inputs.old_logprobs - 2000, rollout_logprobs=inputs.old_logprobs - 2000)
        losses = POLICY_LOSSES[name](inputs, AlgorithmConfig()).token_losses
        (gradient,) = torch.autograd.grad(losses.sum(), inputs.logprobs)
        assert torch.isfinite(losses).all()
        assert torch.isfinite(gradient).all()

    def test_metrics_are_means_over_trained_tokens_or_extremes_of_them(self, name: str) -> None:
        inputs = random_loss_inputs(8)
        for metric in POLICY_LOSSES[name](inputs, AlgorithmConfig()).metrics.values():
            assert isinstance(metric, Min | Max) or getattr(metric, "weight", None) == float(inputs.loss_mask.sum())

    @pytest.mark.parametrize(
        "case",
        [*LOSS_CASES, (AlgorithmConfig(eps_clip_low=0.0, eps_clip_high=0.0), {"clip_cov": {"low": 0.0}})],
    )
    @pytest.mark.parametrize(
        ("dtype", "noise", "tolerance"), [(torch.float64, 1e-14, 1e-11), (torch.float32, 2e-6, 1e-4)]
    )
    def test_rounding_between_scoring_and_training_decides_nothing(
        self, name: str, case: LossCase, dtype: torch.dtype, noise: float, tolerance: float
    ) -> None:
        """Before the first optimizer step the policy's log-probabilities are the old ones but for rounding."""
        expected, *found = (gradient_on_policy(name, case, dtype, noise, seed) for seed in (None, 0, 1, 2))
        assert float(expected.norm()) > 0
        for gradient in found:
            assert float((gradient - expected).norm() / expected.norm()) < tolerance


def double_loss(inputs: PolicyLossInputs, config: AlgorithmConfig) -> PolicyLossOutput:
    """A user's own loss."""
    return PolicyLossOutput(token_losses=2 * POLICY_LOSSES["cross_entropy"](inputs, config).token_losses)


def flat_loss(inputs: PolicyLossInputs, config: AlgorithmConfig) -> PolicyLossOutput:
    return PolicyLossOutput(token_losses=inputs.logprobs.sum())


def bare_loss(inputs: PolicyLossInputs, config: AlgorithmConfig) -> Any:
    return -inputs.logprobs


class TestConfiguredLoss:
    def test_a_loss_of_ones_own_is_found_by_module_and_name(self) -> None:
        inputs = random_loss_inputs(0)
        own = policy_loss(inputs, AlgorithmConfig(policy_loss=f"{__name__}:double_loss")).token_losses
        assert torch.equal(own, 2 * policy_loss(inputs, AlgorithmConfig(policy_loss="cross_entropy")).token_losses)

    def test_a_loss_of_ones_own_with_another_shape_is_refused(self) -> None:
        with pytest.raises(BatchError, match=r"token_losses from policy loss '.*flat_loss' has shape \[\]"):
            policy_loss(random_loss_inputs(0), AlgorithmConfig(policy_loss=f"{__name__}:flat_loss"))

    def test_a_loss_of_ones_own_that_returns_a_tensor_is_told_what_to_return(self) -> None:
        with pytest.raises(
            BatchError, match=r"bare_loss' must return PolicyLossOutput\(token_losses, .*returned Tensor"
        ):
            policy_loss(random_loss_inputs(0), AlgorithmConfig(policy_loss=f"{__name__}:bare_loss"))

    def test_an_unknown_name_is_refused_with_the_nearest_one(self) -> None:
        with pytest.raises(ConfigError, match=r"(?i)did you mean 'regular'"):
            policy_loss(random_loss_inputs(0), AlgorithmConfig(policy_loss="regulr"))

    def test_off_policy_weights_multiply_the_token_losses(self) -> None:
        inputs = replace(
            one_token(1.0, 1.0), rollout_logprobs=torch.tensor([[-1.0 - math.log(1.5)]], dtype=torch.float64)
        )
        config = AlgorithmConfig(off_policy=OffPolicyConfig(weight="token", weight_high=1.2))
        output = policy_loss(inputs, config)
        assert float(output.token_losses.detach()) == pytest.approx(-1.2)
        assert output.metrics["off_policy/ratio"].value == pytest.approx(1.5)

    def test_a_correction_without_rollout_logprobs_is_refused(self) -> None:
        config = AlgorithmConfig(off_policy=OffPolicyConfig(weight="token"))
        with pytest.raises(BatchError, match="needs rollout_logprobs"):
            policy_loss(replace(random_loss_inputs(0), rollout_logprobs=None), config)
