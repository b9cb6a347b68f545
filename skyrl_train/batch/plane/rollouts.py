"""Rollouts by reference: of each turn its reward, its lengths and how it stopped are here, its tokens and texts elsewhere.

    where rollouts arise    arrays_of(trajectories) --> arrays of plain types, which are put somewhere; the small ones travel
    the loop                rollouts_of(source, facts_in(arrays)) --> trajectories of `StoredTurn`s
    what reads tokens       placed(rollouts) travels; `.here()` has the same trajectories, of arrays that are mapped there

A `StoredTurn` is a `Turn`: whoever asks for its tokens or its text gets them, and reads its arrays for that. A loop that
asks for neither holds some hundreds of bytes a turn, however long it is. Numbers that the loop changed (rewards that
filters shaped, rewards of greedy samples, names of copies) are those that count wherever the rollouts are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_train.batch.batch_metadata import Rows
from skyrl_train.batch.references import Arrays, ArraysHere
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
    token_ids,
)

_OUTCOMES, _STOPS = tuple(Outcome), tuple(StopReason)
_TOKENS: dict[str, type[np.generic]] = {
    "added_token_ids": np.int32,
    "response_token_ids": np.int32,
    "response_logprobs": np.float32,
    "loss_mask": np.bool_,
    "routed_experts": np.int16,
}
"""Columns of a turn's tokens."""
_TEXTS = ("response_text", "more")
"""In UTF-8: a turn's response, and as JSON its messages. What else is `known` of trajectories is JSON, too, a comma behind
each."""
_FACTS = ("num_turns", "sample", "outcome", "known", "parent", "reward", "stop", "runs", "experts_shape")
"""What the loop reads of arrays, beside the lengths of the columns of ids."""


class StoredTurn(Turn):
    """A turn of which facts are here."""

    __slots__ = ("_index", "_num_added", "_num_response", "_source")
    _index: int
    _num_added: int
    _num_response: int
    _source: Arrays

    def __init__(
        self,
        source: Arrays,
        index: int,
        num_added: int,
        num_response: int,
        parent: int | None,
        reward: float,
        stop_reason: StopReason,
        weight_versions: tuple[VersionRun, ...],
    ) -> None:
        """`index`: of the turn among those of `source`."""
        # Turns are frozen, and their own constructor wants the tokens.
        keep = object.__setattr__
        keep(self, "_source", source)
        keep(self, "_index", index)
        keep(self, "_num_added", num_added)
        keep(self, "_num_response", num_response)
        keep(self, "parent", parent)
        keep(self, "reward", reward)
        keep(self, "stop_reason", stop_reason)
        keep(self, "weight_versions", weight_versions)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return StoredTurn, self._given(self.reward)

    def with_reward(self, reward: float) -> Turn:
        """Return the turn with another reward."""
        return StoredTurn(*self._given(reward))

    @property
    def num_added_tokens(self) -> int:
        """Tokens that the prompt adds."""
        return self._num_added

    @property
    def num_response_tokens(self) -> int:
        """Return how many tokens the response has: a fact that is here, for which nothing is read."""
        return self._num_response

    def _given(self, reward: float) -> tuple[Any, ...]:
        of_tokens = (self._source, self._index, self._num_added, self._num_response)
        return (*of_tokens, self.parent, reward, self.stop_reason, self.weight_versions)

    def _column(self, name: str) -> NDArray[Any]:
        arrays = self._source.read()
        start, stop = arrays[f"{name}/offsets"][self._index : self._index + 2].tolist()
        column: NDArray[Any] = arrays[name][start:stop]
        return column

    def _more(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._column("more").tobytes())
        return found


def _read_when_asked(name: str) -> property:
    def text(turn: StoredTurn) -> Any:
        # Half of a character (a lone surrogate) comes back as it was: strict UTF-8 would refuse the whole rollout.
        return turn._column(name).tobytes().decode("utf-8", "surrogatepass")

    def experts(turn: StoredTurn) -> Any:
        shape = turn._source.read()["experts_shape"][turn._index]
        return turn._column(name).reshape(shape)

    def messages(turn: StoredTurn) -> Any:
        return tuple(turn._more().get(name, ()))

    def column(turn: StoredTurn) -> Any:
        return turn._column(name)

    found = column if name in _TOKENS else text if name in _TEXTS else messages
    return property(experts if name == "routed_experts" else found)


# In place of the attributes of `Turn`: what is asked for is read from the source then, and not kept.
for _name in (*_TOKENS, "response_text", "observations", "tool_calls", "images"):
    setattr(StoredTurn, _name, _read_when_asked(_name))


