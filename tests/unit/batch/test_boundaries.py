from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from skyrl_train.batch.assembly import compute_prompt_end_indices, compute_prompt_mini_batch_boundaries
from skyrl_train.errors import BatchError


def of_each_prompt(uids):
    return compute_prompt_mini_batch_boundaries(uids, 1)


def test_end_indices_and_boundaries():
    assert compute_prompt_end_indices(["a", "a", "b"]) == [2, 3]
    assert of_each_prompt(["a", "a", "b"]) == [(0, 2), (2, 3)]
    assert compute_prompt_end_indices(["a"]) == [1]


def test_a_mini_batch_is_a_number_of_prompts_however_many_rows_they_became():
    uids = ["a", "a", "a", "b", "c", "d", "d"]
    assert compute_prompt_mini_batch_boundaries(uids, 2, 4) == [(0, 4), (4, 7)]
    assert compute_prompt_mini_batch_boundaries(uids, 4, 4) == [(0, 7)]
    assert compute_prompt_mini_batch_boundaries(uids, 1) == [(0, 3), (3, 4), (4, 5), (5, 7)]


def test_rows_per_trajectory_are_counted_where_they_are_fixed():
    assert compute_prompt_mini_batch_boundaries(["a", "a", "b", "b"], 1, 2, False, 2) == [(0, 2), (2, 4)]
    with pytest.raises(BatchError, match=r"uid 'b' at index 2 has 1 row where n_samples_per_prompt=2"):
        compute_prompt_mini_batch_boundaries(["a", "a", "b"], 1, 2, False, 2)


@pytest.mark.parametrize("compute", [compute_prompt_end_indices, of_each_prompt])
def test_no_uids(compute):
    with pytest.raises(BatchError, match=r"at least one row"):
        compute([])


def test_a_uid_in_two_places_is_named_with_both():
    with pytest.raises(BatchError, match=r"uid 'a' is in two places: its rows begin at index 0 and again at index 3"):
        compute_prompt_mini_batch_boundaries(["a", "a", "b", "a"], 1)


def test_an_unexpected_number_of_prompts():
    with pytest.raises(BatchError, match=r"3 prompts \(the last is 'c' at index 3\) where train_batch_size=4"):
        compute_prompt_mini_batch_boundaries(["a", "b", "b", "c"], 2, 4)


def test_left_over_prompts_are_named():
    with pytest.raises(BatchError, match=r"3 prompts .* of 2: 1 are left over, from uid 'c' at index 3"):
        compute_prompt_mini_batch_boundaries(["a", "b", "b", "c"], 2)


def test_the_mini_batch_size_is_positive():
    with pytest.raises(BatchError, match=r"positive"):
        compute_prompt_mini_batch_boundaries(["a"], 0)


@given(
    rows=st.lists(st.integers(1, 5), min_size=1, max_size=12),
    mini_batch_size=st.integers(1, 12),
)
def test_boundaries_partition_the_rows_into_whole_prompts(rows, mini_batch_size):
    uids = [f"p{prompt}" for prompt, count in enumerate(rows) for _ in range(count)]
    if len(rows) % mini_batch_size:
        with pytest.raises(BatchError):
            compute_prompt_mini_batch_boundaries(uids, mini_batch_size, len(rows))
        return
    boundaries = compute_prompt_mini_batch_boundaries(uids, mini_batch_size, len(rows))
    assert [index for start, stop in boundaries for index in range(start, stop)] == list(range(len(uids)))
    assert all(len(set(uids[start:stop])) == mini_batch_size for start, stop in boundaries)
