"""Layout never changes the gradient: for every registered loss and reduction, and any way to lay out a step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn

from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.models import ModelConfig
from skyrl_train.model import load_causal_lm
from skyrl_train.parts import KL_ESTIMATORS, LOSS_REDUCTIONS, POLICY_LOSSES
from skyrl_train.registry import PartSpec
from tests.support.layout_cases import REGIMES
from tests.support.layouts import (
    ALL_DIFFERENT,
    Layout,
    Step,
    assert_same_gradient,
    fixed_rollouts,
    layouts,
    learner_gradient,
    plain_gradient,
    rollouts,
)
from tests.support.learner_cases import make_double, save_tiny_model

DRAWN = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
DRAWN_SLOWLY = settings(DRAWN, max_examples=10)
DRAWN_AT_NIGHT = settings(DRAWN, max_examples=40)
ANY_LOSS = st.sampled_from(sorted(POLICY_LOSSES))
ANY_REGIME = st.sampled_from(REGIMES)
ANY_KL = st.sampled_from(sorted(KL_ESTIMATORS))
EVERY_LOSS = pytest.mark.parametrize("loss", sorted(POLICY_LOSSES))
EVERY_REDUCTION = pytest.mark.parametrize("reduction", sorted(LOSS_REDUCTIONS))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    """Two layers in float64."""
    model = load_causal_lm(ModelConfig(path=str(save_tiny_model(tmp_path_factory.mktemp("model")))), "cpu")
    make_double(model)
    return model


def step_of(loss: PartSpec = "regular", reduction: str = "token_mean", **settings: object) -> Step:
    terms = {"kl_loss_coef": 0.1, "entropy_coef": 0.02, "max_sequence_length_for_norm": 64, **settings}
    return Step(algorithm=AlgorithmConfig(policy_loss=loss, loss_reduction=reduction, **terms))  # type: ignore[arg-type]


@pytest.mark.slow
@EVERY_REDUCTION
@DRAWN
@given(loss=ANY_LOSS, regime=ANY_REGIME, batch_of=rollouts(), layout=layouts(), normalize=st.booleans(), kl=ANY_KL)
def test_any_layout_gives_the_gradient_of_the_plainest(model, reduction, loss, regime, batch_of, layout, normalize, kl):
    """At length below for each loss; `test_layouts.py` takes each loss through each way to compute rows."""
    step = step_of(loss, reduction, normalize_advantages=normalize, kl_estimator=kl)
    expected = learner_gradient(model, step, batch_of, regime=regime)
    assert_same_gradient(learner_gradient(model, step, batch_of, layout, regime), expected)


@pytest.mark.slow
@EVERY_LOSS
def test_every_loss_has_one_gradient_on_policy(model, loss):
    """Scored once for all layouts, and by each layout itself, where every ratio is 1 but for rounding."""
    chosen = {"kl_cov": {"share": 0.5}, "clip_cov": {"low": 0.0, "share": 0.5}}.get(loss, {})
    step = step_of({"_target_": loss, **chosen}, "sequence_mean", kl_estimator="abs")
    expected = learner_gradient(model, step, fixed_rollouts(), regime="shared")
    for regime, layout in zip(("own", "shared") * len(ALL_DIFFERENT), ALL_DIFFERENT):
        assert_same_gradient(learner_gradient(model, step, fixed_rollouts(), layout, regime), expected)


@pytest.mark.nightly
@pytest.mark.slow
@EVERY_REDUCTION
@EVERY_LOSS
@DRAWN_SLOWLY
@given(regime=ANY_REGIME, batch_of=rollouts(), layout=layouts(), normalize=st.booleans(), kl=ANY_KL)
def test_any_layout_gives_the_gradient_of_the_plainest_at_length(
    model, loss, reduction, regime, batch_of, layout, normalize, kl
):
    require_the_gradient_of_the_plainest(model, loss, reduction, regime, batch_of, layout, normalize, kl)


@pytest.mark.nightly
@EVERY_REDUCTION
@EVERY_LOSS
@DRAWN_AT_NIGHT
@given(regime=ANY_REGIME, batch_of=rollouts(), layout=layouts(), normalize=st.booleans(), kl=ANY_KL)
def test_any_layout_gives_the_gradient_of_the_plainest_all_night(
    model, loss, reduction, regime, batch_of, layout, normalize, kl
):
    require_the_gradient_of_the_plainest(model, loss, reduction, regime, batch_of, layout, normalize, kl)


def require_the_gradient_of_the_plainest(model, loss, reduction, regime, batch_of, layout, normalize, kl):
    step = step_of(loss, reduction, normalize_advantages=normalize, kl_estimator=kl)
    expected = learner_gradient(model, step, batch_of, regime=regime)
    assert_same_gradient(learner_gradient(model, step, batch_of, layout, regime), expected)


@pytest.mark.slow
@DRAWN
@given(
    reduction=st.sampled_from(sorted(LOSS_REDUCTIONS)),
    batch_of=rollouts(),
    layout=layouts(),
    loss=ANY_LOSS,
    regime=ANY_REGIME,
)
def test_dummy_rows_and_dummy_micro_batches_that_are_computed_change_nothing(
    model, reduction, batch_of, layout, loss, regime
):
    """Written out with a value term, without the learner's shortcut of leaving rows without loss out."""
    step = step_of(loss, reduction)
    expected = plain_gradient(model, step, batch_of, regime=regime)
    assert_same_gradient(plain_gradient(model, step, batch_of, layout, regime), expected)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("layout", ALL_DIFFERENT)
def test_each_kind_of_layout_on_its_own(model, layout, regime):
    step = step_of("regular", "sequence_mean", normalize_advantages=True)
    expected = learner_gradient(model, step, fixed_rollouts(), regime=regime)
    assert_same_gradient(learner_gradient(model, step, fixed_rollouts(), layout, regime), expected)


@pytest.mark.parametrize("dp_size", range(1, 9))
def test_any_number_of_ranks(model, dp_size):
    step, batch_of = step_of("regular", "prompt_mean"), fixed_rollouts(1)
    for regime in REGIMES:
        expected = learner_gradient(model, step, batch_of, regime=regime)
        assert_same_gradient(learner_gradient(model, step, batch_of, Layout(dp_size=dp_size, rows=2), regime), expected)


def test_another_set_of_trajectories_has_another_gradient(model):
    one, other = (learner_gradient(model, step_of(), fixed_rollouts(seed)) for seed in (0, 1))
    with pytest.raises(AssertionError, match="gradients differ"):
        assert_same_gradient(one, other)
    assert torch.isfinite(one).all()
