from __future__ import annotations

import json
import math

import pytest
import torch

from skyrl_train.algorithms.controllers import KLControllerState, initial_state, mean_token_kl, next_state
from skyrl_train.algorithms.losses.kl import KL_ESTIMATORS, token_kl, unbiased_kl
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.errors import BatchError, CheckpointError, NonFiniteError


def test_the_unbiased_kl_is_weighed_by_the_ratio_and_has_the_gradient_of_both() -> None:
    draw = torch.Generator().manual_seed(0)
    logprobs, old, ref = -torch.rand(3, 50, generator=draw, dtype=torch.float64)
    logprobs.requires_grad_()
    mask = torch.arange(50) % 7 > 0
    old = torch.where(mask, old, torch.nan)
    found = unbiased_kl(token_kl("k3", logprobs, ref, mask), logprobs, old, mask)
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    for place, (new, before, other) in enumerate(zip(logprobs.tolist(), old.tolist(), ref.tolist())):
        kl = math.exp(other - new) - 1 - (other - new)
        ratio = math.exp(new - before) if mask[place] else 0.0
        assert float(found[place].detach()) == pytest.approx(ratio * kl, abs=1e-13)
        assert float(gradient[place]) == pytest.approx(ratio * (kl + 1 - math.exp(other - new)), abs=1e-13)


def test_on_the_old_policys_samples_the_unbiased_gradient_is_that_of_the_kl_in_expectation() -> None:
    logits = torch.randn(6, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    other = torch.randn(6, generator=torch.Generator().manual_seed(2), dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    old, everywhere = logp.detach(), torch.ones(6, dtype=torch.bool)
    estimate = (old.exp() * unbiased_kl(token_kl("k3", logp, other, everywhere), logp, old, everywhere)).sum()
    exact = (logp.exp() * (logp - other)).sum()
    (found,), (expected,) = (torch.autograd.grad(value, logits, retain_graph=True) for value in (estimate, exact))
    assert float(estimate.detach()) == pytest.approx(float(exact.detach()), abs=1e-14)
    assert torch.allclose(found, expected, atol=1e-14)


def test_estimators_by_hand() -> None:
    logprob, ref = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([-1.5], dtype=torch.float64)
    found = {name: float(estimator(logprob, ref)) for name, estimator in KL_ESTIMATORS.items()}
    assert found == pytest.approx({"k1": 0.5, "k2": 0.125, "k3": math.exp(-0.5) - 0.5, "abs": 0.5})


def test_k1_and_k3_average_to_the_kl_of_the_distributions() -> None:
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    exact = float((policy * (policy / reference).log()).sum())
    for name in ("k1", "k3"):
        expected = float((policy * KL_ESTIMATORS[name](policy.log(), reference.log())).sum())
        assert expected == pytest.approx(exact)


def test_the_gradient_of_k2_is_that_of_the_kl() -> None:
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log()
    logprobs = logits.log_softmax(0)
    sampled = (logprobs.detach().exp() * KL_ESTIMATORS["k2"](logprobs, reference)).sum()
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    (found,) = torch.autograd.grad(sampled, logits, retain_graph=True)
    (expected,) = torch.autograd.grad(exact, logits)
    assert torch.allclose(found, expected)


def test_k3_keeps_its_digits_near_0() -> None:
    near = torch.tensor([-1.0 + 1e-9], dtype=torch.float64)
    assert float(KL_ESTIMATORS["k3"](near, torch.tensor([-1.0], dtype=torch.float64))) == pytest.approx(5e-19, rel=0.3)


@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS))
def test_junk_outside_the_mask_reaches_neither_value_nor_gradient(name: str) -> None:
    logprobs = torch.tensor([[-1.0, math.nan, -math.inf]], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([[-1.5, -1.0, math.nan]], dtype=torch.float64)
    values = token_kl(name, logprobs, ref, torch.tensor([[True, False, False]]))
    values.sum().backward()
    assert values[0, 1:].tolist() == [0.0, 0.0]
    assert logprobs.grad is not None
    assert logprobs.grad[0, 1:].tolist() == [0.0, 0.0]
    assert float(logprobs.grad[0, 0]) != 0.0


@pytest.mark.parametrize(("dtype", "noise", "tolerance"), [(torch.float64, 1e-14, 1e-13), (torch.float32, 2e-6, 5e-6)])
@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS))
def test_a_reference_that_is_the_policy_but_for_rounding_gives_one_gradient(
    name: str, dtype: torch.dtype, noise: float, tolerance: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    scored = -torch.rand(1, 50, generator=generator, dtype=torch.float64).to(dtype)
    found = []
    for size in (0.0, noise, noise):
        moved = scored + (size * torch.randn(1, 50, generator=generator, dtype=torch.float64)).to(dtype)
        logprobs = scored.clone().requires_grad_()
        token_kl(name, logprobs, moved, torch.ones(1, 50, dtype=torch.bool)).sum().backward()
        assert logprobs.grad is not None
        found.append(logprobs.grad)
    for gradient in found[1:]:
        torch.testing.assert_close(gradient, found[0], rtol=0, atol=5 * tolerance)


def test_the_distance_is_flat_within_the_rounding_of_the_type_that_computed_and_its_value_is_exact() -> None:
    for difference, dtype, expected in ((-0.01, None, -1.0), (-0.01, torch.bfloat16, 0.0), (0.2, torch.bfloat16, 1.0)):
        logprobs = torch.tensor([[difference - 1.0]], dtype=torch.float64, requires_grad=True)
        value = token_kl("abs", logprobs, torch.tensor([[-1.0]]), torch.tensor([[True]]), compute_dtype=dtype)
        value.sum().backward()
        assert logprobs.grad is not None
        assert float(logprobs.grad) == expected
        assert float(value.detach()) == pytest.approx(abs(difference))


def test_shapes_that_differ_are_named() -> None:
    with pytest.raises(BatchError, match=r"ref_logprobs has shape \[1, 3\]; expected \[1, 2\]"):
        token_kl("k3", torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 2, dtype=torch.bool))


