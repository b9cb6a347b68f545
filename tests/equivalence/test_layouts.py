"""Law 1 for what a forward computes: padded, packed, merged and prefix-shared rows give one gradient, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from skyrl_train.algorithms.losses import ValueLossInputs, value_loss
from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.layouts import Layout, spread_to_rows
from skyrl_train.batch.steps import computed_together, stage
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.learner import PolicyLearner
from skyrl_train.parts import KL_ESTIMATORS, POLICY_LOSSES
from skyrl_train.telemetry import StepMetrics, to_values
from tests.support.layout_cases import (
    ALGORITHM,
    LAYOUTS,
    REGIMES,
    TOLERANCE,
    Regime,
    close,
    distance,
    flat_gradient,
    on_policy,
    plain,
    tree_batch,
    use_layout,
    with_loss,
)
from tests.support.learner_cases import make_learner, save_tiny_model

ANY_REGIME = pytest.mark.parametrize("regime", REGIMES)


@pytest.fixture(scope="module", autouse=True)
def _short_runs() -> Iterator[None]:
    """The last layer's attention leaves out queries of rows as short as these, too, and causal calls are cut in halves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skyrl_train.model.layers.joined_attention._SHORTEST_RUN", 1)
        patch.setattr("skyrl_train.model.layers.joined_attention._LONGEST_CAUSAL", 3)
        yield


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> PolicyLearner:
    return make_learner(save_tiny_model(tmp_path_factory.mktemp("model")), double=True, algorithm=ALGORITHM)


def gradient(
    learner: PolicyLearner,
    batch: TrainingInputBatch,
    *,
    reduction: str = "sequence_mean",
    regime: Regime = "drawn",
) -> Tensor:
    """With `own`, the learner scores the batch first, in the layout that it has now."""
    scored = on_policy(batch, learner.forward(batch)) if regime == "own" else batch
    learner.forward_backward(close(scored, reduction=reduction))
    return flat_gradient(learner)


def batch_of(learner: PolicyLearner, seed: int, regime: Regime) -> TrainingInputBatch:
    """A random tree, which on-policy the learner scored plainly. The learner is left plain."""
    plain(learner)
    batch = tree_batch(seed)
    return batch if regime == "drawn" else on_policy(batch, learner.forward(batch))


@ANY_REGIME
@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES))
def test_every_loss_has_one_gradient(learner: PolicyLearner, loss: str, regime: Regime) -> None:
    learner._algorithm = with_loss(loss)
    batch = batch_of(learner, 7, regime)
    expected = gradient(learner, batch)
    for layout, merge in LAYOUTS:
        use_layout(learner, layout, merge=merge, rows=5)
        assert distance(gradient(learner, batch, regime=regime), expected) < TOLERANCE, (layout, merge)
    learner._algorithm = ALGORITHM


@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS))
def test_every_kl_to_a_reference_that_is_the_policy_has_one_gradient(learner: PolicyLearner, name: str) -> None:
    learner._algorithm = replace(ALGORITHM, kl_estimator=name, kl_loss_coef=1.0)  # type: ignore[arg-type]
    batch = batch_of(learner, 7, "own")
    expected = gradient(learner, batch)
    for layout, merge in LAYOUTS:
        use_layout(learner, layout, merge=merge, rows=5)
        assert distance(gradient(learner, batch, regime="own"), expected) < TOLERANCE, (layout, merge)
    learner._algorithm = ALGORITHM


@ANY_REGIME
@pytest.mark.parametrize("reduction", ["token_mean", "seq_mean_token_sum_norm", "prompt_mean"])
def test_every_reduction_has_one_gradient(learner: PolicyLearner, reduction: str, regime: Regime) -> None:
    batch = batch_of(learner, 8, regime)
    expected = gradient(learner, batch, reduction=reduction)
    for layout, merge in LAYOUTS:
        use_layout(learner, layout, merge=merge)
        found = gradient(learner, batch, reduction=reduction, regime=regime)
        assert distance(found, expected) < TOLERANCE, (layout, merge)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    layout=st.sampled_from(LAYOUTS),
    rows=st.integers(1, 12),
    tokens=st.one_of(st.none(), st.integers(4, 80)),
    regime=st.sampled_from(REGIMES),
)
def test_random_trees_have_one_gradient(
    learner: PolicyLearner, seed: int, layout: tuple[str, bool], rows: int, tokens: int | None, regime: Regime
) -> None:
    batch = batch_of(learner, seed, regime)
    expected = gradient(learner, batch)
    use_layout(learner, layout[0], merge=layout[1], rows=rows, tokens=tokens)  # type: ignore[arg-type]
    assert distance(gradient(learner, batch, regime=regime), expected) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("regime", ["drawn", "own"])
@pytest.mark.parametrize(("layout", "merge"), LAYOUTS)
def test_recomputed_activations_give_the_same_gradient(
    learner: PolicyLearner, layout: str, merge: bool, regime: Regime
) -> None:
    batch = batch_of(learner, 9, regime)
    expected = gradient(learner, batch)
    use_layout(learner, layout, merge=merge, rows=5)  # type: ignore[arg-type]
    model = learner.engine.model
    model.train()
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False, "preserve_rng_state": False}
    )
    assert model.is_gradient_checkpointing
    found = gradient(learner, batch, regime=regime)
    model.gradient_checkpointing_disable()
    assert distance(found, expected) < TOLERANCE


