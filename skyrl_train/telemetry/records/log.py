"""Trajectories as JSON, one line a trajectory, exact floats: in the journal of a stream, and in files made elsewhere or by
versions that wrote lines where `rollout_store.py` writes Parquet. Advantages, where a line has any, are not read.

A line, shortened:

    {"uid": "train-17", "sample": 0, "global_step": 1, "purpose": "train", "outcome": "done",
     "prompt": [{"role": "user", "content": "2+2?"}], "env_class": "gsm8k", "extras": {...}, "metrics": {"solved": 1.0},
     "turns": [{"parent": null, "added_token_ids": [5, 9], "response_token_ids": [7, 2], "reward": 1.0, "text": "4",
                "logprobs": [-0.5, -0.25], "stop_reason": "stop", "weight_versions": [[0, 0]],
                "observations": []}]}

A turn is stored as what it adds to its parent, an earlier turn of the line (see `types.Turn`), so that a conversation's
tokens are in the file once. To read one back only `uid` and, for each turn, `response_token_ids`, `reward` and one of
two are needed: `added_token_ids`, or `prompt_token_ids`, the whole prompt, whose parent is then found by comparing
tokens. So rollouts made elsewhere, by hand, or by versions that wrote whole prompts and one `weight_version` a turn can
be trained on. `logprobs` absent means that none were recorded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_train.errors import DataError, counted
from skyrl_train.images import as_record, from_record
from skyrl_train.system.files import json_problem, parse_json, shown
from skyrl_train.types import (
    NO_ROUTING,
    ChatMessage,
    Failure,
    FailureKind,
    Outcome,
    Prompt,
    RolloutBatch,
    StopReason,
    TokenIds,
    Trajectory,
    Turn,
    VersionRun,
    decode_routing,
    encode_routing,
    find_parent,
    token_ids,
)

_JSON_NAMES: dict[type, str] = {dict: "an object", list: "a list", str: "a text", NoneType: "null"}
_LARGEST_COUNT = 2**31 - 1
"""What the columns of the files that are written hold."""
UNNUMBERED = -1
"""Sample of a trajectory whose record does not say which it is."""


def encode_trajectory(prompt: Prompt, trajectory: Trajectory) -> dict[str, Any]:
    """Return the fields of a line."""
    record: dict[str, Any] = {
        "uid": trajectory.prompt_uid,
        "sample": trajectory.sample_index,
        "outcome": trajectory.outcome.value,
    }
    if trajectory.failure is not None:
        failure = trajectory.failure
        record["failure"] = {
            "kind": failure.kind.value,
            "message": failure.message,
            "turn_index": failure.turn_index,
        }
    else:
        record["reward"] = trajectory.reward
    record |= {
        "prompt": [dict(message) for message in prompt.messages],
        "env_class": prompt.env_class,
        "extras": dict(prompt.extras),
        **({"tools": [dict(tool) for tool in prompt.tools]} if prompt.tools else {}),
        **({"dataset": prompt.dataset} if prompt.dataset else {}),
        "metrics": dict(trajectory.metrics),
        "turns": [_encode_turn(turn) for turn in trajectory.turns],
    }
    if trajectory.first_messages:
        record["first_messages"] = [dict(message) for message in trajectory.first_messages]
    if len(trajectory.teacher_prompt_token_ids):
        record["teacher_prompt_token_ids"] = trajectory.teacher_prompt_token_ids.tolist()
    if trajectory.rewards:
        record["rewards"] = dict(trajectory.rewards)
    if trajectory.greedy_reward is not None:
        record["greedy_reward"] = trajectory.greedy_reward
    return record


def _encode_turn(turn: Turn) -> dict[str, Any]:
    record: dict[str, Any] = {
        "reward": turn.reward,
        "text": turn.response_text,
        "stop_reason": turn.stop_reason.value,
        "weight_versions": turn.weight_versions,
        "parent": turn.parent,
        "added_token_ids": turn.added_token_ids.tolist(),
        "response_token_ids": turn.response_token_ids.tolist(),
        "observations": [dict(message) for message in turn.observations],
    }
    if turn.tool_calls:
        record["tool_calls"] = [dict(call) for call in turn.tool_calls]
    if len(turn.response_logprobs):
        record["logprobs"] = turn.response_logprobs.tolist()
    if len(turn.loss_mask):
        record["loss_mask"] = turn.loss_mask.tolist()
    if len(turn.routed_experts):
        record["routed_experts"] = encode_routing(turn.routed_experts)
    if turn.images:
        record["images"] = as_record(turn.images)
    return record


def read_json_lines(path: Path) -> dict[int, RolloutBatch]:
    """Return the batches of one file of JSON lines, by global step in the order of the file.

    Lines without `global_step` belong to step 0. Groups are recognised by `uid` and must have equal numbers of samples.

    Raises:
        DataError: Names the file, the line and what is wrong with it.
    """
    return in_batches(path, _recorded(path))


def in_batches(path: Path, recorded: Iterable[tuple[int, Prompt, Trajectory]]) -> dict[int, RolloutBatch]:
    """Return what a file holds, trajectories with their steps, as batches. Raises DataError where groups differ in size."""
    steps: dict[int, dict[str, list[tuple[Prompt, Trajectory]]]] = {}
    for step, prompt, trajectory in recorded:
        group = steps.setdefault(step, {}).setdefault(prompt.uid, [])
        if trajectory.sample_index == UNNUMBERED:
            trajectory = replace(trajectory, sample_index=len(group))
        group.append((prompt, trajectory))
    if not steps:
        raise DataError(f"{path}: no trajectories in it.")
    return {step: _batch(groups, f"{path}, step {step}") for step, groups in steps.items()}


def _recorded(path: Path) -> Iterator[tuple[int, Prompt, Trajectory]]:
    for number, record in _records(path):
        place = f"{path}, line {number}"
        try:
            prompt, trajectory = decode_trajectory(record)
            step = _count(record.get("global_step", 0), "global_step")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise DataError(
                f"{place}: not a recorded trajectory ({what}). It needs uid and, for each of its turns, "
                "added_token_ids or prompt_token_ids, response_token_ids and reward."
            ) from error
        if "sample" not in record:
            trajectory = replace(trajectory, sample_index=UNNUMBERED)
        yield step, prompt, trajectory


def decode_trajectory(record: Mapping[str, Any]) -> tuple[Prompt, Trajectory]:
    """Return the inverse of `encode_trajectory`. Raises KeyError for a missing field, ValueError for one of the wrong type,
    with its name."""
    turns: list[Turn] = []
    for index, turn_record in enumerate(_of_type(record["turns"], list, "turns")):
        try:
            turns.append(_decode_turn(_of_type(turn_record, dict, "a turn"), turns))
        except ValueError as error:
            raise ValueError(f"turn {index}: {error}") from None
    return decode_with_turns(record, turns)


def decode_with_turns(record: Mapping[str, Any], turns: Sequence[Turn]) -> tuple[Prompt, Trajectory]:
    """Return what a record holds whose turns are decoded. Raises as `decode_trajectory` does."""
    if problem := json_problem(
        {name: record.get(name) for name in ("uid", "prompt", "env_class", "extras", "tools", "failure")}
    ):
        raise ValueError(problem)
    if isinstance(record["uid"], bool) or not isinstance(record["uid"], (str, int)):
        raise ValueError(f"uid must be a text; got {shown(record['uid'])}")
    uid = str(record["uid"])
    prompt = Prompt(
        uid=uid,
        messages=_messages(record, "prompt"),
        env_class=_of_type(record.get("env_class"), (str, NoneType), "env_class"),
        extras=_of_type(record.get("extras", {}), dict, "extras"),
        tools=tuple(_of_type(each, dict, "tools") for each in _of_type(record.get("tools", []), list, "tools")),
        dataset=_of_type(record.get("dataset", ""), str, "dataset"),
    )
    failure = _of_type(record.get("failure"), (dict, NoneType), "failure")
    if failure is None and not turns:
        raise ValueError("it has no turn and did not fail")
    trajectory = Trajectory(
        prompt_uid=uid,
        sample_index=_count(record.get("sample", 0), "sample"),
        turns=tuple(turns),
        outcome=Outcome(record.get("outcome", Outcome.DONE.value)),
        failure=None
        if failure is None
        else Failure(
            kind=FailureKind(failure["kind"]),
            message=_of_type(failure["message"], str, "the failure's message"),
            turn_index=_count(failure["turn_index"], "the failure's turn_index"),
        ),
        metrics=_numbers(record, "metrics", "metric"),
        rewards=_numbers(record, "rewards", "reward"),
        first_messages=_messages(record, "first_messages"),
        teacher_prompt_token_ids=_token_ids(record.get("teacher_prompt_token_ids", []), "teacher_prompt_token_ids"),
        greedy_reward=finite(record["greedy_reward"], "greedy_reward") if "greedy_reward" in record else None,
    )
    return prompt, trajectory


def _numbers(record: Mapping[str, Any], field: str, what: str) -> dict[str, float]:
    """Return the numbers by name in a field; none where it is not there."""
    values = _of_type(record.get(field, {}), dict, field)
    return {name: finite(value, f"the {what} {name}") for name, value in values.items()}


def _decode_turn(record: Mapping[str, Any], earlier: Sequence[Turn]) -> Turn:
    response = _token_ids(record["response_token_ids"], "response_token_ids")
    if problem := json_problem({"text": record.get("text")}):
        raise ValueError(problem)
    if "added_token_ids" in record:
        parent, added = record.get("parent"), _token_ids(record["added_token_ids"], "added_token_ids")
        if parent is not None and (type(parent) is not int or not 0 <= parent < len(earlier)):
            raise ValueError(f"parent must be the number of an earlier turn or null; got {parent!r}")
    else:
        parent, added = find_parent(earlier, _token_ids(record["prompt_token_ids"], "prompt_token_ids"))
    if (parent is None and not len(added)) or not len(response):
        raise ValueError("a turn has an empty prompt or response")
    return Turn(
        parent=parent,
        added_token_ids=added,
        response_token_ids=response,
        response_logprobs=_logprobs(_of_type(record.get("logprobs") or [], list, "logprobs"), len(response)),
        loss_mask=np.array(_flags(_of_type(record.get("loss_mask") or [], list, "loss_mask")), dtype=np.bool_),
        response_text=_of_type(record.get("text", ""), str, "text"),
        reward=finite(record["reward"], "reward"),
        observations=_messages(record, "observations"),
        tool_calls=_messages(record, "tool_calls"),
        stop_reason=StopReason(record.get("stop_reason", StopReason.STOP.value)),
        weight_versions=_versions(record.get("weight_versions", [[0, record.get("weight_version", 0)]])),
        routed_experts=decode_routing(record["routed_experts"]) if "routed_experts" in record else NO_ROUTING,
        images=from_record(record.get("images", [])),
    )


def _messages(record: Mapping[str, Any], name: str) -> tuple[ChatMessage, ...]:
    return messages(record.get(name, []), name)


def messages(value: object, name: str) -> tuple[ChatMessage, ...]:
    """Return a list of chat messages, or of calls. Raises ValueError, with the field's name, for anything else."""
    found = _of_type(value, list, name)
    if problem := json_problem({name: found}):
        raise ValueError(problem)
    return tuple(_of_type(each, dict, name) for each in found)


