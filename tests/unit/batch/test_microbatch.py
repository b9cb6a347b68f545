from __future__ import annotations

import pytest

from skyrl_train.batch.planner.forwards import MemoryAwareBatchIterator, TokenBudgets, make_micro_batch_strategy
from skyrl_train.batch.planner.rows import Forward, RowFacts
from skyrl_train.config import TrainerConfig
from skyrl_train.errors import BatchError, ConfigError
from tests.support.batch_builders import make_batch


def rows_of_lengths(*lengths):
    return make_batch([(f"p{index}", index, list(range(length))) for index, length in enumerate(lengths)])


def naming(*parts):
    """A planner that names the given rows."""
    return MemoryAwareBatchIterator(
        TokenBudgets(training=1, forward=1), plan=lambda _: [Forward(part) for part in parts], name="mine"
    )


def halves(rows: RowFacts) -> list[Forward]:
    """A planner as a user would write it, named `test_microbatch:halves`."""
    return [Forward([1, 0]), Forward([2])]


def fixed(train, forward=64):
    return make_micro_batch_strategy(
        TrainerConfig(micro_train_batch_size_per_gpu=train, micro_forward_batch_size_per_gpu=forward)
    )


def test_fixed_rows_are_level_and_similar_lengths_go_together():
    parts = fixed(2).forwards(rows_of_lengths(2, 9, 3, 8, 5), training=True)
    assert [part.rows.tolist() for part in parts] == [[1, 3], [4, 2], [0]]
    parts = fixed(4).forwards(rows_of_lengths(2, 9, 3, 8, 5), training=True)
    assert [len(part.rows) for part in parts] == [3, 2]


def test_training_and_forward_have_their_own_sizes():
    batch = rows_of_lengths(2, 2, 2, 2)
    assert len(fixed(1, 4).forwards(batch, training=True)) == 4
    assert len(fixed(1, 4).forwards(batch, training=False)) == 1


def test_micro_batches_carry_their_rows():
    batch = rows_of_lengths(2, 4, 3)
    parts = list(fixed(2).iterate(batch, training=True))
    assert [part.rows.tolist() for part in parts] == [[1, 2], [0]]
    assert [part.batch.lengths.tolist() for part in parts] == [[4, 3], [2]]


def test_a_rank_with_fewer_micro_batches_runs_dummies_until_all_are_done():
    parts = list(fixed(2).iterate(rows_of_lengths(2, 2), training=True, agree=lambda count: count + 2))
    assert [part.rows.tolist() for part in parts] == [[0, 1], [], []]
    assert [part.batch["is_padding"].tolist() for part in parts[1:]] == [[True], [True]]
    assert not parts[1].batch["loss_mask"].any()


def test_a_rank_without_rows_runs_dummies_too():
    empty = rows_of_lengths(2).slice(0, 0)
    assert list(fixed(2).iterate(empty, training=True)) == []
    assert len(list(fixed(2).iterate(empty, training=True, agree=lambda count: 1))) == 1


def test_agreeing_on_too_few_is_refused():
    with pytest.raises(BatchError, match=r"agreed on 1 micro-batches, but this one has 2"):
        list(fixed(1).iterate(rows_of_lengths(2, 2), training=True, agree=lambda count: 1))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (((0,), (2,)), "put row 1 in 0 forwards"),
        (((0, 1), (1, 2)), "put row 1 in 2 forwards"),
        (((0, 1, 3),), "named rows 0 to 3 of 3 rows"),
        (((0, 1, 2), ()), "made a forward without rows"),
    ],
)
def test_a_strategy_that_loses_or_doubles_rows_is_refused(parts, message):
    with pytest.raises(BatchError, match=f"mine {message}"):
        list(naming(*parts).iterate(rows_of_lengths(2, 2, 2), training=True))


def test_a_custom_planner_is_named_by_module_and_attribute():
    strategy = make_micro_batch_strategy(TrainerConfig(micro_batching="test_microbatch:halves"))
    assert [part.rows.tolist() for part in strategy.iterate(rows_of_lengths(2, 2, 2), training=True)] == [
        [1, 0],
        [2],
    ]


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"trainer.micro_batching: .* [Dd]id you mean 'fixed'"):
        make_micro_batch_strategy(TrainerConfig(micro_batching="fixd"))