def is_storable(rollouts: RolloutBatch) -> bool:
    """Whether arrays of plain types can hold the rollouts: not those with images, which are kept once for all of them."""
    return not any(turn.images for trajectory in rollouts.trajectories for turn in trajectory.turns)


def arrays_of(trajectories: Sequence[Trajectory]) -> dict[str, NDArray[Any]]:
    """Return trajectories without images as arrays of plain types. Raises TypeError for metrics that JSON does not know."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    found: dict[str, NDArray[Any]] = {
        "num_turns": np.array([len(each.turns) for each in trajectories], np.int32),
        "sample": np.array([each.sample_index for each in trajectories], np.int32),
        "outcome": np.array([_OUTCOMES.index(each.outcome) for each in trajectories], np.uint8),
        "parent": np.array([-1 if turn.parent is None else turn.parent for turn in turns], np.int32),
        "reward": np.array([turn.reward for turn in turns], np.float64),
        "stop": np.array([_STOPS.index(turn.stop_reason) for turn in turns], np.uint8),
        "experts_shape": np.array([turn.routed_experts.shape for turn in turns], np.int32).reshape(-1, 3),
    }
    # Flat arrays of all turns with offsets, not one array a turn: a source is put and mapped as a whole.
    lists: dict[str, list[NDArray[Any]]] = {
        name: [np.asarray(getattr(turn, name)).reshape(-1) for turn in turns] for name in _TOKENS
    }
    lists["runs"] = [np.array(turn.weight_versions, np.int64).reshape(-1) for turn in turns]
    lists["teacher"] = [each.teacher_prompt_token_ids for each in trajectories]
    lists["response_text"] = [_bytes(turn.response_text) for turn in turns]
    lists["more"] = [_json({"observations": turn.observations, "tool_calls": turn.tool_calls}) for turn in turns]
    found["known"] = np.concatenate([*(_json(_known(each), end=",") for each in trajectories), np.empty(0, np.uint8)])
    lists["prompt_uid"] = [_bytes(each.prompt_uid) for each in trajectories]
    for name, parts in lists.items():
        dtype = _TOKENS.get(name, {"runs": np.int64, "teacher": np.int32}.get(name, np.uint8))
        found[name] = np.concatenate(parts).astype(dtype, copy=False) if parts else np.empty(0, dtype)
        found[f"{name}/offsets"] = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    return found


def facts_in(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return what a loop reads of arrays: about 100 bytes a turn."""
    offsets = [f"{name}/offsets" for name in ("added_token_ids", "response_token_ids", "teacher", "runs", "prompt_uid")]
    return {name: arrays[name] for name in (*_FACTS, "prompt_uid", *offsets) if name != "experts_shape"}


def trajectories_of(source: Arrays, facts: Mapping[str, NDArray[Any]]) -> list[Trajectory]:
    """Return the trajectories whose arrays are in `source`, by their facts."""
    num_added = np.diff(facts["added_token_ids/offsets"]).tolist()
    num_response = np.diff(facts["response_token_ids/offsets"]).tolist()
    parents, rewards, stops = (facts[name].tolist() for name in ("parent", "reward", "stop"))
    runs, run_offsets = facts["runs"].tobytes(), (facts["runs"].itemsize * facts["runs/offsets"]).tolist()
    # One list of what all trajectories said, parsed in one call; the last comma is left out.
    known = json.loads(b"[" + facts["known"].tobytes()[:-1] + b"]")
    uids, uid_offsets = facts["prompt_uid"].tobytes(), facts["prompt_uid/offsets"].tolist()
    samples, outcomes = facts["sample"].tolist(), facts["outcome"].tolist()
    has_teacher = (np.diff(facts["teacher/offsets"]) > 0).tolist()
    found: list[Trajectory] = []
    turn, uid = 0, ""
    for number, count in enumerate(facts["num_turns"].tolist()):
        turns = tuple(
            StoredTurn(
                source,
                index,
                num_added[index],
                num_response[index],
                None if parents[index] < 0 else parents[index],
                rewards[index],
                _STOPS[stops[index]],
                _runs(runs[run_offsets[index] : run_offsets[index + 1]]),
            )
            for index in range(turn, turn + count)
        )
        turn += count
        own = uids[uid_offsets[number] : uid_offsets[number + 1]].decode("utf-8", "surrogatepass")
        uid = uid if own == uid else own  # one text for all samples of a prompt
        more = known[number]
        failure = more.get("failure")
        found.append(
            Trajectory(
                prompt_uid=uid,
                sample_index=samples[number],
                turns=turns,
                outcome=_OUTCOMES[outcomes[number]],
                failure=failure and Failure(kind=FailureKind(failure[0]), message=failure[1], turn_index=failure[2]),
                metrics=more.get("metrics", {}),
                rewards=more.get("rewards", {}),
                first_messages=tuple(more.get("first_messages", ())),
                greedy_reward=more.get("greedy_reward"),
                stored=(source, number),
                **({"teacher_prompt_token_ids": _teacher(source, number)} if has_teacher[number] else {}),
            )
        )
    return found