@pytest.mark.parametrize("regime", ["drawn", "own"])
@pytest.mark.parametrize(("layout", "merge"), LAYOUTS)
def test_metrics_are_those_of_the_rows(learner: PolicyLearner, layout: str, merge: bool, regime: Regime) -> None:
    batch = batch_of(learner, 3, regime)

    def metrics() -> dict[str, float]:
        scored = on_policy(batch, learner.forward(batch)) if regime == "own" else batch
        values = to_values(learner.forward_backward(close(scored)))
        learner.engine.zero_grad()
        return {name: value for name, value in values.items() if not name.startswith("layout/")}

    plain(learner)
    expected = metrics()
    use_layout(learner, layout, merge=merge, rows=4)  # type: ignore[arg-type]
    assert metrics() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("layout", "merge"), LAYOUTS)
def test_scoring_gives_every_row_its_own_log_probabilities(learner: PolicyLearner, layout: str, merge: bool) -> None:
    batch = tree_batch(11)
    plain(learner)
    expected = learner.forward(batch)
    use_layout(learner, layout, merge=merge, tokens=30)  # type: ignore[arg-type]
    torch.testing.assert_close(learner.forward(batch), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES))
def test_an_on_policy_update_needs_no_old_log_probabilities(learner: PolicyLearner, loss: str) -> None:
    batch = tree_batch(14)
    learner._algorithm = with_loss(loss)
    use_layout(learner, "prefix_shared", rows=5)
    expected = gradient(learner, batch.with_columns(old_logprobs=learner.forward(batch)))
    without = {name: column for name, column in batch.token_columns.items() if name != "old_logprobs"}
    learner._on_policy = True
    assert distance(gradient(learner, replace(batch, token_columns=without)), expected) < TOLERANCE
    learner._on_policy, learner._algorithm = False, ALGORITHM


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    layout=st.sampled_from(LAYOUTS),
    num_ranks=st.integers(2, 4),
    loss=st.sampled_from(sorted(POLICY_LOSSES)),
    regime=st.sampled_from(REGIMES),
)
def test_ranks_add_up_to_one_process(
    learner: PolicyLearner, seed: int, layout: tuple[str, bool], num_ranks: int, loss: str, regime: Regime
) -> None:
    """Prompts and trajectories go to ranks whole, or are cut, as the layout computes them together."""
    learner._algorithm = with_loss(loss)
    batch = batch_of(learner, seed, regime)
    expected = gradient(learner, batch)
    use_layout(learner, layout[0], merge=layout[1], rows=4)  # type: ignore[arg-type]
    closed = close(on_policy(batch, learner.forward(batch)) if regime == "own" else batch)
    together = computed_together(layout[0], merge_turns=layout[1])  # type: ignore[arg-type]
    for shard in stage(closed.batch, num_ranks, together=together).shards:
        learner.forward_backward(replace(closed, batch=shard))
    assert distance(flat_gradient(learner), expected) < TOLERANCE
    learner._algorithm = ALGORITHM


@pytest.mark.parametrize(("layout", "merge"), LAYOUTS)
def test_two_ranks_score_as_one(learner: PolicyLearner, layout: str, merge: bool) -> None:
    batch = tree_batch(12)
    plain(learner)
    expected = learner.forward(batch)
    use_layout(learner, layout, merge=merge, rows=4)  # type: ignore[arg-type]
    staged = stage(batch, 2, together=computed_together(layout, merge_turns=merge))  # type: ignore[arg-type]
    found = staged.collect([learner.forward(shard) for shard in staged.shards])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("layout", "merge"), LAYOUTS)
def test_a_value_loss_has_one_gradient(learner: PolicyLearner, layout: str, merge: bool) -> None:
    """As a critic does: the value of the state from which a token was sampled, of every row's own token.

    With values that the critic itself computed: `test_layouts_of_critics.py`.
    """
    torch.manual_seed(0)
    head = nn.Linear(32, 1, dtype=torch.float64)

    def loss_of(hidden: Tensor, rows: TrainingInputBatch, layout: Layout) -> tuple[Tensor, StepMetrics]:
        mask = rows["loss_mask"]
        before = layout.position_of_token[mask.nonzero().squeeze(1) - 1]
        values = head(hidden.index_select(0, before)).squeeze(1)
        flat = values.new_zeros(rows.num_tokens).index_put((mask,), values)
        inputs = ValueLossInputs(
            values=spread_to_rows(flat, rows),
            old_values=rows.padded("values"),
            returns=rows.padded("returns"),
            loss_mask=rows.padded("loss_mask"),
        )
        losses = value_loss(inputs, AlgorithmConfig()).token_losses
        return (rows.padded("loss_weights") * losses).sum(), {}

    def value_gradient() -> Tensor:
        head.zero_grad()
        learner.engine.forward_backward(close(tree_batch(13)).batch, loss_of)
        assert head.weight.grad is not None
        return torch.cat([flat_gradient(learner), head.weight.grad.flatten()])

    plain(learner)
    expected = value_gradient()
    use_layout(learner, layout, merge=merge, rows=6)  # type: ignore[arg-type]
    assert distance(value_gradient(), expected) < TOLERANCE
