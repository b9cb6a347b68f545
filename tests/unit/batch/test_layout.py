"""What one forward computes of rows, and where their tokens are in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from skyrl_train.batch.layouts.cost import CostModel
from skyrl_train.batch.layouts.layout import (
    LAYOUTS,
    make_layout,
    packed_layout,
    padded_layout,
    part_of,
    shared_layout,
    spread_to_rows,
)
from skyrl_train.batch.layouts.prefix_tree import Segment, hosts_of, merge_counts, prefix_order, tree_segments
from skyrl_train.batch.planner.forwards import fixed, make_micro_batch_strategy, token_budget
from skyrl_train.batch.planner.rows import Forward, RowFacts, facts_of
from skyrl_train.batch.training_batch import TrainingInputBatch, batch_of_lengths
from skyrl_train.config import TrainerConfig

A, B, C, D, E = range(5, 10)


def rows_of(
    *rows: list[int], trajectories: list[int] | None = None, prompts: list[int] | None = None
) -> TrainingInputBatch:
    """Rows of one trajectory are its turns, in order."""
    trajectory = trajectories or list(range(len(rows)))
    steps = [trajectory[:index].count(number) for index, number in enumerate(trajectory)]
    return batch_of_lengths([len(row) for row in rows]).with_columns(
        input_ids=torch.tensor([token for row in rows for token in row], dtype=torch.int32),
        trajectory_index=torch.tensor(trajectory, dtype=torch.int32),
        step_index=torch.tensor(steps, dtype=torch.int32),
        prompt_index=torch.tensor(prompts or [0] * len(rows), dtype=torch.int32),
    )


TWO = rows_of([A, B, C], [A, B, D, E])


def test_padded_rows_lie_side_by_side() -> None:
    layout = padded_layout(TWO)
    assert layout.input_ids.tolist() == [[A, B, C, 0], [A, B, D, E]]
    assert layout.position_of_token.tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert (layout.num_positions, layout.segments, layout.is_shared) == (8, (), False)


def test_packed_rows_lie_back_to_back() -> None:
    layout = packed_layout(TWO)
    assert layout.input_ids.tolist() == [[A, B, C, A, B, D, E]]
    assert layout.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert layout.position_of_token.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert layout.segments == (Segment(0, 3, 3), Segment(3, 7, 7))


def test_shared_prefixes_are_computed_once() -> None:
    layout = shared_layout(TWO)
    assert layout.input_ids.tolist() == [[A, B, C, D, E]]
    assert layout.position_ids.tolist() == [[0, 1, 2, 2, 3]]
    assert layout.position_of_token.tolist() == [0, 1, 2, 0, 1, 3, 4]
    assert layout.segments == (Segment(0, 2, 5), Segment(2, 3, 3), Segment(3, 5, 5))
    assert layout.is_shared


@pytest.mark.parametrize(
    ("rows", "segments"),
    [
        pytest.param([[A]], [(0, 1, 1)], id="one token"),
        pytest.param([[A, B], [A, B]], [(0, 2, 2)], id="the same row twice"),
        pytest.param([[A, B], [A, B, C], [A, B, C, D]], [(0, 4, 4)], id="each extends the one before"),
        pytest.param([[A, B], [C]], [(0, 2, 2), (2, 3, 3)], id="nothing in common"),
        pytest.param(
            [[A, B, C], [A, B, D], [A, E]], [(0, 1, 5), (1, 2, 4), (2, 3, 3), (3, 4, 4), (4, 5, 5)], id="two depths"
        ),
        pytest.param([[A, B], [A, B, C], [A, B, D]], [(0, 2, 4), (2, 3, 3), (3, 4, 4)], id="a row ends at a branch"),
    ],
)
def test_segments_end_where_rows_branch(rows: list[list[int]], segments: list[tuple[int, int, int]]) -> None:
    order = prefix_order([np.array(row, dtype=np.int32) for row in rows])
    assert list(map(tuple, tree_segments(order))) == segments


ROWS = st.lists(st.lists(st.sampled_from([A, B]), min_size=1, max_size=9), min_size=1, max_size=12)


@given(rows=ROWS)
def test_every_token_finds_itself_and_its_ancestors(rows: list[list[int]]) -> None:
    layout = shared_layout(rows_of(*rows))
    reach = np.concatenate([np.full(s.stop - s.start, s.subtree_stop) for s in layout.segments])
    ids, at = layout.input_ids[0].tolist(), iter(layout.position_of_token.tolist())
    for row in rows:
        path = [next(at) for _ in row]
        assert [ids[position] for position in path] == row
        assert [key for key in range(path[-1] + 1) if path[-1] < reach[key]] == path
    assert layout.num_positions == len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})


def test_turns_that_extend_one_another_are_computed_in_the_last() -> None:
    rows = rows_of([A, B], [A, B, C], [A, B, C, D], [A, E], trajectories=[0, 0, 0, 1])
    assert hosts_of(rows).tolist() == [2, 2, 2, 3]
    assert merge_counts(rows) == (2, 0)
    layout = packed_layout(rows, merge=True)
    assert layout.input_ids.tolist() == [[A, B, C, D, A, E]]
    assert layout.position_of_token.tolist() == [0, 1, 0, 1, 2, 0, 1, 2, 3, 4, 5]


def test_a_turn_that_does_not_extend_the_one_before_starts_anew() -> None:
    rows = rows_of([A, B], [A, B, C], [A, D], [A, D, E], trajectories=[0, 0, 0, 0])
    assert hosts_of(rows).tolist() == [1, 1, 3, 3]
    assert merge_counts(rows) == (2, 1)


def test_only_turns_of_one_trajectory_are_merged() -> None:
    assert hosts_of(rows_of([A, B], [A, B, C])).tolist() == [0, 1]


def test_rows_that_were_packed_of_sequences_stay_apart() -> None:
    rows = rows_of([A, B, A, C]).with_columns(position_ids=torch.tensor([0, 1, 0, 1], dtype=torch.int32))
    assert packed_layout(rows).segments == (Segment(0, 2, 2), Segment(2, 4, 4))
    assert shared_layout(rows).position_of_token.tolist() == [0, 1, 0, 2]
    assert padded_layout(rows).position_ids.tolist() == [[0, 1, 0, 1]]


def test_values_go_back_to_their_rows_with_their_gradient() -> None:
    values = torch.arange(1.0, 8.0, requires_grad=True)
    spread = spread_to_rows(values, TWO)
    assert spread.tolist() == [[1, 2, 3, 0], [4, 5, 6, 7]]
    (spread * torch.tensor([[1.0, 0, 0, 9], [0, 2, 0, 0]])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1, 0, 0, 0, 2, 0, 0]


def forwards_of(
    rows: TrainingInputBatch, layout: str, *, tokens: int = 0, num_rows: int = 0, merge: bool = False
) -> tuple[RowFacts, list[Forward]]:
    """Under a cap of tokens or of rows."""
    facts = facts_of(rows, layout=layout, merge_turns=merge)  # type: ignore[arg-type]
    if num_rows:
        return facts, fixed(replace(facts, max_rows=num_rows))
    return facts, token_budget(replace(facts, budget=tokens))


def split(rows: TrainingInputBatch, layout: str, **limits: Any) -> list[list[int]]:
    return sorted(sorted(np.asarray(forward.rows).tolist()) for forward in forwards_of(rows, layout, **limits)[1])


GROUPS = rows_of([A, B, C], [D, D, D], [A, B, D], [D, D, E], prompts=[0, 1, 0, 1])


def test_rows_of_a_prompt_stay_together_and_count_what_they_do_not_share() -> None:
    assert split(GROUPS, "prefix_shared", tokens=4) == [[0, 2], [1, 3]]
    assert split(GROUPS, "prefix_shared", tokens=8) == [[0, 1, 2, 3]]
    assert split(GROUPS, "prefix_shared", num_rows=2) == [[0, 2], [1, 3]]


def test_a_group_over_the_cap_is_cut_between_rows() -> None:
    assert split(GROUPS, "prefix_shared", tokens=3) == [[0], [1], [2], [3]]


def test_merged_turns_count_as_the_row_that_computes_them() -> None:
    rows = rows_of([A, B], [A, B, C], [D, E], [D, E, A, B], trajectories=[0, 0, 1, 1])
    assert split(rows, "packed", tokens=7, merge=True) == [[0, 1, 2, 3]]
    assert split(rows, "packed", tokens=6, merge=True) == [[0, 1], [2, 3]]


@pytest.mark.slow
@given(rows=ROWS, cap=st.integers(2, 30))
def test_the_predicted_positions_are_those_computed_and_within_the_cap(rows: list[list[int]], cap: int) -> None:
    batch = rows_of(*rows)
    for name, merge in (("packed", True), ("packed", False), ("prefix_shared", False)):
        facts, forwards = forwards_of(batch, name, tokens=cap, merge=merge)
        assert sorted(int(row) for forward in forwards for row in forward.rows) == list(range(len(rows)))
        for forward in forwards:
            layout = LAYOUTS[name](batch.take(torch.as_tensor(forward.rows)), merge=merge)  # type: ignore[index]
            assert layout.num_positions == facts.positions(forward.rows)
            assert layout.num_positions <= cap or len(forward.rows) == 1 or merge


def auto(rows: TrainingInputBatch) -> str:
    trainer = TrainerConfig(layout="auto", micro_batching="token_budget")
    (forward,) = make_micro_batch_strategy(trainer, merge_turns=True).forwards(rows, training=True)
    return str(forward.layout)


def test_auto_shares_long_prefixes() -> None:
    long = list(range(3, 103))
    assert auto(rows_of([*long, A, B], [*long, C, D])) == "prefix_shared"


def test_auto_packs_rows_of_different_lengths_that_share_nothing() -> None:
    assert auto(rows_of([A] * 100, [B] * 4, [C] * 4)) == "packed"


def test_auto_pads_short_rows_of_one_length() -> None:
    assert auto(rows_of([A, A, A], [B, B, B], [C, C, C])) == "padded"


def test_what_forwards_compute_is_counted_for_each_layout() -> None:
    facts = facts_of(TWO, layout="auto", merge_turns=False)
    both, cost = [np.array([0, 1])], CostModel(per_pair=0.5, per_call=10.0)
    expected = {"padded": 8 + 0.5 * 20 + 10, "packed": 7 + 0.5 * (6 + 10) + 20, "prefix_shared": 5 + 0.5 * (6 + 7) + 30}
    for name, number in expected.items():
        sizes = facts.sizes(both, name)  # type: ignore[arg-type]
        assert cost.of(sizes.positions, sizes.pairs, sizes.calls).tolist() == [number]


class Half:
    """The first or the second of two ranks that share a forward; all there is to it where nothing is exchanged."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError

    def to_positions(self, out: Tensor) -> Tensor:
        raise NotImplementedError

    def combine(self, values: Tensor) -> Tensor:
        raise NotImplementedError


