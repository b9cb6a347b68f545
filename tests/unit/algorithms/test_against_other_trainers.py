"""The same numbers as the public functions of verl and TRL, where those agree with the papers. Skipped without them.

`pip install verl` and `pip install trl`; what they do otherwise is listed in docs/algorithms.md.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from skyrl_train.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs
from skyrl_train.algorithms.critic_losses import ValueLossInputs, value_loss
from skyrl_train.algorithms.kl import KL_ESTIMATORS
from skyrl_train.algorithms.losses import POLICY_LOSSES, PolicyLossInputs
from skyrl_train.algorithms.reduce import masked_mean, whiten
from skyrl_train.config.algorithm import AlgorithmConfig
from tests.advantage_oracles import Sample, Step, advantage_inputs_of, random_samples
from tests.loss_oracles import random_loss_inputs

CONFIG = AlgorithmConfig(gamma=0.9, gae_lambda=0.8, eps_clip_low=0.2, eps_clip_high=0.28)


@pytest.fixture
def verl() -> Any:
    return pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)


def differing_samples() -> list[Sample]:
    """Three prompts of three trajectories of one turn, no group without difference."""

    def one(prompt: int, number: int) -> Sample:
        length = 2 + number + prompt
        values = [0.1 * (number + t) - 0.2 * prompt for t in range(length)]
        zeros = [0.0] * length
        step = Step(
            context=2, values=values, reward=float(number * number + prompt), old_logprobs=zeros, ref_logprobs=zeros
        )
        return Sample(prompt=prompt, steps=[step])

    return [one(prompt, number) for prompt in range(3) for number in range(3)]


def verl_inputs(inputs: AdvantageInputs) -> dict[str, Any]:
    return {
        "token_level_rewards": inputs.rewards.clone(),
        "response_mask": inputs.loss_mask.double(),
        "index": inputs.prompt_index.numpy().astype(str).astype(object),
    }


@pytest.mark.parametrize("seed", range(4))
def test_gae_with_observations_is_verls(verl: Any, seed: int) -> None:
    samples = [sample for sample in random_samples(seed) if not sample.failed]
    inputs = advantage_inputs_of(samples, step_wise=False)
    given = verl_inputs(inputs)
    expected, returns = verl.compute_gae_advantage_return(
        given["token_level_rewards"], inputs.values, given["response_mask"], CONFIG.gamma, CONFIG.gae_lambda
    )
    found = ADVANTAGE_ESTIMATORS["gae"](inputs, CONFIG)
    mask = inputs.loss_mask
    assert torch.allclose(whiten(found.advantages, mask)[mask], expected[mask], atol=1e-7)
    assert torch.allclose(found.returns[mask], returns[mask], atol=1e-12)


@pytest.mark.parametrize(
    ("name", "function", "whitened"),
    [
        ("grpo", "compute_grpo_outcome_advantage", False),
        ("rloo", "compute_rloo_outcome_advantage", False),
        ("opo", "compute_opo_outcome_advantage", False),
        ("reinforce++_baseline", "compute_reinforce_plus_plus_baseline_outcome_advantage", True),
    ],
)
def test_group_estimators_are_verls(verl: Any, name: str, function: str, whitened: bool) -> None:
    inputs = advantage_inputs_of(differing_samples(), step_wise=False)
    expected, _ = getattr(verl, function)(**verl_inputs(inputs))
    found = ADVANTAGE_ESTIMATORS[name](inputs, AlgorithmConfig()).advantages
    if whitened:
        found = whiten(found, inputs.loss_mask)
    assert torch.allclose(found, expected * inputs.loss_mask, atol=2e-6)


def test_reinforce_pp_is_verls(verl: Any) -> None:
    inputs = advantage_inputs_of(differing_samples(), step_wise=False)
    given = verl_inputs(inputs)
    expected, returns = verl.compute_reinforce_plus_plus_outcome_advantage(
        given["token_level_rewards"], given["response_mask"], config=SimpleNamespace(gamma=0.9)
    )
    found = ADVANTAGE_ESTIMATORS["reinforce++"](inputs, CONFIG)
    mask = inputs.loss_mask
    assert torch.allclose(whiten(found.advantages, mask)[mask], expected[mask], atol=1e-7)
    assert torch.allclose(found.returns[mask], returns[mask], atol=1e-12)


def finite(inputs: PolicyLossInputs) -> PolicyLossInputs:
    """verl multiplies by the mask, so junk outside it must be finite; and its rows all have trained tokens."""
    kept = {
        name: torch.where(inputs.loss_mask, c, -1.0)[:-1]
        for name, c in vars(inputs).items()
        if name != "loss_mask" and c is not None
    }
    return PolicyLossInputs(**kept, loss_mask=inputs.loss_mask[:-1])


@pytest.mark.parametrize(
    ("name", "function", "sequence_mean"),
    [
        ("dual_clip", "compute_policy_loss_vanilla", False),
        ("cispo", "compute_policy_loss_cispo", False),
        ("gspo", "compute_policy_loss_gspo", False),
        ("sapo", "compute_policy_loss_sapo", True),
        ("dppo_tv", "compute_policy_loss_dppo_tv", False),
        ("dppo_kl", "compute_policy_loss_dppo_kl", False),
    ],
)
def test_policy_losses_and_gradients_are_verls(verl: Any, name: str, function: str, sequence_mean: bool) -> None:
    actor = pytest.importorskip("verl.workers.config", exc_type=ImportError).ActorConfig
    inputs = finite(random_loss_inputs(1, holes=name != "gspo"))  # theirs has one sequence per row
    mask = inputs.loss_mask
    config = AlgorithmConfig(
        eps_clip_low=0.2, eps_clip_high=0.28, dppo_max_ratio=3.0, dppo_divergence="kl" if name == "dppo_kl" else "tv"
    )
    other_config = actor(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=0.2, clip_ratio_high=0.28
    )
    base = inputs.rollout_logprobs if name.startswith("dppo") else inputs.old_logprobs
    losses = POLICY_LOSSES[name.partition("_tv")[0].partition("_kl")[0]](inputs, config).token_losses
    loss = masked_mean(losses, mask, 1).mean() if sequence_mean else masked_mean(losses, mask)
    expected, _ = getattr(verl, function)(
        base, inputs.logprobs, inputs.advantages, mask.double(), "token-mean", other_config
    )
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs)
    (expected_gradient,) = torch.autograd.grad(expected, inputs.logprobs)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-7)
    assert torch.allclose(gradient, expected_gradient, atol=1e-7)


def test_value_loss_is_verls(verl: Any) -> None:
    inputs = finite(random_loss_inputs(2))
    values, old, returns, mask = inputs.logprobs, inputs.old_logprobs, inputs.advantages, inputs.loss_mask
    losses = value_loss(
        ValueLossInputs(values=values, old_values=old, returns=returns, loss_mask=mask), CONFIG
    ).token_losses
    expected, _ = verl.compute_value_loss(values, returns, old, mask.double(), 0.2)
    assert float(masked_mean(losses, mask).detach()) == pytest.approx(float(expected.detach()), abs=1e-7)


@pytest.mark.parametrize(("name", "other"), [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl"), ("abs", "abs")])
def test_kl_estimators_are_verls(verl: Any, name: str, other: str) -> None:
    logprobs, ref = -torch.rand(2, 50, dtype=torch.float64)
    assert torch.allclose(KL_ESTIMATORS[name](logprobs, ref), verl.kl_penalty(logprobs, ref, other), atol=1e-12)


def trl_loss(loss_type: str, inputs: PolicyLossInputs, advantages: Tensor, *, level: str) -> Tensor:
    """TRL's loss of these log-probabilities, called on a stand-in for its trainer."""
    trainer = pytest.importorskip("trl.trainer.grpo_trainer", exc_type=ImportError).GRPOTrainer
    rows, width = inputs.logprobs.shape
    stand_in = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (inputs.logprobs, torch.zeros(rows, width), None),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=0.0,
        loss_type=loss_type,
        epsilon_low=0.2,
        epsilon_high=1.28 if loss_type == "cispo" else 0.28,
        args=SimpleNamespace(delta=None, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, steps_per_generation=1),
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        model=SimpleNamespace(training=False),
        current_gradient_accumulation_steps=1,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda value: value, reduce=lambda value, **_: value),
        _entropy_bonus_enabled=False,
        aux_loss_enabled=False,
        _metrics={"eval": _Anything(), "train": _Anything()},
    )
    given = {
        "prompt_ids": torch.zeros(rows, 1),
        "prompt_mask": torch.ones(rows, 1),
        "completion_ids": torch.zeros(rows, width),
        "completion_mask": inputs.loss_mask.double(),
        "advantages": advantages,
        "old_per_token_logps": inputs.old_logprobs,
        "num_items_in_batch": inputs.loss_mask.sum(),
    }
    loss: Tensor = trainer._compute_loss(stand_in, None, given)
    return loss


