from __future__ import annotations

import pytest

from skyrl_train.batch.planner.forwards import MemoryAwareBatchIterator, TokenBudgets
from skyrl_train.batch.training_batch import batch_of_lengths

LENGTHS = [4, 9, 2, 7, 3, 12]


def rows_of(batches: MemoryAwareBatchIterator, *, training: bool) -> list[list[int]]:
    return [part.rows.tolist() for part in batches.iterate(batch_of_lengths(LENGTHS), training=training)]


def test_each_phase_has_its_budget_of_computed_positions() -> None:
    batches = MemoryAwareBatchIterator(TokenBudgets(training=18, forward=100))
    assert rows_of(batches, training=True) == [[5], [1, 3], [0, 4, 2]]
    assert rows_of(batches, training=False) == [[5, 1, 3, 0, 4, 2]]


def test_packed_rows_count_their_tokens() -> None:
    batches = MemoryAwareBatchIterator(TokenBudgets(training=19, forward=19), layout="packed")
    parts = rows_of(batches, training=True)
    assert len(parts) == 2
    assert all(sum(LENGTHS[row] for row in part) <= 19 for part in parts)


def test_a_row_over_the_budget_goes_alone() -> None:
    batches = MemoryAwareBatchIterator(TokenBudgets(training=9, forward=9))
    assert [5] in rows_of(batches, training=True)


@pytest.mark.parametrize(("positions", "expected"), [(13, 13), (30, 18), (0, 1)])
def test_a_budget_is_lowered_for_one_phase_and_never_raised(positions: int, expected: int) -> None:
    batches = MemoryAwareBatchIterator(TokenBudgets(training=18, forward=20))
    batches.lower(positions, training=True)
    assert batches.budgets == TokenBudgets(training=expected, forward=20)


def test_every_rank_runs_as_many_forwards() -> None:
    batches = MemoryAwareBatchIterator(TokenBudgets(training=18, forward=18))
    parts = list(batches.iterate(batch_of_lengths(LENGTHS), training=True, agree=lambda count: count + 2))
    assert [len(part.rows) for part in parts] == [1, 2, 3, 0, 0]


def test_one_forward_takes_all_rows() -> None:
    batches = MemoryAwareBatchIterator(TokenBudgets(training=1, forward=1))
    assert rows_of(batches, training=True) == [[5], [1], [3], [0], [4], [2]]
    assert rows_of(batches.as_one_forward(), training=True) == [[0, 1, 2, 3, 4, 5]]
