"""Examples to steps: by rows, tokens or documents, across epochs, with the position as the only state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from skyrl_train.data.sft.step_stream import (
    Closing,
    EpochOrder,
    IncompleteStep,
    StepStream,
    by_documents,
    by_rows,
    by_tokens,
)
from skyrl_train.errors import ConfigError

LENGTHS = [3, 1, 4, 1, 5, 9, 2]


def stream(
    closing: Closing, incomplete: IncompleteStep, *, shuffle: bool = False, lengths: Sequence[int] = LENGTHS
) -> StepStream:
    order = EpochOrder([len(lengths)], weights=[1], shuffle=shuffle, seed=0)
    return StepStream(np.array(lengths), order, closing, incomplete)


def steps(found: StepStream, count: int, position: int = 0) -> list[list[int]]:
    taken = []
    for _ in range(count):
        step = found.take(position)
        position = step.stop
        taken.append(step.indices.tolist())
    return taken


def test_the_last_step_of_an_epoch_is_short_where_kept() -> None:
    assert steps(stream(by_rows(3), "keep"), 4) == [[0, 1, 2], [3, 4, 5], [6], [0, 1, 2]]


def test_the_last_step_of_an_epoch_is_left_out_where_dropped() -> None:
    assert steps(stream(by_rows(3), "drop"), 3) == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]


def test_the_last_step_of_an_epoch_goes_on_into_the_next_where_wrapped() -> None:
    assert steps(stream(by_rows(3), "wrap"), 5) == [[0, 1, 2], [3, 4, 5], [6, 0, 1], [2, 3, 4], [5, 6, 0]]


def test_a_step_of_more_than_an_epoch_takes_several() -> None:
    assert steps(stream(by_rows(5), "wrap", lengths=[1, 1]), 2) == [[0, 1, 0, 1, 0], [1, 0, 1, 0, 1]]


def test_a_step_of_tokens_takes_as_many_examples_as_fit_and_at_least_one() -> None:
    assert steps(stream(by_tokens(8), "keep"), 4) == [[0, 1, 2], [3, 4], [5], [6]]
    assert steps(stream(by_tokens(8), "wrap"), 4) == [[0, 1, 2], [3, 4], [5], [6, 0, 1]]


def test_a_step_of_documents_ends_with_the_round_of_micro_batches_that_reaches_them() -> None:
    closing = by_documents(4, num_ranks=1, admits=lambda rows, longest, tokens: rows <= 1 or tokens <= 5, exact=False)
    # Micro-batches of at most 5 tokens: [0, 1], [2, 3] reach 4; [4], [5], [6], then the epoch ends.
    assert steps(stream(closing, "keep"), 2) == [[0, 1, 2, 3], [4, 5, 6]]
    two_ranks = by_documents(2, num_ranks=2, admits=lambda rows, longest, tokens: rows <= 1 or tokens <= 5, exact=False)
    assert steps(stream(two_ranks, "keep"), 2) == [[0, 1, 2, 3], [4, 5]]
    exact = by_documents(3, num_ranks=1, admits=lambda rows, longest, tokens: rows <= 1 or tokens <= 5, exact=True)
    assert steps(stream(exact, "keep"), 3) == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize("incomplete", ["keep", "drop", "wrap"])
@pytest.mark.parametrize("closing", [by_rows(3), by_tokens(8)])
def test_the_position_is_all_that_is_needed_to_go_on(closing: Closing, incomplete: IncompleteStep) -> None:
    whole = stream(closing, incomplete, shuffle=True)
    position = 0
    for _ in range(9):
        resumed = stream(closing, incomplete, shuffle=True)
        step = whole.take(position)
        assert resumed.take(position).indices.tolist() == step.indices.tolist()
        position = step.stop


@pytest.mark.parametrize("closing", [by_rows(3), by_rows(300), by_tokens(700)])
def test_kept_or_wrapped_every_example_is_used_once_an_epoch(closing: Closing) -> None:
    lengths = [1 + index % 9 for index in range(1000)]
    for incomplete in ("keep", "wrap"):
        found, position, used = stream(closing, incomplete, shuffle=True, lengths=lengths), 0, []
        while position < 2000:
            step = found.take(position)
            used += step.indices.tolist()
            position = step.stop
        assert sorted(used[:1000]) == sorted(used[1000:2000]) == list(range(1000))


def test_a_step_that_needs_another_order_is_not_given_within_the_epoch() -> None:
    found = stream(by_rows(3), "wrap")
    first = found.take(0)
    second = found.within_epoch(first.stop)
    assert second is not None
    assert found.within_epoch(second.stop) is None  # [6, 0, 1] crosses into the next epoch
    assert stream(by_rows(3), "wrap").within_epoch(0) is None  # no epoch has begun


def test_with_short_steps_only_the_step_after_the_epoch_needs_another_order() -> None:
    found = stream(by_rows(3), "keep")
    found.take(0)
    last = found.within_epoch(6)
    assert last is not None
    assert last.indices.tolist() == [6]
    assert found.within_epoch(last.stop) is None


@pytest.mark.parametrize(
    ("closing", "incomplete", "epochs", "expected"),
    [
        (by_rows(3), "keep", 2, 6),
        (by_rows(3), "drop", 2, 4),
        (by_rows(3), "wrap", 2, 5),
        (by_rows(7), "drop", 3, 3),
        (by_rows(5), "wrap", 1, 2),
        (by_tokens(8), "keep", 1, 4),
        (by_tokens(8), "drop", 1, 3),
    ],
)
def test_steps_of_some_epochs_are_counted(
    closing: Closing, incomplete: IncompleteStep, epochs: int, expected: int
) -> None:
    assert stream(closing, incomplete).count_steps(epochs) == expected


def test_an_epoch_that_never_fills_a_step_is_refused_where_short_steps_are_dropped() -> None:
    with pytest.raises(ConfigError, match=r"data\.incomplete_step: leaves nothing: an epoch of 7 examples"):
        stream(by_rows(8), "drop").count_steps(1)
