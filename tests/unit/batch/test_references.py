"""Batches whose token columns lie elsewhere are the batches that they would be here, whatever is done with them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.plane import Layer, Piece, RowSharing, by_reference
from skyrl_train.batch.planner.rows import facts_of
from skyrl_train.batch.steps import Together, close_mini_batch, stage
from skyrl_train.errors import BatchError
from tests.support.batch_builders import make_batch as make_rows
from tests.support.learner_cases import make_batch

LENGTHS = [9, 4, 12, 7, 5, 16, 8]


class Counted:
    """Arrays elsewhere, which count how often they are read."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._arrays, self.num_reads = arrays, 0

    def read(self) -> Mapping[str, NDArray[Any]]:
        self.num_reads += 1
        return self._arrays


def piece(batch: TrainingInputBatch, rows: list[int]) -> Piece:
    part = batch.take(rows)
    return Piece(Counted({name: each.numpy() for name, each in part.token_columns.items()}), part.row_offsets.numpy())


def referenced(batch: TrainingInputBatch, order: list[int], cuts: list[int]) -> TrainingInputBatch:
    """The batch, its rows in pieces that hold them in another order."""
    bounds = [0, *sorted({cut % len(order) for cut in cuts} - {0}), len(order)]
    pieces = [piece(batch, order[start:stop]) for start, stop in pairwise(bounds)]
    dtypes = {name: column.dtype for name, column in batch.token_columns.items()}
    return by_reference(Layer.of(pieces, dtypes, np.array(order)), batch)


def sources(batch: TrainingInputBatch) -> list[Counted]:
    return [each.source for layer in batch.token_columns.layers for each in layer.pieces]  # type: ignore[attr-defined]


def require_equal(found: TrainingInputBatch, expected: TrainingInputBatch) -> None:
    assert {*found.token_columns} == {*expected.token_columns}
    assert found.num_tokens == expected.num_tokens
    assert torch.equal(found.row_offsets, expected.row_offsets)
    assert torch.equal(found.loss_tokens(), expected.loss_tokens())
    here = found.here()
    for name, column in expected.token_columns.items():
        assert torch.equal(found[name], column), name
        assert torch.equal(here[name], column), name
        assert found[name].dtype == column.dtype, name
    for name, column in expected.row_columns.items():
        assert torch.equal(found[name], column), name
    assert found.metadata == expected.metadata


@pytest.mark.slow
@given(
    order=st.permutations(range(len(LENGTHS))),
    cuts=st.lists(st.integers(0, 6), max_size=3),
    rows=st.lists(st.integers(0, len(LENGTHS) - 1), min_size=1, max_size=12),
    dummies=st.integers(0, 3),
    bounds=st.tuples(st.integers(0, 12), st.integers(0, 12)),
)
def test_rows_are_taken_padded_and_cut_as_those_that_are_here(
    order: list[int], cuts: list[int], rows: list[int], dummies: int, bounds: tuple[int, int]
) -> None:
    here = make_batch(LENGTHS, dtype=torch.float32)
    there = referenced(here, order, cuts)
    require_equal(there, here)
    start, stop = sorted(min(each, len(rows)) for each in bounds)

    def changed(batch: TrainingInputBatch) -> TrainingInputBatch:
        taken = batch.take(rows).pad_rows(dummies, uid="dummy")
        weighed = taken.with_spread("loss_weights", torch.arange(taken.num_rows, dtype=torch.float64) / 3)
        return weighed.with_columns(values=torch.arange(taken.num_tokens, dtype=torch.float32)).slice(start, stop)

    found, expected = changed(there), changed(here)
    if expected.num_rows:
        require_equal(found, expected)
        require_equal(
            found.without_columns("values", "loss_weights"), expected.without_columns("values", "loss_weights")
        )
        require_equal(pickle.loads(pickle.dumps(found)), expected)
        torch.testing.assert_close(found.padded("rewards"), expected.padded("rewards"), rtol=0, atol=0)


