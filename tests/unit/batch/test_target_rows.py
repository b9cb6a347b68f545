"""Rows of examples that state their targets, and what of them is computed once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from skyrl_train.batch.planner import facts_of
from skyrl_train.batch.planner.forwards import token_budget
from skyrl_train.batch.steps import Targets, rows_of_targets


def example(*tokens: int) -> Targets:
    """One that predicts each next token."""
    ids = np.array(tokens)
    ones = np.ones(len(ids) - 1, np.float32)
    return Targets(token_ids=ids[:-1], targets=ids[1:], weights=ones, old_logprobs=-ones, advantages=ones)


def test_what_examples_begin_with_is_computed_once_in_a_forward_that_holds_no_two_of_them_apart() -> None:
    prompt = list(range(100, 140))
    batch = rows_of_targets([example(*prompt, answer, answer + 1) for answer in range(8)]).batch
    assert batch is not None
    rows = replace(facts_of(batch, layout="auto", merge_turns=False), budget=60)
    (forward,) = token_budget(rows)
    assert forward.layout == "prefix_shared"
    assert rows.positions(forward.rows, "prefix_shared") == 40 + 8 * 2


def test_examples_that_have_nothing_in_common_fill_forwards_as_if_each_stood_alone() -> None:
    batch = rows_of_targets([example(*range(start, start + 20)) for start in range(0, 200, 20)]).batch
    assert batch is not None
    rows = replace(facts_of(batch, layout="auto", merge_turns=False), budget=60)
    assert sorted(len(forward.rows) for forward in token_budget(rows)) == [1, 3, 3, 3]
