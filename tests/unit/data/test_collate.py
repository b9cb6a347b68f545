"""Collators: examples to a closed mini-batch, one row each or several to a row."""

from __future__ import annotations

import pytest
import torch

from skyrl_train.batch.steps import stage
from skyrl_train.data.sft.collate import DefaultCollator, PackedDataCollator
from tests.support.sft_cases import examples, indices


def test_collators_take_the_examples_that_they_are_asked_for() -> None:
    found = DefaultCollator(examples(3, 2, 4))(indices(2, 0), step=5)
    assert found.batch["input_ids"].tolist() == [21, 22, 23, 24, 1, 2, 3]
    assert found.batch.metadata.uids == ("train-2", "train-0")
    assert found.batch.metadata.global_step == 5
    assert found.denominators.num_tokens == 5
    packed = PackedDataCollator(examples(3, 2, 4), max_tokens_per_row=8)(indices(2, 0, 1), step=5)
    assert packed.batch.lengths.tolist() == [5, 4]
    assert packed.denominators.num_tokens == 6


def test_the_same_example_twice_is_two_rows() -> None:
    found = DefaultCollator(examples(3))(indices(0, 0), step=1)
    assert (found.denominators.num_sequences, found.denominators.num_tokens) == (2, 4)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_a_tail_batch_smaller_than_the_ranks_can_be_dealt_out(num_ranks: int) -> None:
    collator = PackedDataCollator(examples(3, 2), max_tokens_per_row=8, align=4, num_ranks=num_ranks)
    staged = stage(collator(indices(1, 0), step=1).batch, num_ranks)
    assert len(staged.shards) == num_ranks
    assert sum(int(shard["loss_mask"].sum()) for shard in staged.shards) == 3
    assert sum(float(shard["loss_weights"].sum()) for shard in staged.shards) == pytest.approx(1.0)


def test_collating_is_a_pure_function_of_examples_and_step() -> None:
    collator = PackedDataCollator(examples(3, 2, 4, 7, 1 + 1), max_tokens_per_row=9)
    first, second = (collator(indices(4, 0, 3, 2, 1), step=2) for _ in range(2))
    for name, column in first.batch.token_columns.items():
        assert torch.equal(column, second.batch[name])
