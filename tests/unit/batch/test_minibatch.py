from __future__ import annotations

import pytest
import torch

from skyrl_train.batch.steps.minibatch import LossDenominators, close_mini_batch, mini_batches
from skyrl_train.errors import ConfigError
from tests.support.batch_builders import make_batch

# Prompt a: trajectory 0 as two rows (1 and 2 tokens with loss), trajectory 1 as one (3). Prompt b: trajectory 2 (2).
ROWS = [("a", 0, [1, 2]), ("a", 0, [1, 2, 3]), ("a", 1, [1, 2, 3, 4]), ("b", 2, [1, 2, 3])]


def closed(reduction="token_mean", rows=ROWS, **kwargs):
    return close_mini_batch(make_batch(rows), loss_reduction=reduction, max_sequence_length_for_norm=10, **kwargs)


def row_weights(mini_batch):
    """The weight of each row's tokens with loss; they are equal within a row."""
    padded = mini_batch.batch.padded("loss_weights")
    mask = mini_batch.batch.padded("loss_mask")
    assert (padded[~mask] == 0).all()
    return [row[keep].unique().tolist() for row, keep in zip(padded, mask)]


def test_denominators_count_trajectories_not_rows():
    assert closed().denominators == LossDenominators(num_tokens=8, num_sequences=3, num_rows=4, num_prompts=2)


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("token_mean", [1 / 8, 1 / 8, 1 / 8, 1 / 8]),
        ("sequence_mean", [1 / 9, 1 / 9, 1 / 9, 1 / 6]),
        ("seq_mean_token_sum_norm", [1 / 30, 1 / 30, 1 / 30, 1 / 30]),
        ("prompt_mean", [1 / 12, 1 / 12, 1 / 12, 1 / 4]),
    ],
)
def test_weights_of_each_reduction(reduction, expected):
    assert row_weights(closed(reduction)) == [[pytest.approx(weight)] for weight in expected]
    assert closed(reduction).batch["loss_weights"].dtype == torch.float64


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "prompt_mean"])
def test_a_mean_has_weights_that_sum_to_one(reduction):
    assert closed(reduction).batch["loss_weights"].sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"])
def test_dummy_rows_and_placeholders_change_nothing(reduction):
    plain = closed(reduction)
    padded = close_mini_batch(make_batch(ROWS).pad_rows(3), loss_reduction=reduction, max_sequence_length_for_norm=10)
    assert padded.denominators == plain.denominators
    assert torch.equal(padded.batch["loss_weights"][:12], plain.batch["loss_weights"])
    assert (padded.batch["loss_weights"][12:] == 0).all()


def test_a_padding_row_has_no_weight_even_where_its_mask_says_otherwise():
    batch = make_batch(ROWS).with_columns(is_padding=torch.tensor([False, False, True, False]))
    mini_batch = close_mini_batch(batch, loss_reduction="token_mean", max_sequence_length_for_norm=10)
    assert mini_batch.denominators == LossDenominators(num_tokens=5, num_sequences=2, num_rows=3, num_prompts=2)
    assert (mini_batch.batch.padded("loss_weights")[2] == 0).all()


def test_a_row_without_loss_is_no_sequence():
    batch = make_batch(ROWS)
    mask = batch.padded("loss_mask")
    mask[3] = False
    batch = batch.with_columns(loss_mask=batch.from_padded(mask))
    mini_batch = close_mini_batch(batch, loss_reduction="sequence_mean", max_sequence_length_for_norm=10)
    assert mini_batch.denominators == LossDenominators(num_tokens=6, num_sequences=2, num_rows=4, num_prompts=1)
    assert mini_batch.batch["loss_weights"].isfinite().all()


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"])
def test_a_step_in_which_everything_failed_has_weights_of_zero(reduction):
    batch = make_batch([("a", 0, [1, 2])]).slice(0, 0).pad_rows(2, uid="a")
    mini_batch = close_mini_batch(batch, loss_reduction=reduction, max_sequence_length_for_norm=10)
    assert mini_batch.denominators.num_tokens == 0
    assert (mini_batch.batch["loss_weights"] == 0).all()


def test_advantages_are_whitened_over_the_tokens_of_this_step_alone():
    advantages = torch.tensor([9.0, 1.0, 9.0, 3.0, 9.0, 9.0, 9.0, 5.0])
    batch = make_batch([("a", 0, [1, 2]), ("b", 1, [1, 2]), ("c", 2, [1, 2]), ("d", 3, [1, 2])])
    batch = batch.with_columns(advantages=advantages)
    first, second = mini_batches(
        batch,
        [(0, 2), (2, 4)],
        loss_reduction="token_mean",
        max_sequence_length_for_norm=10,
        normalize_advantages=True,
    )
    half = 0.5**0.5
    assert first.batch["advantages"].tolist() == pytest.approx([0, -half, 0, half])
    assert second.batch["advantages"].tolist() == pytest.approx([0, half, 0, -half])


def test_advantages_stay_as_they_are_unless_asked():
    batch = make_batch(ROWS).with_columns(advantages=torch.arange(12.0))
    mini_batch = close_mini_batch(batch, loss_reduction="token_mean", max_sequence_length_for_norm=10)
    assert mini_batch.batch["advantages"].tolist() == list(range(12))


def test_an_unknown_reduction_is_named():
    with pytest.raises(ConfigError, match=r"[Dd]id you mean 'token_mean'"):
        closed("token_men")


def test_each_mini_batch_carries_its_own_uids_and_denominators():
    batch = make_batch(ROWS)
    parts = list(mini_batches(batch, [(0, 3), (3, 4)], loss_reduction="token_mean", max_sequence_length_for_norm=10))
    assert [part.batch.metadata.uids for part in parts] == [("a", "a", "a"), ("b",)]
    assert [part.denominators.num_tokens for part in parts] == [6, 2]