class _Anything(dict[str, list[float]]):
    def __missing__(self, key: str) -> list[float]:
        return self.setdefault(key, [])


@pytest.mark.parametrize(
    ("name", "loss_type", "level", "sequence_mean"),
    [
        ("regular", "grpo", "token", True),
        ("regular", "dapo", "token", False),
        ("cispo", "cispo", "token", False),
        ("sapo", "sapo", "token", True),
        ("gspo", "grpo", "sequence", True),
    ],
)
def test_policy_losses_and_gradients_are_trls(name: str, loss_type: str, level: str, sequence_mean: bool) -> None:
    inputs = finite(random_loss_inputs(3, holes=name != "gspo"))  # theirs has one sequence per row
    mask = inputs.loss_mask
    advantages = torch.tensor(np.linspace(-1, 1, len(mask)))
    eps_low = 1.0 if name == "cispo" else 0.2
    ours = PolicyLossInputs(**{**vars(inputs), "advantages": advantages[:, None].expand(mask.shape)})
    losses = POLICY_LOSSES[name](ours, AlgorithmConfig(eps_clip_low=eps_low, eps_clip_high=0.28)).token_losses
    loss = masked_mean(losses, mask, 1).mean() if sequence_mean else masked_mean(losses, mask)
    expected = trl_loss(loss_type, inputs, advantages, level=level)
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs)
    (expected_gradient,) = torch.autograd.grad(expected, inputs.logprobs)
    tolerance = 1e-6 if name == "sapo" else 1e-12  # TRL's temperatures are float32
    assert math.isfinite(float(loss.detach()))
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=tolerance)
    assert torch.allclose(gradient, expected_gradient, atol=tolerance)
