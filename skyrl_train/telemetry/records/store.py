"""The rollouts of a run at rest: Parquet files (`columns.py`), or folders of them (`parts.py`), written whole or not at all,
and read back. Whatever a file holds, its trajectories are as a run writes them, or it is refused with the row."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_train.errors import DataError
from skyrl_train.images import as_record
from skyrl_train.system.files import (
    bring_to_disk,
    finite_number,
    json_text,
    parse_json,
    shown,
    sync_folder,
    writable_text,
)
from skyrl_train.telemetry.records.columns import (
    FAILED,
    FLOAT_COLUMNS,
    FORMAT,
    KINDS,
    LISTS,
    METADATA,
    OF_FIRST_ROW,
    OF_PROMPT,
    OF_TRAJECTORY,
    SUFFIX,
    StoreFacts,
    arrow_schema,
    leaves,
    rollout_file,
)
from skyrl_train.telemetry.records.log import decoded, in_batches, read_json_lines
from skyrl_train.telemetry.records.parts import part_file, read_parts, remove_rollouts, temporary_of
from skyrl_train.types import Prompt, RolloutBatch, Trajectory, Turn

Pairs = Iterable[tuple[Prompt, Trajectory]]
TurnValues = Sequence[NDArray[np.float32]]
"""Per turn, a number for each response token."""
FloatColumns = Mapping[str, Sequence[TurnValues | None]]
"""By name, per trajectory in the batch's order; None where there are none (a failed trajectory, say)."""

_ROW_GROUP_ITEMS = 2**22
"""Tokens and characters that are laid out at a time, which bounds the memory of writing."""
_LARGEST_EXPANSION = 2000
"""How many times its size a file may say that it holds: more would be made to fill the memory of who reads it."""
_SMALL = 2**27
_UNREADABLE = (OSError, ValueError, TypeError, LookupError, MemoryError, OverflowError, NotImplementedError)
"""What pyarrow raises for files that are damaged: its errors are subclasses of these."""
_REQUIRED = ("uid", "turn", "added_token_ids", "response_token_ids", "reward")
_NOT_READ = frozenset({"purpose", "error", "trajectory_reward", *FLOAT_COLUMNS})
"""Columns that a batch of rollouts has no place for."""


def write_rollouts(
    folder: Path,
    rollouts: RolloutBatch,
    *,
    purpose: str,
    global_step: int,
    columns: FloatColumns | None = None,
    to_bfloat16: bool = False,
    sample_fraction: float = 1.0,
    part: int | None = None,
) -> Path:
    """Write one step's trajectories; the file appears complete or not at all.

    Args:
        columns: Some of `FLOAT_COLUMNS`.
        to_bfloat16: Round them.
        sample_fraction: What `rollouts` are of the step's, all parts together.
        part: Number of the part that they are, of those that `write_parts` has asked for.

    Raises:
        ValueError: A column does not match the turns.
        OSError: The disk does not take it.
    """
    facts = StoreFacts(
        float_columns=dict.fromkeys(columns or {}, "bfloat16" if to_bfloat16 else "float32"),
        sample_fraction=sample_fraction,
    )
    path = rollout_file(folder, purpose=purpose, global_step=global_step)
    if part is not None:
        path = part_file(temporary_of(path), part)
    return _write(path, {"global_step": global_step, "purpose": purpose}, pairs_of(rollouts), columns or {}, facts)