def _logprobs(values: Sequence[object], num_tokens: int) -> NDArray[np.float32]:
    if values and len(values) != num_tokens:
        raise ValueError(f"{len(values)} logprobs for {counted(num_tokens, 'response token')}")
    with np.errstate(over="ignore"):
        column = np.array([finite(value, "a log-probability") for value in values], dtype=np.float32)
    if not np.isfinite(column).all():
        raise ValueError("a log-probability must be finite in float32")
    return column


def _versions(values: object) -> tuple[VersionRun, ...]:
    runs = _of_type(values, list, "weight_versions")
    if not all(isinstance(run, list) and len(run) == 2 for run in runs):
        raise ValueError("weight_versions must be a list of [token, version]")
    return tuple(
        VersionRun(_count(start, "a run's token"), _count(version, "a weight version")) for start, version in runs
    )


def _of_type(value: Any, kind: type | tuple[type, ...], name: str) -> Any:
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise ValueError(f"{name} must be {' or '.join(_JSON_NAMES[each] for each in kinds)}; got {shown(value)}")
    return value


def _count(value: object, name: str) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST_COUNT:
        raise ValueError(f"{name} must be a whole number from 0 to {_LARGEST_COUNT}; got {shown(value)}")
    return value


def _flags(values: Sequence[object]) -> Sequence[object]:
    if not all(isinstance(value, bool) for value in values):
        raise ValueError("loss_mask must be a list of true and false")
    return values


