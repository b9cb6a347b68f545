"""Turns as they are kept: what they add to their parents, read-only, equal after every round trip, small."""

from __future__ import annotations

import copy
import pickle
import tracemalloc
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from skyrl_train.types import Outcome, StopReason, Trajectory, Turn, find_parent, token_ids
from tests.support.fakes_trainer import linked, make_trajectory, make_turn

BYTES_PER_TOKEN = 35


def test_a_prompt_that_continues_no_earlier_turn_is_a_root() -> None:
    """The example in the docstring of `skyrl_train.types`, and a prompt that begins with two turns."""
    turns = linked(
        make_turn([1, 1], [2, 2]),
        make_turn([1, 1, 2, 2, 3], [4]),
        make_turn([5], [6, 6]),
        make_turn([1, 1, 2, 2, 7], [8]),
    )
    assert [(turn.parent, turn.added_token_ids.tolist()) for turn in turns] == [
        (None, [1, 1]), (0, [3]), (None, [5]), (0, [7])
    ]  # fmt: skip
    parent, added = find_parent(turns, [1, 1, 2, 2, 3, 4, 9])
    assert (parent, added.tolist()) == (1, [9]), "the longest that it begins with"
    assert find_parent(turns, [1, 1, 2, 2])[0] == 0
    assert len(find_parent(turns, [1, 1, 2, 2])[1]) == 0
    assert find_parent(turns, [1, 1, 2])[0] is None


token = st.integers(0, 2)
"""Few tokens, so that prompts begin alike by chance."""


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(token, min_size=1, max_size=6), st.lists(token, min_size=1, max_size=2)),
        min_size=1,
        max_size=6,
    )
)
def test_whole_prompts_are_what_they_were(turns: list[tuple[list[int], list[int]]]) -> None:
    trajectory = make_trajectory(*(make_turn(prompt, response) for prompt, response in turns))
    wanted = [prompt for prompt, _ in turns]
    assert [trajectory.prompt_token_ids(index).tolist() for index in range(len(turns))] == wanted
    assert trajectory.prompt_lengths() == [len(prompt) for prompt in wanted]
    assert [context.tolist() for context in trajectory.contexts()] == [prompt + response for prompt, response in turns]
    for index, (turn, prompt) in enumerate(zip(trajectory.turns, wanted)):
        whole = [p + r for p, r in turns[:index]]
        extended = [len(each) for each in whole if prompt[: len(each)] == each]
        assert (turn.parent is None) == (not extended)
        assert turn.parent is None or len(whole[turn.parent]) == max(extended)


def test_nothing_of_a_turn_can_be_changed() -> None:
    given_ids = np.array([4, 5], dtype=np.int32)
    turn = make_turn(given_ids, [3], loss_mask=[True])
    given_ids[0] = 9
    assert turn.added_token_ids.tolist() == [4, 5], "what was given is copied where it can be written to"
    kept = copy.deepcopy(turn), pickle.loads(pickle.dumps(turn, protocol=2)), pickle.loads(pickle.dumps(turn))
    trajectory = make_trajectory(turn, teacher_prompt_token_ids=[1, 2])
    for each in (turn, *kept, *pickle.loads(pickle.dumps(trajectory, protocol=2)).turns):
        for column in (each.added_token_ids, each.response_token_ids, each.response_logprobs, each.loss_mask):
            with pytest.raises(ValueError, match="read-only"):
                column[0] = 1
            with pytest.raises(ValueError, match="WRITEABLE"):
                column[:].flags.writeable = True
    with pytest.raises(ValueError, match="read-only"):
        trajectory.contexts()[0][0] = 1
    with pytest.raises(FrozenInstanceError):
        turn.reward = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        Turn((1,), (2,))  # type: ignore[misc, call-arg]


def test_columns_are_not_copied_where_pickling_shares_their_memory() -> None:
    """As Ray does: buffers out of band, read-only on arrival."""
    turn = make_turn(range(1000), [3], loss_mask=[True])
    buffers: list[pickle.PickleBuffer] = []
    content = pickle.dumps(turn, protocol=5, buffer_callback=buffers.append)
    assert len(content) < 1000
    again = pickle.loads(content, buffers=[bytes(buffer.raw()) for buffer in buffers])
    assert again == turn
    assert not again.added_token_ids.flags.owndata
    assert not again.added_token_ids.flags.writeable


