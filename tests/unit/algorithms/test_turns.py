from __future__ import annotations

import torch

from skyrl_train.algorithms.losses.ratios import turns_of

MASK = torch.tensor([[0, 1, 1, 0, 1], [1, 0, 0, 1, 1]]).bool()
VALUES = torch.tensor([[9.0, 1, 2, 9, 5], [7, 9, 9, 3, 1]])


def test_a_turn_is_a_run_of_trained_tokens_within_a_row() -> None:
    turns = turns_of(MASK)
    assert turns.number.tolist() == [[0, 1, 1, 0, 2], [3, 0, 0, 4, 4]]
    assert turns.starts.int().tolist() == [[0, 1, 0, 0, 1], [1, 0, 0, 1, 0]]


def test_turns_do_not_go_on_from_one_row_to_the_next() -> None:
    assert turns_of(torch.ones(2, 2, dtype=torch.bool)).number.tolist() == [[1, 1], [2, 2]]


def test_totals_and_means_over_a_turn_stand_at_each_of_its_tokens() -> None:
    turns = turns_of(MASK)
    assert turns.total(VALUES).tolist() == [[0, 3, 3, 0, 5], [7, 0, 0, 4, 4]]
    assert turns.mean(VALUES).tolist() == [[0, 1.5, 1.5, 0, 5], [7, 0, 0, 2, 2]]
    assert turns.length().tolist() == [[0, 2, 2, 0, 1], [1, 0, 0, 2, 2]]


def test_junk_outside_the_mask_reaches_nothing() -> None:
    values = torch.where(MASK, VALUES, torch.nan).requires_grad_()
    turns_of(MASK).mean(values).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == MASK.float().tolist()


def test_a_nan_stays_in_its_turn() -> None:
    values = VALUES.clone()
    values[0, 1] = torch.nan
    assert turns_of(MASK).total(values).isnan().int().tolist() == [[0, 1, 1, 0, 0], [0] * 5]


def test_the_largest_of_each_turn_the_earlier_on_ties() -> None:
    one = torch.ones(2, 5)
    assert turns_of(MASK).largest(VALUES, MASK, one).int().tolist() == [[0, 0, 1, 0, 1], [1, 0, 0, 1, 0]]
    assert turns_of(MASK).largest(one, MASK, one).int().tolist() == [[0, 1, 0, 0, 1], [1, 0, 0, 1, 0]]
    assert not turns_of(MASK).largest(VALUES, MASK, 0 * one).any()


def test_only_candidates_are_chosen_and_count_as_largest() -> None:
    candidates = MASK & (VALUES < 2)
    chosen = turns_of(MASK).largest(VALUES, candidates, torch.full((2, 5), 2.0))
    assert torch.equal(chosen, candidates)
