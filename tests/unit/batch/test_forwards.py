"""Forwards of rows that share prefixes: units stay whole, and are cut where that saves forwards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from skyrl_train.batch.planner.forwards import fixed, token_budget
from skyrl_train.batch.planner.rows import RowFacts


def groups(
    prompts: int, samples: int, *, prompt: tuple[int, int] = (256, 512), median: float = 1000.0, seed: int = 0
) -> RowFacts:
    """Rows that share their prompts, with long-tailed responses, in an order in which they are neighbours."""
    rng = np.random.default_rng(seed)
    shared = np.repeat(rng.integers(*prompt, prompts, endpoint=True), samples)
    responses = np.clip(median * np.exp(rng.standard_normal(prompts * samples)), 20, 2048).astype(np.int64)
    numbers, lengths = np.arange(prompts * samples), shared + responses
    shared[::samples] = 0
    return RowFacts(
        lengths=lengths,
        loss_tokens=responses,
        prompts=numbers // samples,
        trajectories=numbers,
        order=numbers,
        shared=shared,
        hosts=numbers,
        layout="prefix_shared",
    )


def under(rows: RowFacts, share_of_a_group: float) -> RowFacts:
    """With a budget of so many mean groups."""
    mean = rows.num_distinct / (int(rows.prompts.max()) + 1)
    return replace(rows, budget=int(share_of_a_group * mean))


@pytest.mark.parametrize("samples", [8, 16])
@pytest.mark.parametrize("seed", range(3))
def test_groups_under_a_cap_of_one_and_a_half_groups_need_hardly_more_forwards_than_their_tokens_fill(
    samples: int, seed: int
) -> None:
    rows = under(groups(512, samples, seed=seed), 1.5)
    forwards = token_budget(rows)
    assert len(forwards) <= 1.05 * rows.num_distinct / rows.budget
    sizes = rows.sizes([np.asarray(forward.rows) for forward in forwards])
    assert sizes.positions.max() <= rows.budget
    assert sizes.positions.sum() <= 1.03 * rows.num_distinct


def test_groups_stay_whole_where_cutting_would_repeat_long_prompts() -> None:
    rows = under(groups(64, 8, prompt=(3000, 4000), median=200), 1.5)
    for forward in token_budget(rows):
        prompts, counts = np.unique(rows.prompts[forward.rows], return_counts=True)
        whole = np.bincount(rows.prompts)[prompts]
        # A group that exceeds the cap by itself is cut in any case.
        own = [rows.positions(np.flatnonzero(rows.prompts == prompt)) for prompt in prompts]
        assert all(count == all_of_it or size > rows.budget for count, all_of_it, size in zip(counts, whole, own))


def test_a_number_of_rows_never_cuts_a_group_that_fits() -> None:
    rows = replace(groups(12, 4), max_rows=6)
    assert all(len(np.unique(rows.prompts[forward.rows])) == 1 for forward in fixed(rows))


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.integers(1, 12),
    samples=st.integers(1, 6),
    share=st.floats(0.05, 4.0),
    median=st.sampled_from([5.0, 300.0, 1000.0]),
    seed=st.integers(0, 1000),
)
def test_every_row_is_in_one_forward_within_the_budget(
    prompts: int, samples: int, share: float, median: float, seed: int
) -> None:
    rows = under(groups(prompts, samples, median=median, seed=seed), share)
    forwards = token_budget(rows)
    assert sorted(int(row) for forward in forwards for row in forward.rows) == list(range(rows.num_rows))
    assert all(rows.fits(forward.rows) for forward in forwards)


def test_auto_takes_the_layout_that_costs_least_on_the_model() -> None:
    """Where pairs cost nothing, the fewest positions; where starting a kernel costs most, one call for all rows."""
    rows = replace(groups(4, 4), layout="auto", budget=1 << 30)
    (forward,) = token_budget(rows)
    assert forward.layout == "prefix_shared"
    (forward,) = token_budget(replace(rows, cost=replace(rows.cost, per_call=1e9)))
    assert forward.layout == "padded"
    (forward,) = token_budget(replace(rows, cost=replace(rows.cost, tree_pair=100.0)))
    assert forward.layout == "packed", "the kernel of prefix trees may be so slow that they do not pay"
