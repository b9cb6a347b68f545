"""Trajectories as JSON, one line a trajectory, exact floats: in the journal of a stream, and in files made elsewhere or by
versions that wrote lines where `store.py` writes Parquet. Advantages, where a line has any, are not read.

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
from typing import Annotated, Any

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticKnownError

from skyrl_train.errors import DataError, counted
from skyrl_train.images import as_record, from_record
from skyrl_train.system.files import is_text, json_problem, parse_json, shown
from skyrl_train.types import (
    Failure,
    FailureKind,
    GenerationOutput,
    Outcome,
    Prompt,
    RolloutBatch,
    StopReason,
    Trajectory,
    Turn,
    VersionRun,
    decode_routing,
    encode_routing,
    find_parent,
)

_LARGEST_COUNT = 2**31 - 1
"""What the columns of the files that are written hold."""
UNNUMBERED = -1
"""Sample of a trajectory whose record does not say which it is."""


# What a record must have, under the names of the fields in memory; `alias` is the name in a line where it is another.
# Parquet's rows are such records, too (`store.py`), whose columns are arrays.


def _writable(value: Any) -> Any:
    is_writable = is_text(value) if isinstance(value, str) else not json_problem({"": value})
    if not is_writable:
        raise ValueError  # `_first_problem` says where and why
    return value


def _finite(value: float, info: ValidationInfo) -> float:
    if not (math.isfinite(value) or info.context):
        raise PydanticKnownError("finite_number")
    return value


def _or_array(value: object, check: ValidatorFunctionWrapHandler) -> Any:
    """Return an array as it is: its type is the column's, and `Turn` looks at its values."""
    return value if isinstance(value, np.ndarray) else check(value)


Text = Annotated[str, AfterValidator(_writable)]
Uid = Annotated[Text, BeforeValidator(lambda value: str(value) if type(value) is int else value)]
Count = Annotated[int, Field(ge=0, le=_LARGEST_COUNT)]
Number = Annotated[float, AfterValidator(_finite)]
Object = Annotated[dict[str, Any], AfterValidator(_writable)]
Messages = Annotated[tuple[dict[str, Any], ...], Field(strict=False), AfterValidator(_writable)]
Ids = Annotated[list[Count], WrapValidator(_or_array)]
Logprob = Annotated[float, Field(allow_inf_nan=False)]
Logprobs = Annotated[list[Logprob], WrapValidator(_or_array)]
Flags = Annotated[list[bool], WrapValidator(_or_array)]
Runs = list[Annotated[tuple[Count, Count], Field(strict=False)]]
Routing = Annotated[Any, PlainValidator(lambda value: _or_array(value, decode_routing))]


class _Record(BaseModel):
    model_config = ConfigDict(strict=True)


class PromptRecord(_Record):
    """The fields of a prompt, which each of its trajectories has."""

    uid: Uid
    messages: Messages = Field((), alias="prompt")
    env_class: Text | None = None
    extras: Object = {}
    tools: Messages = ()
    dataset: Text = ""


class FailureRecord(_Record):
    """The fields of a failure."""

    kind: Annotated[FailureKind, Field(strict=False)]
    message: Text
    turn_index: Count


class TurnRecord(_Record):
    """The fields of a turn: of `added_token_ids` and `prompt_token_ids` one."""

    parent: Count | None = None
    added_token_ids: Ids | None = None
    prompt_token_ids: Ids | None = None
    response_token_ids: Ids
    response_logprobs: Logprobs | None = Field(None, alias="logprobs")
    loss_mask: Flags | None = None
    response_text: Text = Field("", alias="text")
    reward: Number
    observations: Messages = ()
    tool_calls: Messages = ()
    stop_reason: Annotated[StopReason, Field(strict=False)] = StopReason.STOP
    weight_versions: Runs | None = None
    weight_version: Count = 0
    routed_experts: Routing | None = None
    images: Annotated[Any, PlainValidator(from_record)] = ()


class AnswerRecord(_Record):
    """The fields of an engine's answer, which a journal has before its turn is complete (`rollout/journal.py`)."""

    token_ids: Annotated[tuple[Count, ...], Field(strict=False, alias="tokens")]
    logprobs: Annotated[tuple[Logprob, ...], Field(strict=False)]
    stop_reason: Annotated[StopReason, Field(strict=False, alias="stop")]
    weight_versions: Runs = Field(alias="versions")
    routed_experts: Routing | None = Field(None, alias="experts")


class TrajectoryRecord(_Record):
    """The fields of a trajectory, beside those of its prompt."""

    global_step: Count = 0
    sample_index: Count = Field(UNNUMBERED, alias="sample")
    turns: list[TurnRecord]
    outcome: Annotated[Outcome, Field(strict=False)] = Outcome.DONE
    failure: FailureRecord | None = None
    metrics: dict[str, Number] = {}
    rewards: dict[str, Number] = {}
    first_messages: Messages = ()
    teacher_prompt_token_ids: Ids | None = None
    greedy_reward: Number | None = None


