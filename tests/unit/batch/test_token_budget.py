from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st

from skyrl_train.batch.planner.forwards import make_micro_batch_strategy
from skyrl_train.batch.planner.splits import (
    balance_longest_first,
    computed_tokens,
    rows_over,
    split_packed,
    split_padded,
)
from skyrl_train.config import TrainerConfig
from tests.support.batch_builders import make_batch

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=60)
SPLITS = [pytest.param(split_padded, True, id="padded"), pytest.param(split_packed, False, id="packed")]


def lengths_of_parts(split, lengths, max_tokens):
    lengths = np.array(lengths, dtype=np.int64)
    return [lengths[rows].tolist() for rows in split(lengths, max_tokens)]


def test_a_padded_micro_batch_is_bounded_by_rows_times_the_longest():
    assert lengths_of_parts(split_padded, [2, 10, 3, 9, 2], 20) == [[10, 9], [3, 2, 2]]


def test_a_packed_micro_batch_is_bounded_by_the_sum():
    assert lengths_of_parts(split_packed, [2, 10, 3, 9, 2], 13) == [[10, 3], [9, 2, 2]]


def test_micro_batches_are_level_for_their_number():
    assert lengths_of_parts(split_padded, [4] * 9, 16) == [[4] * 3] * 3
    assert [sum(part) for part in lengths_of_parts(split_packed, [3, 3, 3, 3, 2, 2], 12)] == [8, 8]


def test_rows_keep_their_order_within_a_length():
    assert [rows.tolist() for rows in split_padded(np.array([5, 5, 5, 5]), 10)] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(("split", "padded"), SPLITS)
def test_a_row_over_the_cap_goes_alone_and_is_counted(split, padded):
    lengths = np.array([3, 50, 4, 60])
    parts = [rows.tolist() for rows in split(lengths, 20)]
    assert parts[:2] == [[3], [1]]
    assert sorted(parts[2]) == [0, 2]
    assert rows_over(lengths, 20) == 2


@pytest.mark.parametrize(("split", "padded"), SPLITS)
def test_no_rows_are_no_micro_batches(split, padded):
    assert split(np.zeros(0, dtype=np.int64), 20) == []
    assert computed_tokens(np.zeros(0, dtype=np.int64), padded=padded) == 0


@pytest.mark.parametrize(("split", "padded"), SPLITS)
@given(lengths=LENGTHS, max_tokens=st.integers(1, 90))
def test_every_row_is_in_one_micro_batch_and_the_cap_holds(split, padded, lengths, max_tokens):
    lengths = np.array(lengths)
    parts = split(lengths, max_tokens)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(lengths)))
    for rows in parts:
        assert len(rows) == 1 or computed_tokens(lengths[rows], padded=padded) <= max_tokens


def fewest(lengths, max_tokens, *, padded):
    """The smallest number of micro-batches over every way to group a handful of rows."""
    best = len(lengths)
    for assignment in itertools.product(range(best), repeat=len(lengths)):
        groups = [np.array([n for n, g in zip(lengths, assignment) if g == group]) for group in set(assignment)]
        if all(len(group) == 1 or computed_tokens(group, padded=padded) <= max_tokens for group in groups):
            best = min(best, len(groups))
    return best


def test_padded_micro_batches_are_as_few_as_brute_force_finds():
    rng = np.random.default_rng(0)
    for _ in range(60):
        lengths, max_tokens = rng.integers(1, 12, rng.integers(1, 6)), int(rng.integers(6, 30))
        assert len(split_padded(lengths, max_tokens)) == fewest(lengths, max_tokens, padded=True)


def test_packed_micro_batches_are_those_of_first_fit_decreasing():
    rng = np.random.default_rng(1)
    for _ in range(200):
        lengths, max_tokens = rng.integers(1, 40, rng.integers(1, 80)), int(rng.integers(40, 120))
        rooms: list[int] = []
        for length in sorted(lengths.tolist(), reverse=True):
            fitting = next((index for index, room in enumerate(rooms) if room >= length), None)
            if fitting is None:
                rooms.append(max_tokens - length)
            else:
                rooms[fitting] -= length
        assert len(split_packed(lengths, max_tokens)) == len(rooms)


@pytest.mark.parametrize("num_rows", [400, 12_000])
def test_long_and_short_rows_are_level_however_many_there_are(num_rows):
    """Two long rows do not fit one micro-batch, so that all short ones are left to level them."""
    rng = np.random.default_rng(0)
    lengths = np.where(np.arange(num_rows) % 2, rng.integers(8_500, 9_500, num_rows), rng.integers(200, 400, num_rows))
    parts = split_packed(lengths, 16_384)
    tokens = np.array([lengths[part].sum() for part in parts])
    assert sorted(np.concatenate(parts).tolist()) == list(range(num_rows))
    assert len(parts) == num_rows // 2
    assert tokens.max() <= 1.05 * tokens.mean()


def test_rows_are_spread_in_rounds_nearly_as_one_by_one():
    descending = np.sort(np.random.default_rng(1).integers(100, 2_000, 9_000))[::-1]
    spread = balance_longest_first(descending, 700)
    tokens = np.array([descending[positions].sum() for positions in spread])
    assert sorted(np.concatenate(spread).tolist()) == list(range(9_000))
    assert tokens.max() <= 1.02 * tokens.mean()


def test_a_million_rows_of_few_lengths_are_packed_at_once():
    lengths = np.repeat([6_000, 900, 40], [1_000, 100_000, 900_000])
    parts = split_packed(lengths, 16_384)
    assert sum(map(len, parts)) == 1_001_000
    assert len(parts) <= 1.002 * lengths.sum() / 16_384


@pytest.mark.parametrize(("layout", "sizes"), [("padded", [1, 2]), ("auto", [3]), ("packed", [3])])
def test_the_layout_says_what_is_computed(layout, sizes):
    trainer = TrainerConfig(micro_batching="token_budget", layout=layout, max_tokens_per_microbatch=16)
    batch = make_batch([("a", 0, range(8)), ("b", 1, range(4)), ("c", 2, range(4))])
    strategy = make_micro_batch_strategy(trainer)
    assert [len(forward.rows) for forward in strategy.forwards(batch, training=True)] == sizes
    assert [len(forward.rows) for forward in strategy.forwards(batch, training=False)] == [3]
