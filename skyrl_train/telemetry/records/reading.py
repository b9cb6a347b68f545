"""Reads trajectories from Parquet (`rollout_columns.py`): whatever a file holds, they are as a run writes them, or it is
refused with the row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_train.errors import DataError
from skyrl_train.images import from_record
from skyrl_train.system.files import parse_json, shown
from skyrl_train.telemetry.records.columns import (
    FLOAT_COLUMNS,
    FORMAT,
    KINDS,
    LISTS,
    METADATA,
    OF_FIRST_ROW,
    OF_TRAJECTORY,
    StoreFacts,
    arrow_schema,
)
from skyrl_train.telemetry.records.log import UNNUMBERED, decode_with_turns, finite, messages
from skyrl_train.types import NO_ROUTING, Prompt, StopReason, Trajectory, Turn, VersionRun

_LARGEST_EXPANSION = 2000
"""How many times its size a file may say that it holds: more would be made to fill the memory of who reads it."""
_SMALL = 2**27
_UNREADABLE = (OSError, ValueError, TypeError, LookupError, MemoryError, OverflowError, NotImplementedError)
"""What pyarrow raises for files that are damaged: its errors are subclasses of these."""
_REQUIRED = ("uid", "turn", "added_token_ids", "response_token_ids", "reward")
_NOT_READ = frozenset({"purpose", "error", "trajectory_reward", *FLOAT_COLUMNS})
"""Columns that a batch of rollouts has no place for."""


def read_facts(path: Path) -> StoreFacts:
    """Return what a file says of itself. Raises DataError."""
    with _opened(path) as file:
        return _facts_of(path, file.metadata.metadata)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Gives the file with its metadata read."""
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(str(path), page_checksum_verification=True)
    except _UNREADABLE as error:
        raise DataError(f"{path}: not a Parquet file that can be read ({_first_line(error)}).") from error
    with file:
        yield file


def _facts_of(path: Path, metadata: Mapping[bytes, bytes] | None) -> StoreFacts:
    text = (metadata or {}).get(METADATA)
    if text is None:  # rollouts made elsewhere
        return StoreFacts()
    try:
        content = parse_json(text)
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {shown(content['format'])}, and {FORMAT} is what this version reads")
        fraction = finite(content["sample_fraction"], "sample_fraction")
        if not 0 < fraction <= 1:
            raise ValueError(f"sample_fraction must be above 0 and at most 1; got {shown(fraction)}")
        return StoreFacts(float_columns=dict(content["float_columns"]), sample_fraction=fraction)
    except (ValueError, TypeError, LookupError) as error:
        raise DataError(f"{path}: its metadata skyrl_train cannot be read ({error}).") from error


def recorded(path: Path, *, allow_infinite: bool) -> Iterator[tuple[int, Prompt, Trajectory]]:
    """Yield the trajectories of a file and their steps."""
    rows: list[dict[str, Any]] = []
    begin = 1
    for number, row in enumerate(_rows(path), start=1):
        if row["turn"] in (None, 0) and rows:
            yield _decoded(path, begin, rows, allow_infinite=allow_infinite)
            rows, begin = [], number
        rows.append(row)
    if rows:
        yield _decoded(path, begin, rows, allow_infinite=allow_infinite)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with _opened(path) as file:
        try:
            _facts_of(path, file.metadata.metadata)
            there = set(file.schema_arrow.names)
            missing = [name for name in _REQUIRED if name not in there]
            size = sum(file.metadata.row_group(index).total_byte_size for index in range(file.num_row_groups))
            most = _SMALL + _LARGEST_EXPANSION * path.stat().st_size
        except _UNREADABLE as error:
            raise DataError(f"{path}: not a Parquet file that can be read ({_first_line(error)}).") from error
        if missing:
            raise DataError(f"{path}: no file of rollouts: it has no column {', '.join(missing)}.")
        if size > most:
            raise DataError(f"{path}: it says that it holds {size} bytes, which no rollouts of its size do.")
        names = [name for name in KINDS if name in there and name not in _NOT_READ]
        for index in range(file.num_row_groups):
            try:
                table = file.read_row_group(index, columns=names, use_threads=False)
                columns = {name: _values(table.column(name), name) for name in names}
            except _UNREADABLE as error:
                raise DataError(f"{path}: it is damaged ({_first_line(error)}).") from error
            nothing = dict.fromkeys(KINDS)
            for values in zip(*columns.values()):
                yield {**nothing, **dict(zip(columns, values))}


def _values(column: Any, name: str) -> list[Any]:
    """Return what each row has in a column: a Python value, or an array for a list."""
    kind = KINDS[name]
    array = column.cast(arrow_schema().field(name).type).combine_chunks()
    if kind not in LISTS:
        found: list[Any] = array.to_pylist()
        return found
    inner = array.values
    parts = inner.flatten() if kind == "runs" else [inner]
    if any(part.null_count for part in parts):
        raise ValueError(f"{name} has an element that is null")
    flat = [part.to_numpy(zero_copy_only=False) for part in parts]
    numbers = np.stack(flat, axis=1) if kind == "runs" else flat[0]
    offsets, is_there = array.offsets.to_pylist(), array.is_valid().to_pylist()
    return [numbers[start:stop] if there else None for there, start, stop in zip(is_there, offsets, offsets[1:])]


