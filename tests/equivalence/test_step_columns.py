"""What a loss reads of other rows and other tokens of its step is the same however the step is laid out.

The old log-probabilities lie near the model's own, as they do in training, so that ratios are near 1; and they are the
model's own, as in the first step after scoring.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from skyrl_train.algorithms.losses import (
    PolicyLossInputs,
    PolicyLossOutput,
    Turns,
    gspo,
    masked,
    reads_sequences,
    statistic_of,
)
from skyrl_train.config.algorithm import AlgorithmConfig, OffPolicyConfig
from skyrl_train.config.fields import LayoutChoice
from skyrl_train.config.models import ModelConfig, OptimizerConfig
from skyrl_train.errors import BatchError
from skyrl_train.learner import ModelEngine, PolicyLearner
from skyrl_train.model import load_causal_lm
from skyrl_train.registry import reads
from tests.support.layouts import (
    ALL_DIFFERENT,
    Layout,
    Step,
    assert_same_gradient,
    closed,
    fixed_rollouts,
    learner_gradient,
)
from tests.support.learner_cases import fixed_rows, make_double, make_learner, save_tiny_model

TRAJECTORY = AlgorithmConfig(sequence_unit="trajectory", loss_reduction="sequence_mean", eps_clip_high=0.4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    """Two layers in float64."""
    model = load_causal_lm(ModelConfig(path=str(save_tiny_model(tmp_path_factory.mktemp("model")))), "cpu")
    make_double(model)
    return model


NEAR_ROLLOUT = {"weight_high": 2.0, "sequence_mask_low": 0.5, "sequence_mask_high": 2.0}
CORRECTIONS = {
    "batch_normalize": OffPolicyConfig(weight="token", batch_normalize=True),
    "batch_normalize_sequences": OffPolicyConfig(weight="sequence", weight_high=2.0, batch_normalize=True),
    "sequence_mask": OffPolicyConfig(weight="sequence", sequence_mask="geometric", **NEAR_ROLLOUT),  # type: ignore[arg-type]
    "reject": OffPolicyConfig(reject={"sequence_mean_k3": 0.3, "token_k1": [0.4, 3.0], "sequence_max_k2": 1.0}),
    "negatives": OffPolicyConfig(negative_kl_max=0.05),
}
CASES = {
    **{loss: replace(TRAJECTORY, policy_loss=loss) for loss in ("gspo", "gmpo", "vespo")},
    **{f"{name}-trajectory": replace(TRAJECTORY, off_policy=config) for name, config in CORRECTIONS.items()},
    **{f"{name}-turn": AlgorithmConfig(off_policy=config) for name, config in CORRECTIONS.items()},
    "high_entropy": AlgorithmConfig(entropy_quantile=0.8, off_policy=CORRECTIONS["reject"]),
}


SEVERAL_ROWS = [layout for layout in ALL_DIFFERENT if layout.step_wise]
"""A trajectory lies in several rows, and on several ranks."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_trajectory_in_several_rows_has_the_gradient_of_one_row(model: nn.Module, name: str) -> None:
    step = Step(algorithm=CASES[name])
    expected = learner_gradient(model, step, fixed_rollouts())
    for layout in ALL_DIFFERENT:
        assert_same_gradient(learner_gradient(model, step, fixed_rollouts(), layout), expected)
    on_policy = learner_gradient(model, step, fixed_rollouts(), regime="shared")
    for layout in SEVERAL_ROWS:
        assert_same_gradient(learner_gradient(model, step, fixed_rollouts(), layout, "own"), on_policy)


def mean_log_ratio(inputs: PolicyLossInputs, sequences: Turns, config: AlgorithmConfig) -> Tensor:
    return sequences.mean(masked(inputs.logprobs.detach() - inputs.old_logprobs, inputs.loss_mask))


@reads("advantages", "old_logprobs")
@reads_sequences(mean_log_ratio)
def custom_gspo(inputs: PolicyLossInputs, config: AlgorithmConfig, *, bound: float) -> PolicyLossOutput:
    """A custom loss of whole sequences, clipped at another bound than the configured one."""
    return gspo(inputs, replace(config, eps_clip_low=bound, eps_clip_high=bound))


def test_a_custom_loss_declares_what_it_reads_of_its_sequence(model: nn.Module) -> None:
    custom = {"_target_": f"{__name__}:custom_gspo", "bound": 0.4}
    bundled = replace(TRAJECTORY, policy_loss="gspo", eps_clip_low=0.4)
    assert statistic_of(replace(TRAJECTORY, policy_loss="regular")) is None
    assert statistic_of(replace(TRAJECTORY, policy_loss=custom)) is mean_log_ratio
    expected = learner_gradient(model, Step(algorithm=bundled), fixed_rollouts())
    for layout in (Layout(), *SEVERAL_ROWS[:2]):
        step = Step(algorithm=replace(TRAJECTORY, policy_loss=custom))
        assert_same_gradient(learner_gradient(model, step, fixed_rollouts(), layout), expected)


@pytest.mark.parametrize("layout", ["padded", "packed", "prefix_shared"])
def test_numbers_of_distributions_are_those_of_the_full_softmax(tmp_path: Path, layout: LayoutChoice) -> None:
    config = ModelConfig(path=str(save_tiny_model(tmp_path)))
    plain, laid_out = (load_causal_lm(config, "cpu") for _ in range(2))
    make_double(plain)
    make_double(laid_out)
    batch = closed(Step(algorithm=TRAJECTORY), fixed_rollouts(), Layout(step_wise=True)).batch
    engine = ModelEngine(laid_out, name="policy", micro_batching=fixed_rows(4, layout), optimizer=OptimizerConfig())
    learner = PolicyLearner(engine, model=ModelConfig(), algorithm=TRAJECTORY, temperature=1.0)
    with torch.no_grad():
        logits = plain(input_ids=batch.padded("input_ids").long()).logits
    log_p = logits.log_softmax(-1)[:, :-1]
    mask = batch.padded("loss_mask")[:, 1:]
    found = {"entropy": learner.forward_with_entropy(batch)[:, 1], "squares": learner.forward_sum_pi_squared(batch)}
    expected = {"entropy": -(log_p.exp() * log_p).sum(-1), "squares": log_p.exp().square().sum(-1)}
    for name, column in found.items():
        assert torch.allclose(column[batch["loss_mask"]], expected[name][mask], atol=1e-12), name
        assert not column[~batch["loss_mask"]].any()
    assert torch.equal(learner.forward_with_entropy(batch)[:, 0], learner.forward(batch))


@pytest.mark.parametrize("name", ["gspo", "gmpo", "vespo"])
def test_turns_and_trajectories_are_different_sequences(model: nn.Module, name: str) -> None:
    whole = learner_gradient(model, Step(algorithm=CASES[name]), fixed_rollouts())
    turns = learner_gradient(model, Step(algorithm=replace(CASES[name], sequence_unit="turn")), fixed_rollouts())
    assert float((whole - turns).norm() / turns.norm()) > 1e-3


def test_split_trajectories_without_their_statistic_are_refused(tmp_path: Path) -> None:
    learner: PolicyLearner = make_learner(save_tiny_model(tmp_path), algorithm=CASES["gspo"])
    mini_batch = closed(Step(algorithm=CASES["gspo"]), fixed_rollouts(), Layout(step_wise=True))
    with pytest.raises(BatchError, match="no column 'sequence_log_ratio', and its loss reads other rows"):
        learner.forward_backward(mini_batch)
