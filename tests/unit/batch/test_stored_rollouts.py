"""Rollouts whose arrays lie elsewhere are the rollouts that they would be here, and cost the loop no token."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from skyrl_train.batch.plane import StoredTurn, arrays_of, facts_in, placed, trajectories_of
from skyrl_train.types import (
    Failure,
    FailureKind,
    Outcome,
    Prompt,
    RolloutBatch,
    StopReason,
    Trajectory,
    Turn,
    VersionRun,
)


class Counted:
    """Arrays elsewhere, which count how often they are read."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._arrays, self.num_reads = arrays, 0

    def read(self) -> Mapping[str, NDArray[Any]]:
        self.num_reads += 1
        return self._arrays


ids = st.lists(st.integers(0, 2**31 - 1), max_size=5)
numbers = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(), max_size=6)  # lone surrogates are among them
json_values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
messages = st.lists(st.dictionaries(texts, json_values, max_size=2), max_size=2).map(tuple)


@st.composite
def turns(draw: st.DrawFn, index: int) -> Turn:
    response = draw(ids)
    floats = draw(st.sampled_from([[], [-float(number % 7) / 3 for number in response]]))
    flags = draw(st.sampled_from([[], [number % 2 == 0 for number in response]]))
    added = draw(ids)
    most = max(0, len(added) + len(response) - 1)
    recorded = draw(st.integers(0, most))
    runs = [VersionRun(0, draw(st.integers(0, 9)))]
    if len(response) > 2:
        runs.append(VersionRun(2, 2**31 - 1))
    return Turn(
        parent=draw(st.sampled_from([None, *range(index)])),
        added_token_ids=added,
        response_token_ids=response,
        response_logprobs=floats,
        loss_mask=flags,
        response_text=draw(texts),
        reward=draw(numbers),
        observations=draw(messages),
        tool_calls=draw(messages),
        stop_reason=draw(st.sampled_from(list(StopReason))),
        weight_versions=tuple(runs),
        routed_experts=np.arange(recorded * 4, dtype=np.int16).reshape(recorded, 2, 2),
    )


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    made = tuple(draw(turns(index)) for index in range(draw(st.integers(0, 3))))
    failure = Failure(kind=draw(st.sampled_from(list(FailureKind))), message=draw(texts), turn_index=len(made))
    outcome = draw(st.sampled_from(list(Outcome)))
    return Trajectory(
        prompt_uid=draw(texts),
        sample_index=draw(st.integers(0, 9)),
        turns=made,
        outcome=outcome,
        failure=failure if outcome is Outcome.FAILED else None,
        metrics=draw(st.dictionaries(texts, numbers, max_size=2)),
        rewards=draw(st.dictionaries(texts, numbers, max_size=2)),
        first_messages=draw(messages),
        teacher_prompt_token_ids=draw(ids),
        greedy_reward=draw(st.none() | st.just(0.0) | numbers),
    )


def stored(*groups: list[Trajectory]) -> list[Trajectory]:
    """The same, each group in arrays of its own, of which the loop was sent the facts."""
    found = []
    for group in groups:
        arrays = arrays_of(group)
        facts = pickle.loads(pickle.dumps(facts_in(arrays)))
        found += trajectories_of(Counted(pickle.loads(pickle.dumps(arrays))), facts)
    return found


def as_batch(trajectories: list[Trajectory]) -> RolloutBatch:
    prompts = tuple(Prompt(uid=each.prompt_uid, messages=()) for each in trajectories)
    return RolloutBatch(prompts=prompts, trajectories=tuple(trajectories), n_samples_per_prompt=1)


@pytest.mark.slow
@given(first=st.lists(trajectories(), max_size=3), second=st.lists(trajectories(), max_size=3))
def test_nothing_of_a_trajectory_is_lost(first: list[Trajectory], second: list[Trajectory]) -> None:
    found, expected = stored(first, second), [*first, *second]
    assert found == expected
    assert as_batch(found).trajectories == tuple(expected)
    travelled = pickle.loads(pickle.dumps(placed(as_batch(found)))).here()
    assert travelled == as_batch(expected)
    assert [turn.num_added_tokens for each in found for turn in each.turns] == [
        len(turn.added_token_ids) for each in expected for turn in each.turns
    ]


def make(uid: str, *rewards: float, tokens: int = 3) -> Trajectory:
    made = tuple(
        Turn(
            parent=index - 1 if index else None,
            added_token_ids=range(2),
            response_token_ids=range(tokens),
            response_text="word " * tokens,
            reward=reward,
            stop_reason=StopReason.STOP,
            weight_versions=(VersionRun(0, 4),),
        )
        for index, reward in enumerate(rewards)
    )
    return Trajectory(prompt_uid=uid, sample_index=0, turns=made, outcome=Outcome.DONE)


def test_what_the_loop_changed_counts_where_the_rollouts_are_read() -> None:
    one, other = stored([make("a", 1.0, 2.0), make("b", 3.0)])
    shaped = replace(one, turns=(one.turns[0], one.turns[1].with_reward(-1.0)))
    copied = replace(other, prompt_uid="b#copy1", greedy_reward=0.5)
    here = pickle.loads(pickle.dumps(placed(as_batch([copied, shaped, other])))).here()
    assert [each.prompt_uid for each in here.trajectories] == ["b#copy1", "a", "b"]
    assert [[turn.reward for turn in each.turns] for each in here.trajectories] == [[3.0], [1.0, -1.0], [3.0]]
    assert [each.greedy_reward for each in here.trajectories] == [0.5, None, None]
    assert here.trajectories[1].turns[1].response_token_ids.tolist() == [0, 1, 2]


def test_facts_need_no_array_and_do_not_grow_with_tokens() -> None:
    sizes = []
    for tokens in (10, 10_000):
        group = [make("a", 1.0, 0.5, tokens=tokens) for _ in range(50)]
        arrays = arrays_of(group)
        sizes.append(sum(array.nbytes for array in facts_in(arrays).values()))
        source = Counted(arrays)
        found = trajectories_of(source, facts_in(arrays))
        assert sum(each.reward for each in found) == 75.0
        assert found[0].prompt_lengths() == [2, 4 + tokens]
        assert placed(as_batch(found)) is not None
        assert source.num_reads == 0
        assert isinstance(found[0].turns[0], StoredTurn)
    assert sizes[0] == sizes[1]
    assert sizes[0] / 100 < 120


def test_rollouts_of_which_some_are_here_are_nowhere_else() -> None:
    assert placed(as_batch([*stored([make("a", 1.0)]), make("b", 1.0)])) is None


def test_what_json_does_not_know_is_refused() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        arrays_of([replace(make("a", 1.0), first_messages=({"role": object()},))])