def test_planning_a_step_reads_no_token() -> None:
    here = make_batch(LENGTHS, dtype=torch.float32)
    there = referenced(here, [3, 0, 1, 2, 6, 5, 4], [2, 5])

    def staged(batch: TrainingInputBatch) -> list[TrainingInputBatch]:
        closed = close_mini_batch(batch, loss_reduction="sequence_mean", max_sequence_length_for_norm=16)
        return list(stage(closed.batch, 3).shards)

    shards = staged(there)
    assert [each.num_reads for each in sources(there)] == [0, 0, 0]
    for found, expected in zip(shards, staged(here), strict=True):
        require_equal(found, expected)
    facts = facts_of(there, layout="packed", merge_turns=False)
    np.testing.assert_array_equal(facts.loss_tokens, facts_of(here, layout="packed", merge_turns=False).loss_tokens)


@pytest.mark.parametrize("together", ["trajectory", "prompt"])
def test_what_rows_share_is_known_without_their_tokens(together: Together) -> None:
    ids = [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 2, 9, 9], [7, 7], [7, 8, 8, 8, 8], [1, 2], [1, 2, 3], [1, 2, 3, 4]]
    here = make_rows([("abbccdde"[row], [0, 0, 1, 2, 3, 4, 4, 5][row], tokens) for row, tokens in enumerate(ids)])
    merges = together == "trajectory"
    facts = facts_of(here, layout="packed" if merges else "prefix_shared", merge_turns=merges)
    whole = Layer.of([piece(here, list(range(8)))], {name: each.dtype for name, each in here.token_columns.items()})
    there = by_reference(whole, here, RowSharing(facts=facts, merge_turns=merges, rows=np.arange(8)))
    for start, stop in [(0, 8), (1, 7), (3, 5)]:
        found, expected = (stage(each.slice(start, stop), 2, together=together) for each in (there, here))
        assert found.order.tolist() == expected.order.tolist()
        assert sources(there)[0].num_reads == 0
        assert torch.equal(found.row_offsets, expected.row_offsets)


def test_a_share_holds_only_the_pieces_that_its_rows_lie_in_and_reads_each_once() -> None:
    here = make_batch(LENGTHS, dtype=torch.float32)
    there = referenced(here, list(range(7)), [2, 5])
    share = there.take([0, 1, 6])
    assert len(sources(share)) == 2
    share.here()
    assert [each.num_reads for each in sources(there)] == [1, 0, 1]


def test_scores_of_the_last_rows_are_pad_values_before_them() -> None:
    here = make_batch(LENGTHS, dtype=torch.float32)
    there = referenced(here, list(range(7)), [3])
    offsets = (here.row_offsets[4:] - here.row_offsets[4]).numpy()
    scores = np.arange(offsets[-1], dtype=np.float32)
    layer = Layer.of([Piece(Counted({"ref_logprobs": scores}), offsets)], {"ref_logprobs": torch.float32}).behind(4)
    found = there.with_layer(layer)["ref_logprobs"]
    assert not found[: here.row_offsets[4]].any()
    np.testing.assert_array_equal(found[int(here.row_offsets[4]) :].numpy(), scores)
    with pytest.raises(BatchError, match="with_columns"):
        here.with_layer(layer)


def test_a_column_that_some_pieces_lack_has_what_it_stands_for() -> None:
    here = make_batch(LENGTHS, dtype=torch.float32).without_columns("response_mask")
    whole = piece(here, list(range(7)))
    dtypes = {name: column.dtype for name, column in here.token_columns.items()}
    dtypes |= {"response_mask": torch.bool, "weight_version": torch.int32}
    layer = Layer.of([whole], dtypes)
    with_absent = Layer(
        dtypes=layer.dtypes,
        pieces=layer.pieces,
        piece_of_row=layer.piece_of_row,
        row_in_piece=layer.row_in_piece,
        absent={"weight_version": 7},
    )
    found = by_reference(with_absent, here)
    assert torch.equal(found["response_mask"], here["loss_mask"])
    assert found["weight_version"].tolist() == [7] * here.num_tokens


def test_another_loss_mask_changes_what_is_known_of_the_rows() -> None:
    here = make_batch(LENGTHS, dtype=torch.float32)
    there = referenced(here, list(range(7)), [3])
    mask = torch.zeros(here.num_tokens, dtype=torch.bool)
    mask[3] = True
    assert there.with_columns(loss_mask=mask).loss_tokens().tolist() == [1, 0, 0, 0, 0, 0, 0]
