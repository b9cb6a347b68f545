"""The rollouts of a run at rest: Parquet files (`rollout_columns.py`), written whole or not at all, and read back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_train.images import as_record
from skyrl_train.system.files import bring_to_disk, json_text, sync_folder, writable_text
from skyrl_train.telemetry.records import reading as rollout_reading
from skyrl_train.telemetry.records.columns import (
    FAILED,
    FORMAT,
    KINDS,
    LISTS,
    METADATA,
    SUFFIX,
    StoreFacts,
    arrow_schema,
    leaves,
    rollout_file,
)
from skyrl_train.telemetry.records.log import in_batches, read_json_lines
from skyrl_train.types import Prompt, RolloutBatch, Trajectory, Turn

Pairs = Iterable[tuple[Prompt, Trajectory]]
TurnValues = Sequence[NDArray[np.float32]]
"""Per turn, a number for each response token."""
FloatColumns = Mapping[str, Sequence[TurnValues | None]]
"""By name, per trajectory in the batch's order; None where there are none (a failed trajectory, say)."""

_ROW_GROUP_ITEMS = 2**22
"""Tokens and characters that are laid out at a time, which bounds the memory of writing."""


def write_rollouts(
    folder: Path,
    rollouts: RolloutBatch,
    *,
    purpose: str,
    global_step: int,
    columns: FloatColumns | None = None,
    to_bfloat16: bool = False,
    sample_fraction: float = 1.0,
) -> Path:
    """Write one step's trajectories; the file appears complete or not at all.

    Args:
        columns: Some of `FLOAT_COLUMNS`.
        to_bfloat16: Round them.
        sample_fraction: What `rollouts` are of the step's.

    Raises:
        ValueError: A column does not match the turns.
        OSError: The disk does not take it.
    """
    facts = StoreFacts(
        float_columns=dict.fromkeys(columns or {}, "bfloat16" if to_bfloat16 else "float32"),
        sample_fraction=sample_fraction,
    )
    path = rollout_file(folder, purpose=purpose, global_step=global_step)
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
    rollout_file(folder, purpose="train", global_step=global_step).unlink(missing_ok=True)
    return path


def read_rollouts(path: Path) -> dict[int, RolloutBatch]:
    """Return the batches of one file, by global step in the order of the file: Parquet, or JSON lines by another name.

    Raises:
        DataError: Names the file, the row or line and what is wrong with it.
    """
    if path.suffix != SUFFIX:
        return read_json_lines(path)
    return in_batches(path, rollout_reading.recorded(path, allow_infinite=False))


def read_failed_rollouts(path: Path) -> list[tuple[Prompt, Trajectory]]:
    """Return the trajectories of `failed_step_N.parquet`, which need not be whole groups, with numbers that are not finite.
    Raises DataError as `read_rollouts` does."""
    return [(prompt, trajectory) for _, prompt, trajectory in rollout_reading.recorded(path, allow_infinite=True)]


def read_facts(path: Path) -> StoreFacts:
    """Return what a file says of itself. Raises DataError."""
    return rollout_reading.read_facts(path) if path.suffix == SUFFIX else StoreFacts()


def _write(path: Path, step: Mapping[str, object], pairs: Pairs, columns: FloatColumns, facts: StoreFacts) -> Path:
    import pyarrow.parquet

    encodings = dict.fromkeys(leaves("ids", "floats", "experts"), "BYTE_STREAM_SPLIT")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
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
            last = prompt, _of_prompt(prompt)
        floats = {
            name: _checked(name, values, trajectory, to_bfloat16=facts.float_columns[name] == "bfloat16")
            for name, column in columns.items()
            if (values := column[index]) is not None
        }
        head = {**step, **_head(prompt, trajectory)}
        first = {**last[1], **_first_row(trajectory)}
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


def _of_prompt(prompt: Prompt) -> dict[str, Any]:
    return {
        "prompt": json_text(prompt.messages),
        "extras": json_text(prompt.extras),
        "tools": json_text(prompt.tools),
    }


def _first_row(trajectory: Trajectory) -> dict[str, Any]:
    teacher = trajectory.teacher_prompt_token_ids
    return {
        "first_messages": json_text(trajectory.first_messages),
        "metrics": json_text(trajectory.metrics),
        "rewards": json_text(trajectory.rewards),
        "teacher_prompt_token_ids": teacher if len(teacher) else None,
    }


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
