"""Packing: every row in one bin, capacity never exceeded, position ids that restart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from skyrl_train.data.sft.collate import align_rows, close_examples, pack, plan_packing
from skyrl_train.errors import BatchError
from tests.support.sft_cases import examples, indices


def test_longest_first_each_where_it_first_fits() -> None:
    bins = plan_packing(np.array([2, 7, 3, 5, 3]), max_tokens=10)
    assert [rows.tolist() for rows in bins] == [[1, 2], [3, 4, 0]]


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=60),
    align=st.sampled_from([1, 4, 8, 16]),
    num_ranks=st.integers(1, 5),
)
def test_no_bin_exceeds_its_capacity_with_its_padding_and_ranks_have_equal_numbers(
    lengths: list[int], align: int, num_ranks: int
) -> None:
    array = np.array(lengths)
    capacity = 71
    bins = plan_packing(array, max_tokens=capacity, align=align, num_ranks=num_ranks)
    assert sorted(np.concatenate(bins).tolist()) == list(range(len(lengths)))
    assert all(-(-int(array[rows].sum()) // align) * align <= capacity for rows in bins)
    assert len(bins) % num_ranks == 0 or len(bins) == len(lengths)


def test_a_row_that_fits_no_bin_is_refused() -> None:
    with pytest.raises(BatchError, match="row 1 has 65 tokens: more than a packed micro-batch of 71 tokens takes in"):
        plan_packing(np.array([3, 65]), max_tokens=71, align=8)


def test_fewer_rows_than_ranks_get_a_bin_each() -> None:
    assert [rows.tolist() for rows in plan_packing(np.array([3, 4]), max_tokens=100, num_ranks=4)] == [[1], [0]]


def test_a_packed_row_is_its_sequences_one_after_the_other() -> None:
    packed = pack(close_examples(examples(3, 2, 4), indices(0, 1, 2), step=1), [indices(2, 1), indices(0)])
    batch = packed.batch
    assert batch.num_rows == 2
    assert batch.row_offsets.tolist() == [0, 6, 9]
    assert batch["input_ids"].tolist() == [21, 22, 23, 24, 11, 12, 1, 2, 3]
    assert batch["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2]
    assert batch["loss_mask"].tolist() == [False, True, True, True, False, True, False, True, True]
    assert batch.metadata.uids == ("train-2", "train-0")


def test_packing_keeps_every_tokens_weight_and_the_denominators() -> None:
    closed = close_examples(examples(3, 2, 4), indices(0, 1, 2), step=1)
    packed = pack(closed, [indices(2, 1), indices(0)])
    assert packed.denominators == closed.denominators
    assert packed.denominators.num_sequences == 3
    assert packed.batch["loss_weights"].tolist() == [0, 1 / 6, 1 / 6, 1 / 6, 0, 1 / 6, 0, 1 / 6, 1 / 6]


def test_padding_up_to_an_alignment_is_a_sequence_of_its_own() -> None:
    packed = pack(close_examples(examples(3, 2), indices(0, 1), step=1), [indices(0, 1)], align=8)
    assert packed.batch["input_ids"].tolist() == [1, 2, 3, 11, 12, 0, 0, 0]
    assert packed.batch["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert packed.batch["loss_mask"].tolist()[5:] == [False] * 3
    assert packed.batch["loss_weights"].tolist()[5:] == [0.0] * 3


def test_rows_are_aligned_one_by_one() -> None:
    batch = align_rows(close_examples(examples(3, 4), indices(0, 1), step=1).batch, 4)
    assert batch["input_ids"].tolist() == [1, 2, 3, 0, 11, 12, 13, 14]
    assert batch.lengths.tolist() == [4, 4]


def test_only_a_closed_mini_batch_with_every_row_in_a_bin_is_packed() -> None:
    closed = close_examples(examples(3, 2), indices(0, 1), step=1)
    with pytest.raises(BatchError, match="every row belongs in one of them"):
        pack(closed, [indices(0)])
    with pytest.raises(BatchError, match="every row belongs in one of them"):
        pack(closed, [indices(0, 1), indices(1)])


def test_loss_on_a_first_token_is_refused_since_another_sequence_would_predict_it() -> None:
    closed = close_examples(examples(3, 2), indices(0, 1), step=1)
    mask = closed.batch["loss_mask"].clone()
    mask[3] = True
    broken = type(closed)(batch=closed.batch.with_columns(loss_mask=mask), denominators=closed.denominators)
    with pytest.raises(BatchError, match="loss on its first token"):
        pack(broken, [indices(0, 1)])
