from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from skyrl_train.batch.steps.minibatch import close_mini_batch, stage
from skyrl_train.errors import BatchError
from tests.support.batch_builders import make_batch


def rows_of_lengths(*lengths):
    return make_batch([(f"p{index}", index, range(index * 100, index * 100 + n)) for index, n in enumerate(lengths)])


def test_every_mini_batch_is_padded_on_its_own():
    batch = rows_of_lengths(2, 3, 4, 5, 6)
    staged = [stage(batch.slice(start, stop), 2) for start, stop in ((0, 3), (3, 5))]
    assert [part.num_dummy_rows for part in staged] == [1, 0]
    assert [[shard.num_rows for shard in part.shards] for part in staged] == [[2, 2], [1, 1]]


def test_dummy_rows_are_the_shortest_legal_rows_and_no_copies():
    staged = stage(rows_of_lengths(9, 9, 9), 2)
    dummies = [shard.take(shard["is_padding"].nonzero()[:, 0]) for shard in staged.shards]
    assert sorted(dummy.num_tokens for dummy in dummies) == [0, 2]
    assert not any(dummy["loss_mask"].any() for dummy in dummies)
    assert not any(dummy["input_ids"].any() for dummy in dummies)


def test_fewer_rows_than_ranks():
    staged = stage(rows_of_lengths(5, 3), 8)
    assert [shard.num_rows for shard in staged.shards] == [1] * 8
    assert sum(int(shard["is_padding"].sum()) for shard in staged.shards) == 6


def test_a_shard_carries_the_uids_of_its_own_rows():
    staged = stage(rows_of_lengths(2, 3, 4, 5), 2)
    for shard in staged.shards:
        assert shard.metadata.uids == tuple(f"p{index}" for index in shard["trajectory_index"].tolist())
        assert shard.metadata.policy_mini_batch_boundaries is None


def test_the_weights_of_a_closed_mini_batch_travel_with_its_rows():
    closed = close_mini_batch(rows_of_lengths(2, 3, 7), loss_reduction="token_mean", max_sequence_length_for_norm=1)
    staged = stage(closed.batch, 2)
    assert sum(float(shard["loss_weights"].sum()) for shard in staged.shards) == pytest.approx(1.0)


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 8))
def test_collecting_restores_the_order(lengths, dp_size):
    batch = rows_of_lengths(*lengths)
    staged = stage(batch, dp_size)
    assert torch.equal(staged.collect([shard["input_ids"] for shard in staged.shards]), batch["input_ids"])
    assert staged.num_dummy_rows == -len(lengths) % dp_size


def test_a_result_that_does_not_fit_its_shard_is_named():
    staged = stage(rows_of_lengths(2, 2), 2)
    with pytest.raises(BatchError, match=r"rank 1 returned \(3,\) for a shard of 2 tokens"):
        staged.collect([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(BatchError, match=r"1 result for 2 ranks"):
        staged.collect([torch.zeros(2)])


def test_an_empty_batch_is_refused():
    with pytest.raises(BatchError, match=r"no rows to shard"):
        stage(rows_of_lengths(2).slice(0, 0), 2)


def test_work_is_shared_equally():
    lengths = np.clip(100 * np.exp(np.random.default_rng(0).standard_normal(256)), 2, 900).astype(int)
    staged = stage(rows_of_lengths(*lengths), 8)
    tokens = [shard.num_tokens for shard in staged.shards]
    assert max(tokens) / (sum(tokens) / 8) < 1.02