def test_turns_are_equal_where_all_they_hold_is() -> None:
    turn = make_turn([1, 2], [3, 4], loss_mask=[True, False])
    for again in (copy.deepcopy(turn), pickle.loads(pickle.dumps(turn)), replace(turn)):
        assert again == turn
    others: list[dict[str, Any]] = [
        {"added_token_ids": [1, 3]},
        {"response_token_ids": [3, 5]},
        {"response_logprobs": [-1.0, np.nextafter(np.float32(-1.0), np.float32(0.0))]},
        {"response_logprobs": []},
        {"loss_mask": []},
        {"weight_versions": ((0, 0), (1, 1))},
        {"reward": 1.0},
    ]
    assert [replace(turn, **change) == turn for change in others] == [False] * len(others)
    trajectory = make_trajectory(turn, teacher_prompt_token_ids=[7])
    assert pickle.loads(pickle.dumps(trajectory)) == trajectory
    assert replace(trajectory, teacher_prompt_token_ids=[8]) != trajectory
    assert (turn == 1, trajectory == 1) == (False, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response_logprobs": [-1.0]}, "1 log-probabilities for 2 response tokens"),
        ({"loss_mask": [True] * 3}, "3 flags of the loss mask for 2 response tokens"),
        ({"added_token_ids": [-1]}, "must lie between 0 and"),
        ({"added_token_ids": np.array([2**31])}, "must lie between 0 and"),
        ({"response_token_ids": [1.5, 2.0]}, "must be whole numbers; got float64"),
        ({"response_token_ids": [[1, 2]]}, r"one dimension; got the shape \(1, 2\)"),
        ({"weight_versions": ()}, "runs .* of 2 response tokens; got"),
        ({"weight_versions": ((1, 4),)}, "from token 0 on"),
        ({"weight_versions": ((0, 4), (2, 5))}, "of 2 response tokens"),
        ({"weight_versions": ((0, 4), (0, 5))}, "in order"),
    ],
)
def test_what_does_not_fit_a_response_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(make_turn([1], [3, 4]), **change)


@pytest.mark.parametrize("parent", [-1, 1, 2])
def test_a_parent_is_an_earlier_turn(parent: int) -> None:
    with pytest.raises(ValueError, match=f"trajectory p/0, turn 1: its parent must be an earlier turn .* got {parent}"):
        Trajectory(
            prompt_uid="p",
            sample_index=0,
            turns=(make_turn(), make_turn(parent=parent)),
            outcome=Outcome.DONE,
        )


def test_a_long_conversation_takes_linear_memory() -> None:
    """200 turns of 60 sampled and 20 observed tokens, made of their whole prompts as an agent loop makes them."""
    num_turns, num_sampled, num_observed = 200, 60, 20
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    turns: list[Turn] = []
    context = token_ids(np.arange(100))
    for number in range(num_turns):
        response = token_ids(np.arange(num_sampled) + 300 * number)
        parent, added = find_parent(turns, context)
        turn = Turn(
            parent=parent,
            added_token_ids=added,
            response_token_ids=response,
            response_logprobs=np.full(num_sampled, -0.5, dtype=np.float32),
            response_text="word " * num_sampled,
            reward=float(number) / 7,
            stop_reason=StopReason.STOP,
            weight_versions=((0, number),),
        )
        turns.append(turn)
        context = token_ids(np.concatenate([context, response, np.arange(num_observed)]))
    trajectory = Trajectory(prompt_uid="p", sample_index=0, turns=tuple(turns), outcome=Outcome.DONE)
    num_tokens = len(context)
    del turns, turn, context, response, added
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert trajectory.prompt_lengths()[-1] == num_tokens - num_sampled - num_observed
    print(f"\n{(held - before) / num_tokens:.1f} bytes a token of {num_tokens}, texts of responses included")
    assert (held - before) / num_tokens <= BYTES_PER_TOKEN