def _decoded(
    path: Path, begin: int, rows: Sequence[Mapping[str, Any]], *, allow_infinite: bool
) -> tuple[int, Prompt, Trajectory]:
    try:
        prompt, trajectory = _decode(rows, allow_infinite=allow_infinite)
        return rows[0]["global_step"] or 0, prompt, trajectory
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        which = f"row {begin}" if len(rows) == 1 else f"rows {begin} to {begin + len(rows) - 1}"
        raise DataError(f"{path}, {which}: not a recorded trajectory ({error}).") from error


def _decode(rows: Sequence[Mapping[str, Any]], *, allow_infinite: bool) -> tuple[Prompt, Trajectory]:
    head = rows[0]
    turns: list[Turn] = []
    for number, row in enumerate(rows):
        if row["turn"] is None and len(rows) == 1:
            break
        if row["turn"] != number or (row["uid"], row["sample"]) != (head["uid"], head["sample"]):
            raise ValueError(
                f"turn {row['turn']} of {row['uid']}/{row['sample']} stands where its turn {number} belongs"
            )
        try:
            turns.append(_decode_turn(row, number, allow_infinite=allow_infinite))
        except ValueError as error:
            raise ValueError(f"turn {number}: {error}") from None
    if head["num_turns"] not in (None, len(turns)):
        raise ValueError(f"{len(turns)} of its {head['num_turns']} turns are there")
    record = {"uid": head["uid"], **{name: head[name] for name in OF_TRAJECTORY if head[name] is not None}}
    numbers: dict[str, dict[str, float]] = {}
    for name in OF_FIRST_ROW:
        if head[name] is None:
            continue
        value = parse_json(head[name])
        if allow_infinite and name in ("metrics", "rewards"):  # which stand as texts
            numbers[name] = {each: float(number) for each, number in value.items()}
        else:
            record[name] = value
    if head["failure_kind"] is not None:
        names = {"kind": "failure_kind", "message": "failure_message", "turn_index": "failure_turn"}
        record["failure"] = {name: head[column] for name, column in names.items()}
    if head["teacher_prompt_token_ids"] is not None:
        record["teacher_prompt_token_ids"] = head["teacher_prompt_token_ids"].tolist()
    prompt, trajectory = decode_with_turns(record, turns)
    sample = UNNUMBERED if head["sample"] is None else trajectory.sample_index
    return prompt, replace(trajectory, sample_index=sample, **numbers)  # type: ignore[arg-type]


def _decode_turn(row: Mapping[str, Any], number: int, *, allow_infinite: bool) -> Turn:
    added, response, parent = row["added_token_ids"], row["response_token_ids"], row["parent"]
    if added is None or response is None or not len(response) or (parent is None and not len(added)):
        raise ValueError("a turn has an empty prompt or response")
    if parent is not None and not 0 <= parent < number:
        raise ValueError(f"parent must be the number of an earlier turn or null; got {parent}")
    logprobs = _or_none(row["logprobs"], np.float32)
    if not allow_infinite:
        finite(row["reward"], "reward")
        if not np.isfinite(logprobs).all():
            raise ValueError("a log-probability must be a finite number")
    runs = row["versions"]
    routed = NO_ROUTING
    if row["routed_experts"] is not None:
        shape = _or_none(row["routed_experts_shape"], np.int32).tolist()
        if min(shape, default=-1) < 0:
            raise ValueError(f"routed_experts_shape must be [tokens, layers, k]; got {shape}")
        routed = row["routed_experts"].reshape(shape)
    return Turn(
        parent=parent,
        added_token_ids=added,
        response_token_ids=response,
        response_logprobs=logprobs,
        loss_mask=_or_none(row["loss_mask"], np.bool_),
        response_text=row["text"] or "",
        reward=row["reward"],
        observations=messages(parse_json(row["observations"] or "[]"), "observations"),
        tool_calls=messages(parse_json(row["tool_calls"] or "[]"), "tool_calls"),
        stop_reason=StopReason(row["stop_reason"] or StopReason.STOP.value),
        weight_versions=(VersionRun(0, 0),) if runs is None else tuple(VersionRun(*run) for run in runs.tolist()),
        routed_experts=routed,
        images=from_record(parse_json(row["images"] or "[]")),
    )


def _or_none(column: NDArray[Any] | None, dtype: type[np.generic]) -> NDArray[Any]:
    return np.empty(0, dtype) if column is None else column


def _first_line(error: BaseException) -> str:
    """Return what a library says of a file, in one line."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
