from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from skyrl_train.batch.layouts.cost import CostModel
from skyrl_train.batch.planner.balance import balance_rows
from skyrl_train.errors import BatchError


def long_tailed(count, seed=0):
    return np.clip(1000 * np.exp(np.random.default_rng(seed).standard_normal(count)), 20, 16384).astype(np.int64)


def test_a_row_costs_its_tokens_and_their_square():
    assert CostModel(per_position=2.0, per_pair=1.0).of_rows(np.array([0, 4])).tolist() == [0, 16]


def test_the_default_is_that_of_a_hidden_size_of_2048():
    assert CostModel().of_rows(np.array([24576])).tolist() == [2 * 24576]


def test_shares_are_equal_where_they_can_be():
    costs = np.array([9.0, 1, 5, 5, 8, 2])
    assert costs[balance_rows(costs, 2)].sum(axis=1).tolist() == [15, 15]


def test_one_rank_keeps_the_order():
    assert balance_rows(np.array([3.0, 1, 2]), 1).tolist() == [[0, 1, 2]]


def test_rows_must_divide_evenly():
    with pytest.raises(BatchError, match=r"3 rows cannot be shared evenly by 2 ranks"):
        balance_rows(np.ones(3), 2)


@given(st.lists(st.floats(0, 100), max_size=24), st.integers(1, 8))
def test_every_row_goes_to_one_rank(costs, num_ranks):
    costs = np.array(costs + [0.0] * (-len(costs) % num_ranks))
    dealt = balance_rows(costs, num_ranks)
    assert dealt.shape == (num_ranks, len(costs) // num_ranks)
    assert sorted(dealt.flatten().tolist()) == list(range(len(costs)))
    assert (np.diff(dealt, axis=1) > 0).all()


@pytest.mark.parametrize(("count", "num_ranks"), [(1024, 8), (2048, 64), (4096, 64), (16384, 8), (16384, 64)])
def test_long_tails_are_level_to_one_percent(count, num_ranks):
    costs = CostModel().of_rows(long_tailed(count))
    loads = costs[balance_rows(costs, num_ranks)].sum(axis=1)
    assert loads.max() / loads.mean() <= 1.01


@pytest.mark.parametrize("seed", range(5))
def test_where_one_row_outweighs_a_share_its_rank_has_the_lightest_others(seed):
    costs = CostModel().of_rows(long_tailed(256, seed))
    loads = costs[balance_rows(costs, 64)].sum(axis=1)
    least = costs.max() + np.sort(costs)[:3].sum()
    assert loads.max() <= max(least, 1.01 * loads.mean()) * 1.02