def test_ranks_that_share_a_forward_have_columns_of_padded_rows() -> None:
    first, second = (part_of(padded_layout(TWO), Half(rank)) for rank in range(2))
    assert (first.input_ids.tolist(), second.input_ids.tolist()) == ([[A, B], [A, B]], [[C, 0], [D, E]])
    assert (first.position_ids.tolist(), second.position_ids.tolist()) == ([[0, 1], [0, 1]], [[2, 3], [2, 3]])
    assert first.locate(first.position_of_token).tolist() == [0, 1, -1, 2, 3, -1, -1]
    assert second.locate(second.position_of_token).tolist() == [-1, -1, 0, -1, -1, 2, 3]
    assert (first.num_positions, first.longest) == (8, 4)


def test_a_row_that_does_not_divide_over_the_ranks_is_filled_up_with_a_segment_of_its_own() -> None:
    first, second = (part_of(shared_layout(TWO), Half(rank)) for rank in range(2))
    assert (first.input_ids.tolist(), second.input_ids.tolist()) == ([[A, B, C]], [[D, E, 0]])
    assert first.segments == second.segments == (*shared_layout(TWO).segments, Segment(5, 6, 6))
    assert second.locate(second.position_of_token).tolist() == [-1, -1, -1, -1, -1, 0, 1]
    assert second.own_columns(torch.arange(6)).tolist() == [[3, 4, 5]]


def test_positions_of_padded_rows_are_those_of_the_filled_rows() -> None:
    layout = part_of(padded_layout(rows_of([A, B, C], [A])), Half(1))
    assert layout.input_ids.tolist() == [[C, 0], [0, 0]]
    assert layout.position_of_token.tolist() == [0, 1, 2, 4]


def test_padded_rows_of_several_sequences_are_shared_out_packed() -> None:
    rows = rows_of([A, B, A, B]).with_columns(position_ids=torch.tensor([0, 1, 0, 1], dtype=torch.int32))
    assert make_layout(rows, "padded").name == "padded"
    assert make_layout(rows, "padded", group=Half(0)).segments == (Segment(0, 2, 2), Segment(2, 4, 4))
