from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from skyrl_train.batch.steps.minibatch import Ages, ages_in, behind_updates, check_staleness, token_ages
from skyrl_train.batch.training_batch import TrainingInputBatch
from skyrl_train.errors import BatchError
from tests.support.batch_builders import make_batch

ROWS = [("a", 0, [1, 2, 3]), ("b", 1, [4, 5])]
"""Tokens 1, 2 and 4 are trained: the first of each row is its prompt. The learner has version 7."""


def sampled_by(versions: Sequence[int], max_staleness: int | None) -> TrainingInputBatch:
    batch = make_batch(ROWS)
    batch = replace(batch, metadata=replace(batch.metadata, max_staleness=max_staleness))
    return batch.with_columns(weight_version=torch.tensor(versions, dtype=torch.int32))


def test_an_age_is_the_learners_version_less_the_tokens() -> None:
    batch = sampled_by([7, 6, 7, 7, 4], None)
    ages = token_ages(batch)
    assert ages is not None
    assert ages.tolist() == [0, 1, 0, 0, 3]
    assert ages_in(batch).found == (0, 1, 3)
    assert token_ages(make_batch(ROWS)) is None
    assert ages_in(make_batch(ROWS)) == Ages()


def test_a_token_is_behind_an_update_where_its_turn_began_with_older_weights() -> None:
    rows = [("a", 0, [1, 2, 3, 4, 5, 6]), ("b", 2, [1, 2, 3]), ("b", 3, [1])]
    batch = make_batch(rows)
    # The turns of the first row are its tokens 1 and 2, and 4 and 5; the last row's only token begins one.
    mask = torch.tensor([0, 1, 1, 0, 1, 1, 1, 1, 1, 1], dtype=torch.bool)
    versions = torch.tensor([7, 5, 6, 7, 6, 6, 5, 5, 7, 7], dtype=torch.int32)
    assert not behind_updates(batch).any()
    found = behind_updates(batch.with_columns(weight_version=versions, loss_mask=mask))
    assert found.nonzero().squeeze(1).tolist() == [2, 8]
    assert ages_in(batch.with_columns(weight_version=versions, loss_mask=mask)) == Ages(
        found=(0, 1, 2), fresh_behind_updates=True
    )
    assert not ages_in(batch.with_columns(weight_version=versions - 1, loss_mask=mask)).fresh_behind_updates
    none = torch.zeros_like(mask)
    assert not behind_updates(batch.with_columns(weight_version=versions, loss_mask=none)).any()


@pytest.mark.parametrize(
    ("versions", "max_staleness"),
    [
        ([7, 7, 7, 7, 7], 0),
        ([0, 7, 7, 99, 7], 0),  # tokens without loss may be of any version
        ([7, 6, 7, 7, 5], 2),
        ([7, -5, 9, 7, 7], None),
    ],
)
def test_tokens_within_the_bound_are_accepted(versions: list[int], max_staleness: int | None) -> None:
    check_staleness(sampled_by(versions, max_staleness))


@pytest.mark.parametrize(
    ("versions", "max_staleness", "message"),
    [
        ([7, 7, 7, 7, 6], 0, "prompt 'b': token 1 of its row 1 was sampled by weights of version 6, .* version 7"),
        ([7, 7, 4, 7, 4], 2, "prompt 'a': token 2 of its row 0 .*max_staleness=2 versions old. 2 tokens"),
        ([7, 8, 7, 7, 7], 2, "prompt 'a': token 1 of its row 0 was sampled by weights of version 8"),
    ],
)
def test_an_older_or_newer_token_is_refused_with_its_prompt(
    versions: list[int], max_staleness: int, message: str
) -> None:
    with pytest.raises(BatchError, match=message):
        check_staleness(sampled_by(versions, max_staleness))


def test_versions_and_their_bound_follow_their_rows() -> None:
    batch = sampled_by([7, 6, 5, 7, 4], 2)
    for part in (batch.take([1, 0]), batch.slice(1, 2), TrainingInputBatch.cat([batch.slice(1, 2), batch.slice(0, 1)])):
        assert part["weight_version"].tolist()[:2] == [7, 4]
        with pytest.raises(BatchError, match="prompt 'b': token 1"):
            check_staleness(part)
    check_staleness(batch.take([0]).pad_rows(3))
    assert batch.take([0, 1]).padded("weight_version").tolist() == [[7, 6, 5], [7, 4, 0]]
