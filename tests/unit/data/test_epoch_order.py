"""The order of an epoch is a function of the seed and the epoch; every row is used as often as its weight says."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from skyrl_train.data.sft.step_stream import EpochOrder
from skyrl_train.errors import ConfigError


def epoch_of(order: EpochOrder, epoch: int) -> list[int]:
    order.start_epoch(epoch)
    size = order.num_examples
    return order.examples(epoch * size, (epoch + 1) * size).tolist()


def test_without_shuffling_the_sources_follow_each_other() -> None:
    order = EpochOrder([2, 3], weights=[1, 1], shuffle=False, seed=0)
    assert epoch_of(order, 0) == epoch_of(order, 7) == [0, 1, 2, 3, 4]


def test_a_shuffled_epoch_has_every_example_once_and_another_order_each_time() -> None:
    order = EpochOrder([4, 6], weights=[1, 1], shuffle=True, seed=0)
    epochs = [epoch_of(order, epoch) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    of_the_first_source = [[row < 4 for row in epoch] for epoch in epochs]
    assert of_the_first_source[0] != of_the_first_source[1] != of_the_first_source[2]


def test_the_order_is_that_of_seed_and_epoch_however_it_is_reached() -> None:
    there = EpochOrder([50], weights=[1], shuffle=True, seed=3)
    epochs = [epoch_of(there, epoch) for epoch in range(4)]
    assert epoch_of(there, 1) == epochs[1]
    assert epoch_of(EpochOrder([50], weights=[1], shuffle=True, seed=3), 2) == epochs[2]
    assert epoch_of(EpochOrder([50], weights=[1], shuffle=True, seed=4), 2) != epochs[2]


def test_the_order_is_the_same_on_every_machine() -> None:
    assert epoch_of(EpochOrder([8], weights=[1], shuffle=True, seed=0), 0) == [4, 1, 7, 5, 3, 0, 2, 6]


def test_half_a_source_an_epoch_uses_each_row_every_second_epoch() -> None:
    order = EpochOrder([4, 2], weights=[0.5, 2], shuffle=True, seed=0)
    assert order.num_examples == 6
    first, second = epoch_of(order, 0), epoch_of(order, 1)
    assert sorted(row for row in first + second if row < 4) == [0, 1, 2, 3]
    assert Counter(row for row in first if row >= 4) == {4: 2, 5: 2}


@pytest.mark.parametrize("weight", [0.3, 0.9, 1.7])
def test_after_any_number_of_epochs_rows_differ_in_use_by_at_most_one(weight: float) -> None:
    order = EpochOrder([10], weights=[weight], shuffle=True, seed=1)
    used: Counter[int] = Counter(dict.fromkeys(range(10), 0))
    for epoch in range(7):
        used.update(epoch_of(order, epoch))
        assert max(used.values()) - min(used.values()) <= 1
        assert used.total() == (epoch + 1) * round(10 * weight)


def test_a_weight_of_zero_leaves_a_source_out() -> None:
    assert epoch_of(EpochOrder([2, 2], weights=[0, 1], shuffle=False, seed=0), 0) == [2, 3]


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (5, 6), (3, 6), (10, 11)])
def test_positions_of_another_epoch_are_refused_rather_than_guessed(start: int, stop: int) -> None:
    order = EpochOrder([5], weights=[1], shuffle=True, seed=0)
    order.start_epoch(2 if start == 5 or stop == 6 else 1)
    with pytest.raises(RuntimeError, match="while the order of epoch"):
        order.examples(start, stop)


def test_before_the_first_epoch_there_is_no_order() -> None:
    with pytest.raises(RuntimeError, match="the order of epoch -1 is held"):
        EpochOrder([5], weights=[1], shuffle=True, seed=0).examples(0, 1)


def test_what_is_handed_out_does_not_change_with_the_next_epoch() -> None:
    order = EpochOrder([5], weights=[1], shuffle=True, seed=0)
    order.start_epoch(0)
    found = order.examples(0, 5)
    before = found.tolist()
    order.start_epoch(1)
    assert found.tolist() == before


@pytest.mark.parametrize(
    ("weights", "message"),
    [([1.0, 1.0], "must be one for each of the 1 sources"), ([0.1], "must leave an example in an epoch")],
)
def test_weights_that_do_not_fit_are_refused(weights: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=f"data.weights: {message}"):
        EpochOrder([4], weights=weights, shuffle=True, seed=0)


def test_large_epochs_are_quick() -> None:
    order = EpochOrder([200_000], weights=[1], shuffle=True, seed=0)
    assert len(np.unique(np.array(epoch_of(order, 1)))) == 200_000