class TestController:
    ADAPTIVE = AlgorithmConfig(kl_controller="adaptive", kl_reward_coef=0.5, kl_target=0.1, kl_horizon=1000)

    def test_fixed_never_moves(self) -> None:
        config = AlgorithmConfig(kl_reward_coef=0.5)
        assert next_state(initial_state(config), mean_kl=9.0, num_trajectories=10, config=config).coef == 0.5

    def test_adaptive_follows_the_error_and_bounds_it(self) -> None:
        def after(mean_kl: float) -> float:
            return next_state(
                initial_state(self.ADAPTIVE), mean_kl=mean_kl, num_trajectories=100, config=self.ADAPTIVE
            ).coef

        assert after(0.1) == 0.5
        assert after(0.11) == pytest.approx(0.5 * 1.01)
        assert after(5.0) == pytest.approx(0.5 * 1.02)
        assert after(-5.0) == pytest.approx(0.5 * 0.98)

    def test_a_weight_never_turns_negative(self) -> None:
        state = next_state(initial_state(self.ADAPTIVE), mean_kl=0.0, num_trajectories=100_000, config=self.ADAPTIVE)
        assert state.coef == 0.0

    def test_a_nan_does_not_become_a_weight(self) -> None:
        with pytest.raises(NonFiniteError, match="mean KL of the batch is nan"):
            next_state(initial_state(self.ADAPTIVE), mean_kl=math.nan, num_trajectories=1, config=self.ADAPTIVE)

    def test_state_survives_a_checkpoint_exactly(self) -> None:
        state = KLControllerState(coef=0.1 + 0.2)
        assert KLControllerState.from_json(json.loads(json.dumps(state.to_json()))) == state

    @pytest.mark.parametrize("content", [{}, {"coef": math.nan}, {"coef": -1.0}])
    def test_a_damaged_state_is_refused(self, content: dict[str, float]) -> None:
        with pytest.raises(CheckpointError, match="KL controller's weight"):
            KLControllerState.from_json(content)

    def test_mean_kl_is_over_trained_tokens(self) -> None:
        old, ref = torch.tensor([-1.0, -2.0, -9.0]), torch.tensor([-1.5, -3.0, 0.0])
        mask = torch.tensor([True, True, False])
        assert mean_token_kl(old, ref, mask, AlgorithmConfig(kl_estimator="k1")) == 0.75