def _token_ids(value: object, name: str) -> TokenIds:
    # Asked element by element: numpy would take true for 1, and JSON has no other whole numbers.
    if not isinstance(value, list) or not all(type(token_id) is int for token_id in value):
        raise ValueError(f"{name} must be a list of token ids")
    try:
        return token_ids(value)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be a list of token ids: {error}") from None


def finite(value: object, name: str) -> float:
    """Return a finite number. Raises ValueError, with its name, for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number; got {shown(value)}")
    return float(value)


def _records(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = parse_json(line.decode().strip())
            except UnicodeDecodeError as error:
                raise DataError(f"{path}, line {number}: not UTF-8 text ({error}).") from error
            except ValueError as error:
                raise DataError(f"{path}, line {number}: {error}.") from error
            if not isinstance(record, dict):
                raise DataError(f"{path}, line {number}: must be an object; got {type(record).__name__}.")
            yield number, record


def _batch(groups: Mapping[str, list[tuple[Prompt, Trajectory]]], place: str) -> RolloutBatch:
    counts = {uid: len(group) for uid, group in groups.items()}
    n_samples = max(counts.values())
    for uid, group in groups.items():
        if len(group) != n_samples:
            raise DataError(
                f"{place}: prompt {uid} has {counted(len(group), 'sample')}, others {n_samples}. Groups must be equal."
            )
        group.sort(key=lambda pair: pair[1].sample_index)
        if [trajectory.sample_index for _, trajectory in group] != list(range(n_samples)):
            raise DataError(f"{place}: the samples of prompt {uid} must be numbered 0 to {n_samples - 1}, each once.")
    return RolloutBatch(
        prompts=tuple(group[0][0] for group in groups.values()),
        trajectories=tuple(trajectory for group in groups.values() for _, trajectory in group),
        n_samples_per_prompt=n_samples,
    )