@dataclass(frozen=True, kw_only=True)
class PlacedRollouts:
    """Rollouts on their way to where they are read: where each trajectory's arrays are, and what the loop changed."""

    prompts: tuple[Prompt, ...]
    n_samples_per_prompt: int
    sources: tuple[Arrays, ...]
    source_of: NDArray[np.int32]
    """`[trajectories]`."""
    number: Rows
    """`[trajectories]`, in the source."""
    rewards: NDArray[np.float64]
    """`[turns]`."""
    greedy: NDArray[np.float64]
    """`[trajectories]`, NaN where there is none."""

    def here(self) -> RolloutBatch:
        """Return the rollouts, of arrays that are mapped here. Raises SkyrlTrainError where they are gone."""
        mapped = [ArraysHere(source.read()) for source in self.sources]
        known = [trajectories_of(source, source.arrays) for source in mapped]
        found, turn, rewards = [], 0, self.rewards.tolist()
        for place, (source, number) in enumerate(zip(self.source_of.tolist(), self.number.tolist())):
            trajectory = known[source][number]
            own = rewards[turn : turn + len(trajectory.turns)]
            turn += len(own)
            greedy = float(self.greedy[place])
            found.append(
                replace(
                    trajectory,
                    prompt_uid=self.prompts[place // self.n_samples_per_prompt].uid,
                    turns=tuple(each.with_reward(reward) for each, reward in zip(trajectory.turns, own)),
                    greedy_reward=None if np.isnan(greedy) else greedy,
                )
            )
        return RolloutBatch(
            prompts=self.prompts, trajectories=tuple(found), n_samples_per_prompt=self.n_samples_per_prompt
        )


def placed(rollouts: RolloutBatch) -> PlacedRollouts | None:
    """Return where the rollouts are; None where the arrays of some are in their turns."""
    numbers: dict[int, int] = {}
    sources: list[Arrays] = []
    source_of, number = [], []
    for trajectory in rollouts.trajectories:
        if trajectory.stored is None:
            return None
        source, index = trajectory.stored
        # By identity: sources are handles or arrays, which do not compare by what they hold.
        if id(source) not in numbers:
            numbers[id(source)] = len(sources)
            sources.append(source)
        source_of.append(numbers[id(source)])
        number.append(index)
    rewards = [turn.reward for trajectory in rollouts.trajectories for turn in trajectory.turns]
    greedy = [np.nan if each.greedy_reward is None else each.greedy_reward for each in rollouts.trajectories]
    return PlacedRollouts(
        prompts=rollouts.prompts,
        n_samples_per_prompt=rollouts.n_samples_per_prompt,
        sources=tuple(sources),
        source_of=np.array(source_of, np.int32),
        number=np.array(number, np.int64),
        rewards=np.array(rewards, np.float64),
        greedy=np.array(greedy, np.float64),
    )


def _known(trajectory: Trajectory) -> dict[str, Any]:
    failure = trajectory.failure
    found = {
        "failure": failure and (failure.kind.value, failure.message, failure.turn_index),
        "metrics": dict(trajectory.metrics),
        "rewards": dict(trajectory.rewards),
        "first_messages": trajectory.first_messages,
        "greedy_reward": trajectory.greedy_reward,
    }
    return {name: value for name, value in found.items() if value or (name == "greedy_reward" and value is not None)}


def _json(value: Mapping[str, Any], *, end: str = "") -> NDArray[np.uint8]:
    # What is empty is left out, but a number of 0 says something.
    there = {name: each for name, each in value.items() if each or each == 0.0}
    return np.frombuffer((json.dumps(there, separators=(",", ":")) + end).encode(), np.uint8)


def _bytes(text: str) -> NDArray[np.uint8]:
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)


@lru_cache(maxsize=4096)
def _runs(data: bytes) -> tuple[VersionRun, ...]:
    """Return the runs of one turn, of which most are alike."""
    return tuple(VersionRun(*run) for run in np.frombuffer(data, np.int64).reshape(-1, 2).tolist())


def _teacher(source: Arrays, number: int) -> NDArray[np.int32]:
    arrays = source.read()
    start, stop = arrays["teacher/offsets"][number : number + 2].tolist()
    return token_ids(arrays["teacher"][start:stop])