def pairs_of(rollouts: RolloutBatch) -> Iterator[tuple[Prompt, Trajectory]]:
    """Yield each trajectory with its prompt."""
    for index, trajectory in enumerate(rollouts.trajectories):
        yield rollouts.prompts[index // rollouts.n_samples_per_prompt], trajectory


def write_failed_rollouts(folder: Path, rollouts: Pairs, *, global_step: int, error: str) -> Path:
    """Write the trajectories of a step that ended by `error`, which stands in each row, as `failed_step_000003.parquet`. It
    takes the place of the step's own file: nothing was learned from them."""
    path = rollout_file(folder, purpose=FAILED, global_step=global_step)
    step = {"global_step": global_step, "purpose": FAILED, "error": writable_text(error)}
    _write(path, step, rollouts, {}, StoreFacts())
    remove_rollouts(rollout_file(folder, purpose="train", global_step=global_step))
    return path


def read_rollouts(path: Path) -> dict[int, RolloutBatch]:
    """Return the batches of one file, by global step in the order of the file: Parquet, or JSON lines by another name. A
    folder of parts holds what one file would.

    Raises:
        DataError: Names the file, the row or line and what is wrong with it.
    """
    if path.suffix != SUFFIX:
        return read_json_lines(path)
    return in_batches(path, _recorded(path, allow_infinite=False))


def read_failed_rollouts(path: Path) -> list[tuple[Prompt, Trajectory]]:
    """Return the trajectories of `failed_step_N.parquet`, which need not be whole groups, with numbers that are not finite.
    Raises DataError as `read_rollouts` does."""
    return [(prompt, trajectory) for _, prompt, trajectory in _recorded(path, allow_infinite=True)]


def read_facts(path: Path) -> StoreFacts:
    """Return what a file says of itself. Raises DataError."""
    if path.suffix != SUFFIX:
        return StoreFacts()
    path = read_parts(path).files[0]
    with _opened(path) as file:
        return _facts_of(path, file.metadata.metadata)


def read_columns(path: Path, names: Sequence[str]) -> Any:
    """Return those of the columns that a file or folder has, as a `pyarrow.Table` in the order of the batch. Raises
    DataError as `read_parts` does, and what pyarrow raises for a damaged file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    parts, tables, wanted = read_parts(path), [], {*names, "turn"}
    for file in parts.files:
        with pq.ParquetFile(file) as opened:
            tables.append(opened.read(columns=[name for name in opened.schema_arrow.names if name in wanted]))
    if not parts.order:
        return tables[0]
    found = []
    for table in tables:  # a trajectory begins where its turn is 0, or null
        starts = [*np.flatnonzero(~(table["turn"].to_numpy() > 0)).tolist(), len(table)]
        found.append(iter([table.slice(start, stop - start) for start, stop in pairwise(starts)]))
    return pa.concat_tables(parts.merged(found))


def _write(path: Path, step: Mapping[str, object], pairs: Pairs, columns: FloatColumns, facts: StoreFacts) -> Path:
    import pyarrow.parquet

    encodings = dict.fromkeys(leaves("ids", "floats", "experts"), "BYTE_STREAM_SPLIT")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_of(path)
    try:
        with open(temporary, "wb") as file:
            with pyarrow.parquet.ParquetWriter(
                file,
                arrow_schema(),
                compression="zstd",
                use_dictionary=[name for name in leaves("text", "int", "double", "runs") if name != "text"],
                column_encoding=encodings,
                write_page_checksum=True,
                store_schema=False,  # types follow from those of Parquet
            ) as writer:
                writer.add_key_value_metadata({METADATA: json.dumps({"format": FORMAT, **vars(facts)})})
                for rows in _row_groups(step, pairs, columns, facts):
                    writer.write_table(rows.table(), row_group_size=len(rows))
            file.flush()
            bring_to_disk(file.fileno(), path)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return path


class _Rows:
    """Columns of the rows to come, filled row by row."""

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {name: [] for name in KINDS}
        self.num_items = 0

    def __len__(self) -> int:
        return len(self.columns["uid"])

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row; what it does not name is null."""
        for name, values in self.columns.items():
            values.append(row.get(name))
        sized = ("text", "observations", "prompt", "added_token_ids", "response_token_ids", "routed_experts")
        self.num_items += sum(len(row[name]) for name in sized if row.get(name) is not None)

    def table(self) -> Any:
        import pyarrow as pa

        schema = arrow_schema()
        arrays = [_array(values, KINDS[name], schema.field(name).type) for name, values in self.columns.items()]
        return pa.Table.from_arrays(arrays, schema=schema)


def _array(values: Sequence[Any], kind: str, arrow_type: Any) -> Any:
    """Return one column. It is laid out here: `pyarrow.array` imports pandas, 30 MB, to ask whether it got a series."""
    import pyarrow as pa

    validity = _bits([each is not None for each in values])
    if kind in ("int", "double"):
        numbers = [0 if each is None else each for each in values]
        data = pa.py_buffer(np.asarray(numbers, dtype=np.int32 if kind == "int" else np.float64))
        return pa.Array.from_buffers(arrow_type, len(values), [validity, data])
    if kind == "text":
        values = [None if each is None else each.encode() for each in values]
    offsets = pa.py_buffer(np.cumsum([0, *(0 if each is None else len(each) for each in values)], dtype=np.int32))
    there = [each for each in values if each is not None]
    if kind == "text":
        return pa.Array.from_buffers(arrow_type, len(values), [validity, offsets, pa.py_buffer(b"".join(there))])
    flat = np.concatenate([np.asarray(each) for each in there]) if there else np.empty((0, 2) if kind == "runs" else 0)
    flat, element = flat.astype(LISTS[kind], copy=False), arrow_type.value_type
    if kind == "runs":
        columns = [
            pa.Array.from_buffers(pa.int32(), len(flat), [None, pa.py_buffer(np.ascontiguousarray(column))])
            for column in flat.T
        ]
        inner = pa.Array.from_buffers(element, len(flat), [None], children=columns)
    else:
        inner = pa.Array.from_buffers(
            element, len(flat), [None, _bits(flat) if kind == "flags" else pa.py_buffer(flat)]
        )
    return pa.Array.from_buffers(arrow_type, len(values), [validity, offsets], children=[inner])


def _bits(flags: Sequence[bool] | NDArray[Any]) -> Any:
    import pyarrow as pa

    return pa.py_buffer(np.packbits(np.asarray(flags, dtype=np.bool_), bitorder="little"))


def _row_groups(step: Mapping[str, object], pairs: Pairs, columns: FloatColumns, facts: StoreFacts) -> Iterator[_Rows]:
    """Yield the rows of whole trajectories, about as many as bound the memory."""
    rows = _Rows()
    last: tuple[Prompt | None, dict[str, Any]] = (None, {})
    for index, (prompt, trajectory) in enumerate(pairs):
        if last[0] is not prompt:  # its samples come one after the other
            last = prompt, {name: json_text(getattr(prompt, field)) for name, field in OF_PROMPT.items()}
        floats = {
            name: _checked(name, values, trajectory, to_bfloat16=facts.float_columns[name] == "bfloat16")
            for name, column in columns.items()
            if (values := column[index]) is not None
        }
        head = {**step, **_head(prompt, trajectory)}
        first = {**last[1], **{name: json_text(getattr(trajectory, name)) for name in OF_TRAJECTORY}}
        if len(trajectory.teacher_prompt_token_ids):
            first["teacher_prompt_token_ids"] = trajectory.teacher_prompt_token_ids
        for number, turn in enumerate(trajectory.turns):
            of_tokens = {name: values[number] for name, values in floats.items()}
            rows.append({**head, **first, **_turn_row(turn), "turn": number, **of_tokens})
            first = {}
        if not trajectory.turns:
            rows.append({**head, **first})
        if rows.num_items > _ROW_GROUP_ITEMS:
            yield rows
            rows = _Rows()
    if len(rows):
        yield rows


def _checked(name: str, values: TurnValues, trajectory: Trajectory, *, to_bfloat16: bool) -> list[NDArray[np.float32]]:
    if [len(turn) for turn in values] != [len(turn.response_token_ids) for turn in trajectory.turns]:
        raise ValueError(
            f"{name} of {trajectory.prompt_uid}/{trajectory.sample_index} do not match its response tokens"
        )
    columns = [np.asarray(each, dtype=np.float32) for each in values]
    return [_rounded(each) for each in columns] if to_bfloat16 else columns


def _rounded(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the nearest numbers that bfloat16 has, of two the even one; what is not finite stays."""
    bits = values.view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(values), nearest.view(np.float32), values)


def _head(prompt: Prompt, trajectory: Trajectory) -> dict[str, Any]:
    failure = trajectory.failure
    return {
        "uid": writable_text(trajectory.prompt_uid),
        "sample": trajectory.sample_index,
        "num_turns": len(trajectory.turns),
        "outcome": trajectory.outcome.value,
        "failure_kind": failure and failure.kind.value,
        "failure_message": failure and writable_text(failure.message),
        "failure_turn": failure and failure.turn_index,
        "trajectory_reward": None if failure else trajectory.reward,
        "greedy_reward": trajectory.greedy_reward,
        "env_class": prompt.env_class and writable_text(prompt.env_class),
        "dataset": writable_text(prompt.dataset) or None,
    }


def _turn_row(turn: Turn) -> dict[str, Any]:
    routed = turn.routed_experts
    return {
        "parent": turn.parent,
        "reward": turn.reward,
        "text": writable_text(turn.response_text),
        "observations": json_text(turn.observations),
        "tool_calls": json_text(turn.tool_calls) if turn.tool_calls else None,
        "stop_reason": turn.stop_reason.value,
        "versions": turn.weight_versions,
        "added_token_ids": turn.added_token_ids,
        "images": json_text(as_record(turn.images)) if turn.images else None,
        "response_token_ids": turn.response_token_ids,
        "logprobs": turn.response_logprobs if len(turn.response_logprobs) else None,
        "loss_mask": turn.loss_mask if len(turn.loss_mask) else None,
        "routed_experts": routed.ravel() if len(routed) else None,
        "routed_experts_shape": routed.shape if len(routed) else None,
    }


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


def _recorded(path: Path, *, allow_infinite: bool) -> Iterator[tuple[int, Prompt, Trajectory]]:
    """Yield the trajectories of a file, or of a folder, and their steps."""
    parts = read_parts(path)
    if parts.order:
        yield from parts.merged([_recorded(file, allow_infinite=allow_infinite) for file in parts.files])
        return
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
