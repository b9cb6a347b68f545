"""Reads trajectories from Parquet (`columns.py`): whatever a file holds, they are as a run writes them, or it is
refused with the row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_train.errors import DataError
from skyrl_train.system.files import finite_number, parse_json, shown
from skyrl_train.telemetry.records.columns import (
    FLOAT_COLUMNS,
    FORMAT,
    KINDS,
    LISTS,
    METADATA,
    OF_FIRST_ROW,
    StoreFacts,
    arrow_schema,
)
from skyrl_train.telemetry.records.log import decoded
from skyrl_train.types import Prompt, Trajectory

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
        fraction = finite_number(content, "sample_fraction")
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
        if row.get("turn") in (None, 0) and rows:
            yield _decoded(path, begin, rows, allow_infinite=allow_infinite)
            rows, begin = [], number
        rows.append(row)
    if rows:
        yield _decoded(path, begin, rows, allow_infinite=allow_infinite)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield what each row has; a null is not there."""
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
            for values in zip(*columns.values()):
                yield {name: value for name, value in zip(columns, values) if value is not None}


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
    path: Path, begin: int, rows: Sequence[dict[str, Any]], *, allow_infinite: bool
) -> tuple[int, Prompt, Trajectory]:
    try:
        return decoded(_as_line(rows, allow_infinite=allow_infinite), allow_infinite=allow_infinite)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        which = f"row {begin}" if len(rows) == 1 else f"rows {begin} to {begin + len(rows) - 1}"
        raise DataError(f"{path}, {which}: not a recorded trajectory ({error}).") from error


def _as_line(rows: Sequence[dict[str, Any]], *, allow_infinite: bool) -> dict[str, Any]:
    """Return the rows of a trajectory as the record that a line of JSON has, with arrays for columns. Raises ValueError."""
    record = rows[0]
    uid, sample, turns = record.get("uid"), record.get("sample"), rows
    if len(rows) == 1 and "turn" not in record:
        turns = []
    for number, row in enumerate(turns):
        if (row.get("turn"), row.get("uid"), row.get("sample")) != (number, uid, sample):
            where = f"turn {row.get('turn')} of {row.get('uid')}/{row.get('sample')}"
            raise ValueError(f"{where} stands where its turn {number} belongs")
        try:
            _complete_turn(row)
        except ValueError as error:
            raise ValueError(f"turn {number}: {error}") from None
    if record.get("num_turns", len(turns)) != len(turns):
        raise ValueError(f"{len(turns)} of its {record['num_turns']} turns are there")
    record = {**record, "turns": turns}
    _parse_json(record, OF_FIRST_ROW)
    if "failure_kind" in record:
        names = {"kind": "failure_kind", "message": "failure_message", "turn_index": "failure_turn"}
        record["failure"] = {name: record.get(column) for name, column in names.items()}
    for name in ("metrics", "rewards") if allow_infinite else ():  # which stand as texts
        record[name] = {each: float(number) for each, number in record.get(name, {}).items()}
    return record


def _complete_turn(row: dict[str, Any]) -> None:
    """Give a row what a turn of a line has in another form."""
    _parse_json(row, ("observations", "tool_calls", "images"))
    if "versions" in row:
        row["weight_versions"] = row["versions"].tolist()
    if "routed_experts" in row:
        shape = row.get("routed_experts_shape", np.empty(0)).tolist()
        if min(shape, default=-1) < 0:
            raise ValueError(f"routed_experts_shape must be [tokens, layers, k]; got {shape}")
        row["routed_experts"] = row["routed_experts"].reshape(shape)


def _parse_json(row: dict[str, Any], names: Sequence[str]) -> None:
    for name in names:
        if text := row.pop(name, ""):
            row[name] = parse_json(text)


def _first_line(error: BaseException) -> str:
    """Return what a library says of a file, in one line."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
