from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from skyrl_train.batch.planner.documents import document_steps, reduction_schedule
from skyrl_train.batch.planner.forwards import training_limit
from skyrl_train.config import TrainerConfig
from skyrl_train.errors import BatchError
from skyrl_train.runs import assembler
from tests.support.batch_builders import failed_trajectory, make_config, make_rollouts, make_trajectory, make_turn


def at_most(rows):
    return lambda num_rows, longest, num_tokens: num_rows <= rows


def steps_of(rows_per_document, *, target, ranks=1, rows=2, exact=False, lengths=None, has_loss=None):
    trajectory = np.repeat(np.arange(len(rows_per_document)), rows_per_document)
    lengths = np.full(len(trajectory), 4) if lengths is None else np.array(lengths)
    has_loss = np.ones(len(trajectory), dtype=bool) if has_loss is None else np.array(has_loss)
    return document_steps(
        lengths, trajectory, has_loss, docs_per_step=target, num_ranks=ranks, admits=at_most(rows), exact=exact
    )


def test_a_step_closes_after_the_micro_batch_that_reaches_the_target():
    steps = steps_of([1] * 10, target=3)
    assert [(step.start, step.stop, step.num_documents, step.overshoot) for step in steps] == [
        (0, 4, 4, 1),
        (4, 8, 4, 1),
        (8, 10, 2, 0),
    ]


def test_documents_are_summed_over_ranks_round_by_round():
    (first, second) = steps_of([1] * 12, target=5, ranks=3)
    assert (first.num_documents, first.overshoot, first.num_rounds) == (6, 1, 1)
    assert second.num_documents == 6


def test_exact_cuts_the_last_micro_batch_at_the_target():
    steps = steps_of([1] * 10, target=3, exact=True)
    assert [step.num_documents for step in steps] == [3, 3, 3, 1]
    assert [step.num_rounds for step in steps] == [2, 2, 2, 1]
    assert all(step.overshoot == 0 for step in steps)


def test_what_is_left_over_is_a_step_of_its_own_and_short_ranks_run_dummies():
    steps = steps_of([1] * 9, target=8, ranks=4)
    assert [step.num_documents for step in steps] == [8, 1]
    assert [step.num_rounds for step in steps] == [1, 1]


def test_a_document_of_several_rows_counts_once_and_stays_whole():
    steps = steps_of([3, 1, 1, 2], target=1, rows=2)
    assert [(step.start, step.stop, step.num_documents) for step in steps] == [(0, 3, 1), (3, 5, 2), (5, 7, 1)]
    assert [step.num_rounds for step in steps] == [2, 1, 1]


def test_documents_without_loss_are_neither_counted_nor_computed():
    steps = steps_of([1, 1, 1, 1], target=2, rows=1, has_loss=[False, True, False, True])
    assert [(step.start, step.stop, step.num_documents) for step in steps] == [(0, 4, 2)]
    assert steps[0].num_rounds == 2


def test_nothing_with_loss_is_no_step():
    assert steps_of([1, 1], target=2, has_loss=[False, False]) == []
    assert steps_of([], target=2) == []


def test_a_trajectory_in_two_places_is_refused():
    with pytest.raises(BatchError, match=r"trajectory 0 lie in two places"):
        document_steps(
            np.array([2, 2, 2]),
            np.array([0, 1, 0]),
            np.ones(3, dtype=bool),
            docs_per_step=1,
            num_ranks=1,
            admits=at_most(1),
        )


def test_the_target_is_positive():
    with pytest.raises(BatchError, match=r"at least 1 to close a step; got 0"):
        steps_of([1], target=0)


@given(
    documents=st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=40),
    target=st.integers(1, 12),
    ranks=st.integers(1, 5),
    rows=st.integers(1, 4),
    exact=st.booleans(),
)
def test_steps_partition_the_documents_and_overshoot_by_one_micro_batch_per_rank(documents, target, ranks, rows, exact):
    has_loss = [loss for count, loss in documents for _ in range(count)]
    counts = [count for count, _ in documents]
    trajectory = np.repeat(np.arange(len(counts)), counts)
    steps = steps_of(counts, target=target, ranks=ranks, rows=rows, exact=exact, has_loss=has_loss)
    if steps:
        assert (steps[0].start, steps[-1].stop) == (0, len(has_loss))
        assert all(step.stop == following.start for step, following in pairwise(steps))
    for number, step in enumerate(steps):
        inside = [row for row in range(step.start, step.stop) if has_loss[row]]
        assert len(set(trajectory[inside].tolist())) == step.num_documents
        if number + 1 < len(steps):
            assert step.num_documents == target if exact else step.num_documents >= target
        # A micro-batch holds at most `rows` documents, and every rank may have one that was not needed.
        assert step.overshoot < max(1, ranks * rows)
        assert step.num_rounds >= len(inside) / (ranks * rows)


def test_the_schedule_of_a_number_of_micro_batches_is_built_once():
    assert reduction_schedule(3) == (False, False, True)
    assert reduction_schedule(3) is reduction_schedule(3)
    with pytest.raises(BatchError):
        reduction_schedule(0)


def assembled(*, docs_per_step, exact=False, trainer=None):
    turns = make_turn([1, 2], [3]), make_turn([1, 2, 3, 4], [5])
    trajectories = [
        make_trajectory("a", 0, *turns),
        failed_trajectory("a", 1),
        make_trajectory("b", 0, turns[0]),
        make_trajectory("b", 1, *turns),
    ]
    config = make_config(
        prompts=2,
        mini_batch=1,
        n_samples=2,
        trainer=dict(
            docs_per_step=docs_per_step, docs_per_step_exact=exact, micro_train_batch_size_per_gpu=3, **(trainer or {})
        ),
    )
    rollouts = make_rollouts(*trajectories, n_samples=2)
    return assembler(config, rows="per_turn")(rollouts, step=0, weight_version=0)


def test_a_batch_is_assembled_with_the_steps_that_documents_close():
    assert assembled(docs_per_step=0).metadata.policy_mini_batch_boundaries == ((0, 3), (3, 6))
    assert assembled(docs_per_step=1).metadata.policy_mini_batch_boundaries == ((0, 4), (4, 6))
    assert assembled(docs_per_step=1, exact=True).metadata.policy_mini_batch_boundaries == ((0, 3), (3, 4), (4, 6))
    assert assembled(docs_per_step=9).metadata.policy_mini_batch_boundaries == ((0, 6),)


@pytest.mark.parametrize("strategy", ["token_budget", "test_microbatch:halves"])
def test_steps_close_by_the_stated_cap_under_a_custom_planner_too(strategy):
    admits = training_limit(TrainerConfig(micro_batching=strategy))
    assert admits(2, 4096, 5000)
    assert not admits(3, 4096, 5000)
