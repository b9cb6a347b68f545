"""Law 1 for the value model: each layout gives one gradient and one set of values, on one rank and on several."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.steps import computed_together, stage
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.models import ModelConfig, OptimizerConfig
from skyrl_train.learner import CriticLearner, ModelEngine
from skyrl_train.model import load_value_model
from tests.support.layout_cases import (
    LAYOUTS,
    REGIMES,
    TOLERANCE,
    Regime,
    close,
    distance,
    flat_gradient,
    tree_batch,
    use_layout,
)
from tests.support.learner_cases import fixed_rows, make_double, save_tiny_model


@pytest.fixture(scope="module")
def critic(tmp_path_factory: pytest.TempPathFactory) -> CriticLearner:
    config = ModelConfig(path=str(save_tiny_model(tmp_path_factory.mktemp("model"))))
    model = load_value_model(config, "cpu")
    torch.nn.init.normal_(model.score.weight, std=0.2, generator=torch.Generator().manual_seed(1))
    make_double(model)
    engine = ModelEngine(model, name="critic", micro_batching=fixed_rows(1), optimizer=OptimizerConfig())
    return CriticLearner(engine, model=config, algorithm=AlgorithmConfig())


def one_by_one(critic: CriticLearner, batch: TrainingInputBatch) -> Tensor:
    """The gradient with one row at a time, padded, nothing shared."""
    use_layout(critic, "padded", merge=False, rows=1)  # type: ignore[arg-type]
    critic.forward_backward(close(batch))
    return flat_gradient(critic)  # type: ignore[arg-type]


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    layout=st.sampled_from(LAYOUTS),
    num_ranks=st.integers(1, 3),
    rows=st.integers(1, 12),
    tokens=st.one_of(st.none(), st.integers(4, 80)),
    regime=st.sampled_from(REGIMES),
)
def test_random_trees_have_one_gradient_and_one_set_of_values(
    critic: CriticLearner,
    seed: int,
    layout: tuple[str, bool],
    num_ranks: int,
    rows: int,
    tokens: int | None,
    regime: Regime,
) -> None:
    """On-policy, old values are those of the critic itself."""
    batch = tree_batch(seed)
    use_layout(critic, "padded", merge=False, rows=1)  # type: ignore[arg-type]
    values = critic.forward(batch)
    batch = batch if regime == "drawn" else batch.with_columns(values=values)
    gradient = one_by_one(critic, batch)
    name, merge = layout
    use_layout(critic, name, merge=merge, rows=rows, tokens=tokens)  # type: ignore[arg-type]
    closed = close(batch.with_columns(values=critic.forward(batch)) if regime == "own" else batch)
    staged = stage(closed.batch, num_ranks, together=computed_together(name, merge_turns=merge))  # type: ignore[arg-type]
    for shard in staged.shards:
        critic.forward_backward(replace(closed, batch=shard))
    assert distance(flat_gradient(critic), gradient) < TOLERANCE  # type: ignore[arg-type]
    found = staged.collect([critic.forward(shard) for shard in staged.shards])
    torch.testing.assert_close(found, values, rtol=0, atol=1e-12)
