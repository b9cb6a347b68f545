"""Law 1 with the real learner: how rows are cut, ordered, padded or split into turns changes no gradient.

All in float64, where only the order of summation is left to differ.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.steps import close_mini_batch
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.learner import PolicyLearner
from skyrl_train.parts import LOSS_REDUCTIONS
from skyrl_train.telemetry import to_values
from tests.support.layout_cases import on_policy
from tests.support.learner_cases import fixed_rows, make_batch, make_learner, save_tiny_model

LENGTHS = [5, 9, 7, 12, 4, 15, 6, 8]
ALGORITHM = AlgorithmConfig(kl_loss_coef=0.1, entropy_coef=0.02)


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> PolicyLearner:
    return make_learner(save_tiny_model(tmp_path_factory.mktemp("model")), double=True, algorithm=ALGORITHM)


def gradient(
    learner: PolicyLearner,
    batch: TrainingInputBatch,
    *,
    rows: int = 100,
    reduction: str = "token_mean",
    scores_first: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """The gradient of one closed mini-batch, cut into micro-batches of so many rows, and its metrics.

    With `scores_first`, old and reference log-probabilities are the learner's own, in the same micro-batches.
    """
    learner.engine.zero_grad()
    learner.engine.oom_retry.use(micro_batching=fixed_rows(rows))
    if scores_first:
        batch = on_policy(batch, learner.forward(batch))
    mini_batch = close_mini_batch(batch, loss_reduction=reduction, max_sequence_length_for_norm=64)
    metrics = to_values(learner.forward_backward(mini_batch))
    metrics = {name: value for name, value in metrics.items() if not name.startswith("layout/")}
    gradients = [parameter.grad for parameter in learner.engine.parameters.values()]
    return torch.cat([value.flatten() for value in gradients if value is not None]), metrics


def assert_same(left: tuple[Tensor, dict[str, float]], right: tuple[Tensor, dict[str, float]]) -> None:
    assert float(left[0].norm()) > 0
    assert float((left[0] - right[0]).norm() / left[0].norm()) < 1e-10
    assert left[1] == pytest.approx(right[1], rel=1e-10)


@pytest.mark.parametrize("reduction", sorted(LOSS_REDUCTIONS))
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
def test_any_micro_batch_size_gives_the_same_gradient(learner: PolicyLearner, rows: int, reduction: str) -> None:
    batch = make_batch(LENGTHS)
    assert_same(gradient(learner, batch, rows=rows, reduction=reduction), gradient(learner, batch, reduction=reduction))
    scored = gradient(learner, batch, rows=rows, reduction=reduction, scores_first=True)[0]
    expected = gradient(learner, batch, reduction=reduction, scores_first=True)[0]
    assert float((scored - expected).norm() / expected.norm()) < 1e-10


def test_any_row_order_gives_the_same_gradient(learner: PolicyLearner) -> None:
    batch = make_batch(LENGTHS)
    order = [6, 1, 7, 0, 3, 5, 2, 4]
    for each in (batch, on_policy(batch, learner.forward(batch))):
        assert_same(gradient(learner, each.take(order), rows=3), gradient(learner, each, rows=3))


def test_dummy_rows_change_nothing(learner: PolicyLearner) -> None:
    batch = make_batch(LENGTHS)
    for each in (batch, on_policy(batch, learner.forward(batch))):
        assert_same(gradient(learner, each.pad_rows(5), rows=3), gradient(learner, each, rows=3))


@pytest.mark.parametrize("own_scores", [False, True])
def test_mini_batches_of_one_step_may_be_computed_apart(learner: PolicyLearner, own_scores: bool) -> None:
    """As ranks do: each computes some rows of the closed mini-batch, and the gradients are added."""
    batch = make_batch(LENGTHS)
    batch = on_policy(batch, learner.forward(batch)) if own_scores else batch
    closed = close_mini_batch(batch, loss_reduction="sequence_mean", max_sequence_length_for_norm=64)
    parts = []
    for rows in ([0, 5, 2], [1, 3, 4, 6, 7]):
        learner.engine.zero_grad()
        learner.forward_backward(type(closed)(batch=closed.batch.take(rows), denominators=closed.denominators))
        parts.append(torch.cat([p.grad.flatten() for p in learner.engine.parameters.values() if p.grad is not None]))
    whole, _ = gradient(learner, batch, reduction="sequence_mean")
    assert float((parts[0] + parts[1] - whole).norm() / whole.norm()) < 1e-10


def as_one_row(turns: TrainingInputBatch) -> TrainingInputBatch:
    """Step-wise rows of two turns per trajectory, the second of which extends the first, as one row each."""
    last = turns.take(list(range(1, turns.num_rows, 2)))
    columns = {name: last[name].clone() for name in last.token_columns}
    for trajectory in range(last.num_rows):
        first = turns.slice(2 * trajectory, 2 * trajectory + 1)
        start = int(last.row_offsets[trajectory])
        for name, column in columns.items():
            if name not in ("input_ids",):
                trained = first["loss_mask"].nonzero().squeeze(1)
                column[start + trained] = first[name][trained]
    return last.with_columns(**columns)


@pytest.mark.parametrize("reduction", sorted(LOSS_REDUCTIONS))
def test_one_row_per_turn_equals_one_row_per_trajectory(learner: PolicyLearner, reduction: str) -> None:
    """The second turn's context contains the first turn, token by token; only its own response is trained."""
    whole = make_batch([12, 9, 15, 10], prompt_length=7)
    first_turn_ends = 6
    rows = whole.take([0, 0, 1, 1, 2, 2, 3, 3])
    mask = rows["loss_mask"].clone()
    for row in range(0, rows.num_rows, 2):
        start, stop = int(rows.row_offsets[row]), int(rows.row_offsets[row + 1])
        mask[start:stop] = False
        mask[start + 3 : start + first_turn_ends] = True
    step_wise = rows.with_columns(loss_mask=mask)
    one_row = as_one_row(step_wise)
    assert int(one_row["loss_mask"].sum()) == int(step_wise["loss_mask"].sum()) == 4 * 3 + 5 + 2 + 8 + 3
    found, expected = (
        gradient(learner, step_wise, rows=3, reduction=reduction),
        gradient(learner, one_row, reduction=reduction),
    )
    assert_same(found, expected)
    scored = gradient(learner, step_wise, rows=3, reduction=reduction, scores_first=True)[0]
    plain = gradient(learner, one_row, reduction=reduction, scores_first=True)[0]
    assert float((scored - plain).norm() / plain.norm()) < 1e-10


def test_one_turn_step_wise_is_the_same_batch(learner: PolicyLearner) -> None:
    """Of a single turn, the step-wise row is the ordinary row; only the facts beside it could differ."""
    batch = make_batch(LENGTHS)
    step_wise = batch.with_columns(
        step_index=torch.zeros(8, dtype=torch.int32), is_last_step=torch.ones(8, dtype=torch.bool)
    )
    for scores_first in (False, True):
        found = gradient(learner, step_wise, rows=3, scores_first=scores_first)
        expected = gradient(learner, batch, rows=3, scores_first=scores_first)
        assert torch.equal(found[0], expected[0])
        assert found[1] == expected[1]