_RULES = {  # by pydantic's types of errors
    "dict_type": "an object",
    "model_type": "an object",
    "list_type": "a list",
    "tuple_type": "a list",
    "string_type": "a text",
    "int_type": f"a whole number from 0 to {_LARGEST_COUNT}",
    "float_type": "a finite number",
    "bool_type": "true or false",
    "too_long": "[token, version]",
}
"""What a value must be, where pydantic has words of its own for it."""


def encode_trajectory(prompt: Prompt, trajectory: Trajectory) -> dict[str, Any]:
    """Return the fields of a line."""
    record: dict[str, Any] = {
        "uid": trajectory.prompt_uid,
        "sample": trajectory.sample_index,
        "outcome": trajectory.outcome.value,
    }
    if (failure := trajectory.failure) is not None:
        record["failure"] = {"kind": failure.kind.value, "message": failure.message, "turn_index": failure.turn_index}
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
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                record = parse_json(line.decode().strip())
            except UnicodeDecodeError as error:
                raise DataError(f"{place}: not UTF-8 text ({error}).") from error
            except ValueError as error:
                raise DataError(f"{place}: {error}.") from error
            if not isinstance(record, dict):
                raise DataError(f"{place}: must be an object; got {type(record).__name__}.")
            try:
                yield decoded(record)
            except ValueError as error:
                raise DataError(
                    f"{place}: not a recorded trajectory ({error}). It needs uid and, for each of its turns, "
                    "added_token_ids or prompt_token_ids, response_token_ids and reward."
                ) from error


def decode_trajectory(record: Mapping[str, Any]) -> tuple[Prompt, Trajectory]:
    """Return the inverse of `encode_trajectory`. Raises ValueError naming a field that is missing or of another type."""
    return decoded(record)[1:]


def decoded(record: Mapping[str, Any], *, allow_infinite: bool = False) -> tuple[int, Prompt, Trajectory]:
    """Return the step of a record, 0 where it does not say, with what `encode_trajectory` made the record of.

    Columns may be arrays. With `allow_infinite`, numbers need not be finite. Raises ValueError as `decode_trajectory` does.
    """
    prompt = Prompt(**_fields(PromptRecord, record))
    fields = _fields(TrajectoryRecord, record, allow_infinite=allow_infinite)
    turns: list[Turn] = []
    with np.errstate(over="ignore"):
        for index, each in enumerate(fields.pop("turns")):
            try:
                turns.append(_turn(each, turns))
                if not (allow_infinite or np.isfinite(turns[-1].response_logprobs).all()):
                    raise ValueError("a log-probability must be finite in float32")
            except ValueError as error:
                raise ValueError(f"turn {index}: {error}") from None
    if "failure" in fields:
        fields["failure"] = Failure(**vars(fields["failure"]))
    elif not turns:
        raise ValueError("it has no turn and did not fail")
    return fields.pop("global_step"), prompt, Trajectory(prompt_uid=prompt.uid, turns=tuple(turns), **fields)


def decode_answer(record: Mapping[str, Any]) -> GenerationOutput:
    """Return an engine's answer in a journal's line. Raises ValueError as `decode_trajectory` does."""
    fields = _fields(AnswerRecord, record)
    fields["weight_versions"] = tuple(VersionRun(*run) for run in fields["weight_versions"])
    return GenerationOutput(**fields)


def _fields(kind: type[_Record], record: Mapping[str, Any], *, allow_infinite: bool = False) -> dict[str, Any]:
    """Return the fields that a record has or that stand for what it lacks. Raises ValueError."""
    try:
        return _given(kind.model_validate(record, context=allow_infinite))
    except ValidationError as error:
        raise ValueError(_first_problem(error)) from None


def _turn(record: TurnRecord, earlier: Sequence[Turn]) -> Turn:
    fields = _given(record)
    prompt, version = fields.pop("prompt_token_ids", None), fields.pop("weight_version")
    if "added_token_ids" not in fields:
        if prompt is None:
            raise ValueError("no 'added_token_ids' or 'prompt_token_ids'")
        fields["parent"], fields["added_token_ids"] = find_parent(earlier, prompt)
    parent = fields.get("parent")
    if parent is not None and parent >= len(earlier):
        raise ValueError(f"parent must be the number of an earlier turn or null; got {parent}")
    if (parent is None and not len(fields["added_token_ids"])) or not len(fields["response_token_ids"]):
        raise ValueError("a turn has an empty prompt or response")
    return Turn(**{"weight_versions": ((0, version),), **fields})


def _given(record: BaseModel) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if value is not None}


def _first_problem(error: ValidationError) -> str:
    """Return where, what must be there and what is, of the first field that is wrong."""
    first = error.errors(include_url=False)[0]
    kind, place = first["type"], list(first["loc"])
    where = f"turn {place[1]}: " if place[0] == "turns" and len(place) > 2 else ""
    name = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in place[2 if where else 0 :])[1:]
    if kind == "value_error":
        return f"{where}{json_problem({name: first['input']}) or first['ctx']['error']}"
    if kind == "missing":
        return f"{where}no {name!r}"
    rule = _RULES.get(kind, first["msg"].removeprefix("Input should be "))
    return f"{where}{name:.80} must be {rule}; got {shown(first['input'])}"


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
