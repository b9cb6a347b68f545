from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from batch_builders import make_batch

from skyrl_train.batch.microbatch import make_micro_batch_strategy, micro_batches
from skyrl_train.batch.planner import Forward, RowFacts
from skyrl_train.config.schema import TrainerConfig
from skyrl_train.errors import BatchError, ConfigError


def rows_of_lengths(*lengths):
    return make_batch([(f"p{index}", index, list(range(length))) for index, length in enumerate(lengths)])


@dataclass(frozen=True)
class Fixed:
    """A strategy that names the given rows."""

    parts: tuple[tuple[int, ...], ...]

    def split(self, batch, *, training):
        return [torch.tensor(part, dtype=torch.int64) for part in self.parts]


def halves(rows: RowFacts) -> list[Forward]:
    """A planner as a user would write it, named `test_microbatch:halves`."""
    return [Forward([1, 0]), Forward([2])]


def fixed(train, forward=64):
    return make_micro_batch_strategy(
        TrainerConfig(micro_train_batch_size_per_gpu=train, micro_forward_batch_size_per_gpu=forward)
    )


def test_fixed_rows_are_level_and_similar_lengths_go_together():
    parts = fixed(2).split(rows_of_lengths(2, 9, 3, 8, 5), training=True)
    assert [part.tolist() for part in parts] == [[1, 3], [4, 2], [0]]
    parts = fixed(4).split(rows_of_lengths(2, 9, 3, 8, 5), training=True)
    assert [len(part) for part in parts] == [3, 2]


def test_training_and_forward_have_their_own_sizes():
    batch = rows_of_lengths(2, 2, 2, 2)
    assert len(fixed(1, 4).split(batch, training=True)) == 4
    assert len(fixed(1, 4).split(batch, training=False)) == 1


def test_micro_batches_carry_their_rows():
    batch = rows_of_lengths(2, 4, 3)
    parts = list(micro_batches(batch, fixed(2), training=True))
    assert [part.rows.tolist() for part in parts] == [[1, 2], [0]]
    assert [part.batch.lengths.tolist() for part in parts] == [[4, 3], [2]]


def test_a_rank_with_fewer_micro_batches_runs_dummies_until_all_are_done():
    parts = list(micro_batches(rows_of_lengths(2, 2), fixed(2), training=True, agree=lambda count: count + 2))
    assert [part.rows.tolist() for part in parts] == [[0, 1], [], []]
    assert [part.batch["is_padding"].tolist() for part in parts[1:]] == [[True], [True]]
    assert not parts[1].batch["loss_mask"].any()


def test_a_rank_without_rows_runs_dummies_too():
    empty = rows_of_lengths(2).slice(0, 0)
    assert list(micro_batches(empty, fixed(2), training=True)) == []
    assert len(list(micro_batches(empty, fixed(2), training=True, agree=lambda count: 1))) == 1


def test_agreeing_on_too_few_is_refused():
    with pytest.raises(BatchError, match=r"agreed on 1 micro-batches, but this one has 2"):
        list(micro_batches(rows_of_lengths(2, 2), fixed(1), training=True, agree=lambda count: 1))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (((0,), (2,)), "put row 1 in 0 micro-batches"),
        (((0, 1), (1, 2)), "put row 1 in 2 micro-batches"),
        (((0, 1, 3),), "named rows 0 to 3 of 3 rows"),
        (((0, 1, 2), ()), "made an empty micro-batch"),
    ],
)
def test_a_strategy_that_loses_or_doubles_rows_is_refused(parts, message):
    with pytest.raises(BatchError, match=f"Fixed {message}"):
        list(micro_batches(rows_of_lengths(2, 2, 2), Fixed(parts), training=True))


def test_a_custom_planner_is_named_by_module_and_attribute():
    strategy = make_micro_batch_strategy(TrainerConfig(micro_batching="test_microbatch:halves"))
    assert [part.rows.tolist() for part in micro_batches(rows_of_lengths(2, 2, 2), strategy, training=True)] == [
        [1, 0],
        [2],
    ]


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"trainer.micro_batching: .* [Dd]id you mean 'fixed'"):
        make_micro_batch_strategy(TrainerConfig(micro_batching="fixd"))
