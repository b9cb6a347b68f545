"""Rows that share computation, and how they are dealt to ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from skyrl_train.batch.layouts.cost import CostModel
from skyrl_train.batch.layouts.layout import make_layout, packed_layout, shared_layout
from skyrl_train.batch.planner.balance import balance_groups, shard_rows
from skyrl_train.batch.planner.rows import RowFacts, facts_of
from skyrl_train.batch.steps.minibatch import Together, computed_together, stage
from skyrl_train.batch.training_batch import TrainingInputBatch
from tests.support.layout_cases import Row, batch_of_rows, tree_batch


def samples(*prompts: tuple[int, list[int]]) -> TrainingInputBatch:
    """For each `(tokens of the prompt, tokens of each response)`, rows that differ from the first response token on."""
    rows: list[Row] = []
    facts = []
    for number, (length, responses) in enumerate(prompts):
        prompt = [10 + number] * length
        for sample, response in enumerate(responses):
            rows.append((prompt + [20 + sample] * response, [False] * length + [True] * response))
            facts.append((number, len(rows), 0, True, False))
    return batch_of_rows(rows, facts)


def turns(*, extends: bool) -> TrainingInputBatch:
    """Two trajectories of one prompt; the second turn of the first goes on where the first ended, or does not."""
    second = [7, 7, 30, 31] if extends else [7, 7, 32, 31]
    rows = [([7, 7, 30], 2), ([*second, 33], 4), ([7, 7, 40], 2)]
    facts = [(0, 0, 0, False, False), (0, 0, 1, True, False), (0, 1, 0, True, False)]
    return batch_of_rows([(ids, [False] * n + [True] * (len(ids) - n)) for ids, n in rows], facts)


@pytest.mark.parametrize(
    ("layout", "merge", "together"),
    [
        ("padded", False, "row"),
        ("packed", True, "trajectory"),
        ("prefix_shared", False, "prompt"),
        ("auto", True, "prompt"),
    ],
)
def test_what_a_layout_computes_together(layout: str, merge: bool, together: str) -> None:
    assert computed_together(layout, merge_turns=merge) == together  # type: ignore[arg-type]


def in_a_tree(batch: TrainingInputBatch) -> RowFacts:
    return facts_of(batch, layout="prefix_shared", merge_turns=False)


def merged(batch: TrainingInputBatch) -> RowFacts:
    return facts_of(batch, layout="packed", merge_turns=True)


def test_samples_share_their_prompt() -> None:
    facts = in_a_tree(samples((3, [1, 2]), (2, [4])))
    assert (facts.order.tolist(), facts.shared.tolist()) == ([0, 1, 2], [0, 3, 0])
    assert facts.num_distinct == 3 + 1 + 2 + 2 + 4


def test_turns_share_all_of_the_turn_before_or_the_prompt() -> None:
    assert in_a_tree(turns(extends=True)).shared.tolist() == [0, 3, 2]
    assert in_a_tree(turns(extends=False)).shared.tolist() == [0, 2, 2]


def test_where_turns_are_merged_trajectories_share_nothing() -> None:
    assert merged(turns(extends=True)).hosts.tolist() == [1, 1, 2]
    assert merged(turns(extends=False)).hosts.tolist() == [0, 1, 2]
    assert not merged(turns(extends=True)).shared.any()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 1000))
def test_the_facts_of_some_rows_are_those_of_the_rows_alone(seed: int, other: int) -> None:
    """What a dry run takes of its rows for a rank is what the rank finds in its shard."""
    batch = tree_batch(seed)
    kept = batch.take((~batch["is_padding"]).nonzero().squeeze(1))
    assert in_a_tree(kept).num_distinct == shared_layout(kept).num_positions
    assert merged(kept).num_distinct == packed_layout(kept, merge=True).num_positions
    generator = torch.Generator().manual_seed(other)
    chosen = torch.randperm(kept.num_rows, generator=generator)[: 1 + other % kept.num_rows]
    alone, taken = in_a_tree(kept.take(chosen)), in_a_tree(kept).take(chosen.numpy())
    assert taken.lengths.tolist() == alone.lengths.tolist()
    assert (taken.shared.sum(), taken.num_distinct) == (alone.shared.sum(), alone.num_distinct)
    assert taken.prompts.tolist() == alone.prompts.tolist()
    in_turns = chosen.sort().values
    expected = make_layout(kept.take(in_turns), "packed", merge=True).num_positions
    # Of a conversation whose turn in between is elsewhere, the facts know what one forward of all turns would share.
    assert merged(kept).take(in_turns.numpy()).num_distinct >= expected


def test_dummy_rows_share_nothing() -> None:
    taken = in_a_tree(samples((3, [1, 2]))).take(np.array([2, 1, 0, 3]))
    assert (taken.lengths.tolist(), taken.loss_tokens.tolist()) == ([2, 5, 4, 2], [0, 2, 1, 0])
    assert (taken.order.tolist(), taken.shared.tolist()) == ([2, 1, 0, 3], [0, 3, 0, 0])
    assert len(set(taken.prompts.tolist())) == 3


def test_rows_without_loss_count_as_one_token() -> None:
    batch = samples((3, [1, 2, 3]))
    masked = batch.with_columns(loss_mask=batch["loss_mask"] & (torch.arange(batch.num_tokens) < 9))
    (rows,), loads = shard_rows(in_a_tree(masked), 1, CostModel(per_pair=0.0))
    assert (rows.tolist(), loads.tolist()) == ([0, 1, 2], [4 + 5 + 1])


def test_samples_stay_together_where_that_is_level() -> None:
    batch = samples(*[(50, [10, 20, 30, 40])] * 6)
    shards = stage(batch, 3, together="prompt").shards
    assert [sorted(set(shard.metadata.uids)) for shard in shards] == [["p0", "p3"], ["p1", "p4"], ["p2", "p5"]]


def test_a_prompt_is_cut_where_ranks_would_wait() -> None:
    shards = stage(samples((10, [30] * 8)), 4, together="prompt").shards
    assert [shard.num_rows for shard in shards] == [2, 2, 2, 2]


def test_it_is_not_cut_where_the_prompt_is_most_of_it() -> None:
    """Cut in two, the busiest of three ranks would still compute the prompt and a response token."""
    places, _ = balance_groups(np.array([1000.0, 1.0]), np.array([0.0, 999.0]), np.array([0, 2]), 3)
    assert sorted(map(len, places)) == [0, 0, 2]


def test_a_rank_without_a_group_gets_a_dummy_row() -> None:
    staged = stage(samples((1000, [1, 1])), 3, together="prompt")
    assert [shard.num_rows for shard in staged.shards] == [2, 1, 1]
    assert staged.num_dummy_rows == 2
    assert [bool(shard["is_padding"].all()) for shard in staged.shards] == [False, True, True]


def test_where_nothing_is_shared_ranks_have_equal_numbers_of_rows() -> None:
    shards = stage(samples((3, [5]), (3, [50]), (3, [5]), (3, [6])), 2, together="prompt").shards
    assert [shard.num_rows for shard in shards] == [2, 2]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 6), st.sampled_from(["trajectory", "prompt"]))
def test_collecting_restores_the_order(seed: int, dp_size: int, together: Together) -> None:
    batch = tree_batch(seed)
    staged = stage(batch, dp_size, together=together)
    assert torch.equal(staged.collect([shard["input_ids"] for shard in staged.shards]), batch["input_ids"])
    assert all(shard.num_rows for shard in staged.shards)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.lists(st.integers(1, 40), min_size=1, max_size=9)), min_size=1),
    st.integers(1, 7),
)
def test_every_row_goes_to_one_rank_and_loads_are_what_it_computes(
    prompts: list[tuple[int, list[int]]], num_ranks: int
) -> None:
    sizes = [len(responses) for _, responses in prompts]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    own = np.concatenate([np.array(responses, dtype=float) for _, responses in prompts])
    again = np.repeat([float(prompt) for prompt, _ in prompts], sizes)
    again[starts[:-1]] = 0.0
    own[starts[:-1]] += [prompt for prompt, _ in prompts]
    by_rank, loads = balance_groups(own, again, starts, num_ranks)
    assert sorted(np.concatenate(by_rank).tolist()) == list(range(len(own)))
    group = np.repeat(np.arange(len(prompts)), sizes)
    for rank, places in enumerate(by_rank):
        parts = set(group[places].tolist())
        begun = {int(group[place]) for place in places if place in starts}
        repeated = sum(prompts[part][0] for part in parts - begun)
        assert loads[rank] == pytest.approx(own[places].sum() + repeated)
    assert loads.max() <= own.sum() * (1 + 1e-9)
