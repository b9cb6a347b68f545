"""Custom planners: what they are told of rows, what is checked of their answers, and that a dry run and a batch agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from skyrl_train.batch.layouts.layout import make_layout
from skyrl_train.batch.planner.forwards import MemoryAwareBatchIterator, TokenBudgets, make_micro_batch_strategy
from skyrl_train.batch.planner.rows import Forward, RowFacts
from skyrl_train.batch.training_batch import TrainingInputBatch
from skyrl_train.config import Config, TrainerConfig
from skyrl_train.config.fields import LayoutChoice, LayoutName
from skyrl_train.config.rules import validate_config
from skyrl_train.errors import BatchError
from skyrl_train.registry import reads
from skyrl_train.runs import assembler
from tests.support.batch_builders import make_batch, make_config, make_rollouts, make_trajectory, make_turn

LAYOUTS: tuple[LayoutName, ...] = ("padded", "packed", "prefix_shared")
BATCH = make_batch([("p0", 0, [7, 8, 9, 1]), ("p0", 1, [7, 8, 4]), ("p1", 2, [5, 6])])
"""The worked example of RowFacts."""


def as_told(rows: RowFacts, *, forwards: Any) -> Any:
    """Answers what the test says, whatever the rows are."""
    return forwards


@reads("memory_budget")
def greedy(rows: RowFacts, *, most: int = 1000) -> list[Forward]:
    """As many of the rows in order as fit."""
    forwards: list[Forward] = []
    taken: list[int] = []
    for row in rows.order.tolist():
        if len(taken) == most or not rows.fits([*taken, row]):
            forwards.append(Forward(taken))
            taken = []
        taken.append(row)
    return [*forwards, Forward(taken)]


def planner_of(
    plan: Callable[..., Any] | dict[str, Any],
    *,
    layout: LayoutChoice = "padded",
    tokens: int = 8192,
    merge: bool = False,
) -> MemoryAwareBatchIterator:
    spec = plan if isinstance(plan, dict) else f"test_planner:{plan.__name__}"
    return make_micro_batch_strategy(
        TrainerConfig(
            micro_batching=spec,
            layout=layout,
            max_tokens_per_microbatch=tokens,
            max_tokens_per_forward_microbatch=2 * tokens,
        ),
        merge_turns=merge,
    )


def told(forwards: Any) -> MemoryAwareBatchIterator:
    return planner_of({"_target_": "test_planner:as_told", "forwards": forwards})


def facts_of(batch: TrainingInputBatch, *, training: bool = True, **settings: Any) -> RowFacts:
    """What a planner is told of a batch."""
    SEEN.clear()
    planner_of(noting, **settings).forwards(batch, training=training)
    return SEEN[0]


SEEN: list[RowFacts] = []


def noting(rows: RowFacts) -> list[Forward]:
    """Notes what it is told."""
    SEEN.append(rows)
    return [Forward(np.arange(rows.num_rows))]


def test_a_planner_is_told_of_rows_as_the_example_says() -> None:
    facts = facts_of(BATCH, layout="prefix_shared", tokens=100)
    assert facts.lengths.tolist() == [4, 3, 2]
    assert facts.loss_tokens.tolist() == [int(row.sum()) for row in BATCH["loss_mask"].split(facts.lengths.tolist())]
    assert facts.prompts.tolist() == [0, 0, 1]
    assert facts.trajectories.tolist() == [0, 1, 2]
    assert sorted(zip(facts.order.tolist(), facts.shared.tolist())) in (
        [(0, 0), (1, 2), (2, 0)],
        [(0, 2), (1, 0), (2, 0)],
    )
    assert (facts.budget, facts_of(BATCH, training=False, tokens=100).budget) == (100, 200)
    assert [facts.positions([0, 1], layout) for layout in LAYOUTS] == [8, 7, 5]
    assert facts.positions([]) == 0


def test_rows_that_are_no_neighbours_share_the_least_of_what_lies_between_them() -> None:
    batch = make_batch([("p0", 0, [1, 2]), ("p0", 0, [1, 2, 3, 4]), ("p0", 1, [1, 5])])
    facts = facts_of(batch, layout="prefix_shared")
    assert facts.shared.tolist() == [0, 2, 1]
    assert [facts.positions(rows) for rows in ([0, 2], [2, 0], [0, 1], [1, 2], [0, 1, 2])] == [3, 3, 4, 5, 5]


def test_what_rows_share_is_told_only_where_the_layout_computes_it_once() -> None:
    facts = facts_of(BATCH, layout="packed")
    assert (facts.shared.tolist(), facts.order.tolist()) == ([0, 0, 0], [0, 1, 2])
    assert facts.positions([0, 1]) == 7


def turns_batch(turns: list[int], *, branches: list[bool]) -> TrainingInputBatch:
    """Rows of agentic rollouts as a step makes them: a row a turn, two trajectories to a prompt. Where there is a branch,
    a turn begins with another first token than the turn before, as with an edited history."""
    trajectories, edits = [], iter(branches)
    for index, count in enumerate(turns):
        context, made = [10 + index // 2, 11, 12], []
        for turn in range(count):
            if next(edits) and turn:
                context[0] += 1
            response = [20 + index, *range(30, 30 + index + turn)]
            made.append(make_turn(context, response))
            context = [*context, *response, 50 + turn]
        trajectories.append(make_trajectory(f"p{index // 2}", index % 2, *made))
    config = make_config(prompts=2, mini_batch=2, n_samples=2, step_wise=True)
    return assembler(config, rows="per_turn")(
        make_rollouts(*trajectories, n_samples=2),
        step=0,
        weight_version=0,
    )


@settings(max_examples=60, deadline=None)
@given(
    turns=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    branches=st.lists(st.booleans(), min_size=12, max_size=12),
    merge=st.booleans(),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 1000),
)
def test_positions_are_those_of_the_layout_that_computes_the_rows(
    turns: list[int], branches: list[bool], merge: bool, layout: LayoutName, seed: int
) -> None:
    batch = turns_batch(turns, branches=branches)
    facts = facts_of(batch, layout=layout, merge=merge)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(batch.num_rows, generator=generator)[: 1 + seed % batch.num_rows].sort().values
    expected = make_layout(batch.take(chosen), layout, merge=merge).num_positions
    found = facts.positions(chosen.tolist())
    # A row whose next turn is in another forward may be computed by a later one: the facts know of neighbours alone.
    whole = len(chosen) == batch.num_rows or not merge or layout == "prefix_shared"
    assert found == expected if whole else found >= expected


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    turns=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    branches=st.lists(st.booleans(), min_size=12, max_size=12),
    merge=st.booleans(),
    layout=st.sampled_from((*LAYOUTS, "auto")),
    tokens=st.integers(1, 60),
    share=st.sampled_from((0.0, 0.3, 1.05)),
)
def test_a_planner_that_asks_what_fits_keeps_within_a_budget_that_was_found(
    turns: list[int], branches: list[bool], merge: bool, layout: LayoutChoice, tokens: int, share: float
) -> None:
    batch = turns_batch(turns, branches=branches)
    budgets = TokenBudgets(training=tokens, forward=2 * tokens, cell_shares=(share, 0.0))
    strategy = planner_of(greedy, layout=layout, merge=merge).under(budgets)
    for training, cap in ((True, tokens), (False, 2 * tokens)):
        parts = list(strategy.iterate(batch, training=training))
        assert sorted(row for part in parts for row in part.rows.tolist()) == list(range(batch.num_rows))
        for part in parts:
            assert part.layout is not None
            computed = make_layout(part.batch, part.layout, merge=merge).num_positions
            assert computed <= cap or part.batch.num_rows == 1
    fewer = len(list(strategy.iterate(batch, training=True)))
    strategy.lower(max(1, tokens // 2), training=True)
    assert len(list(strategy.iterate(batch, training=True))) >= fewer
    assert strategy.budgets.of(training=False) == 2 * tokens


@pytest.mark.parametrize(
    ("forwards", "message"),
    [
        ([Forward([0]), Forward([2])], "put row 1 in 0 forwards: every row belongs in exactly one"),
        ([Forward([0, 1]), Forward([1, 2])], "put row 1 in 2 forwards"),
        ([Forward([0, 1, 3])], "named rows 0 to 3 of 3 rows"),
        ([Forward([0, -1, 1])], "named rows -1 to 1 of 3 rows"),
        ([Forward([0, 1, 2]), Forward([])], "made a forward without rows"),
        ([Forward([[0, 1, 2]])], "not of a list of row numbers"),
        ([Forward([0.0, 1.0, 2.0])], "must name rows by whole numbers; got float64"),
        ([Forward(np.array([True, True, True]))], "must name rows by whole numbers; got bool"),
        ([Forward([0, 1, 2], layout="packed")], "named the layout 'packed' where rows have padded"),
        ([], "put row 0 in 0 forwards"),
        (None, r"must return a list of Forward\(rows, layout\), but returned None"),
        ([[0, 1, 2]], r"must return a list of Forward\(rows, layout\), but returned \[\[0, 1, 2\]\]"),
    ],
)
def test_an_answer_that_cannot_be_used_is_refused_by_name(forwards: Any, message: str) -> None:
    with pytest.raises(BatchError, match=rf"trainer.micro_batching=test_planner:as_told\(.*{message}"):
        list(told(forwards).iterate(BATCH, training=True))


def test_rows_beyond_a_budget_that_was_found_are_refused_before_memory_runs_out() -> None:
    together = told([Forward([0, 1, 2])])
    found = together.under(TokenBudgets(training=11, forward=12))
    assert len(list(found.iterate(BATCH, training=False))) == 1
    with pytest.raises(
        BatchError, match=r"put 3 rows with 12 positions \(layout padded\) in one forward, where 11 were"
    ):
        list(found.iterate(BATCH, training=True))
    stated = planner_of({"_target_": "test_planner:as_told", "forwards": [Forward([0, 1, 2])]}, tokens=2)
    assert len(list(stated.iterate(BATCH, training=True))) == 1, "a stated cap is the planner's to keep"


def test_with_layout_auto_each_forward_may_have_its_own() -> None:
    planner = planner_of(
        {"_target_": "test_planner:as_told", "forwards": [Forward([1, 0]), Forward([2], "packed")]}, layout="auto"
    )
    parts = list(planner.iterate(BATCH, training=True, agree=lambda count: count + 1))
    assert [(part.rows.tolist(), part.layout) for part in parts] == [
        ([1, 0], "prefix_shared"),
        ([2], "packed"),
        ([], "packed"),
    ]
    with pytest.raises(BatchError, match="chooses among padded, packed, prefix_shared"):
        list(told([Forward([0, 1, 2], "square")]).iterate(BATCH, training=True))  # type: ignore[arg-type]


def test_a_planner_is_not_asked_about_no_rows() -> None:
    assert list(told(None).iterate(BATCH.slice(0, 0), training=True)) == []


def test_a_planner_that_reads_the_memory_budget_needs_one_and_any_other_takes_none() -> None:
    def messages(**trainer: Any) -> list[str]:
        return [str(violation) for violation in validate_config(Config(trainer=TrainerConfig(**trainer)))]

    sized = {"_target_": "test_planner:greedy", "most": 3}
    assert messages(micro_batching=sized, memory_budget_gb=1.0) == []
    (told_so,) = messages(micro_batching=sized)
    assert "memory_budget_gb: must be given with trainer.micro_batching=test_planner:greedy(most=3)" in told_so
    plain = {"_target_": "test_planner:as_told", "forwards": []}
    (told_so,) = messages(micro_batching=plain, memory_budget_gb=1.0)
    assert 'a custom one declares @reads("memory_budget")' in told_so
    (told_so,) = messages(micro_batching={"_target_": "test_planner:greedy", "mots": 3}, memory_budget_gb=1.0)
    assert "Did you mean 'most'?" in told_so
