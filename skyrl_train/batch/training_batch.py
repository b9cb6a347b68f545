"""The training input batch: jagged at rest, padded only at the point of use.

Token columns lie flat, one row after the other, aligned with `input_ids`; `row_offsets` says where rows begin. A
declared schema gives each column its type, so taking, joining, padding and moving rows is one loop over it.

Example: rows `[7, 8, 9]` and `[5, 6]` are `input_ids = [7, 8, 9, 5, 6]` with `row_offsets = [0, 3, 5]`; padded to `[2, 3]`,
their tokens are at 0 1 2, 3 4. Sizes that follow from lengths are known where the lengths are. On a device, asking for them
makes the host wait for all that is queued there, so that the functions on tensors are called before rows go to one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from skyrl_train.batch.batch_metadata import DUMMY_ROW_LENGTH, BatchMetadata as BatchMetadata, padded_metadata
from skyrl_train.batch.references import Layer, ReferencedColumns, RowSharing
from skyrl_train.errors import BatchError
from skyrl_train.registry import did_you_mean


@dataclass(frozen=True)
class ColumnSpec:
    """One column of the batch."""

    dtype: torch.dtype
    """Floating-point columns may be float32 or float64; the others have exactly this type."""
    pad_value: float | int | bool
    """What `padded` puts after a row's end, and what a dummy row holds."""
    optional: bool
    """False: every batch has it."""
    per: Literal["token", "row"]
    is_wide: bool = False
    """`[num_tokens, any]`, in place of one value for each token."""


ROUTED = "routed_experts"

SCHEMA: dict[str, ColumnSpec] = {
    "input_ids": ColumnSpec(torch.int32, 0, False, "token"),
    "loss_mask": ColumnSpec(torch.bool, False, False, "token"),
    "response_mask": ColumnSpec(torch.bool, False, True, "token"),
    "rewards": ColumnSpec(torch.float32, 0.0, False, "token"),
    "rollout_logprobs": ColumnSpec(torch.float32, 0.0, True, "token"),
    "old_logprobs": ColumnSpec(torch.float32, 0.0, True, "token"),
    "ref_logprobs": ColumnSpec(torch.float32, 0.0, True, "token"),
    "values": ColumnSpec(torch.float32, 0.0, True, "token"),
    "advantages": ColumnSpec(torch.float32, 0.0, True, "token"),
    "returns": ColumnSpec(torch.float32, 0.0, True, "token"),
    "loss_weights": ColumnSpec(torch.float64, 0.0, True, "token"),
    "sum_pi_squared": ColumnSpec(torch.float32, 0.0, True, "token"),
    "entropies": ColumnSpec(torch.float32, 0.0, True, "token"),
    "entropy_coef": ColumnSpec(torch.float64, 0.0, True, "token"),
    "policy_weights": ColumnSpec(torch.float64, 0.0, True, "token"),
    "sequence_log_ratio": ColumnSpec(torch.float64, 0.0, True, "token"),
    "position_ids": ColumnSpec(torch.int32, 0, True, "token"),
    "weight_version": ColumnSpec(torch.int32, 0, True, "token"),
    ROUTED: ColumnSpec(torch.int16, -1, True, "token", is_wide=True),
    "prompt_index": ColumnSpec(torch.int32, -1, False, "row"),
    "trajectory_index": ColumnSpec(torch.int32, -1, False, "row"),
    "step_index": ColumnSpec(torch.int32, 0, False, "row"),
    "is_last_step": ColumnSpec(torch.bool, False, False, "row"),
    "is_padding": ColumnSpec(torch.bool, True, False, "row"),
    "sample_count": ColumnSpec(torch.int32, 0, True, "row"),
    "greedy_rewards": ColumnSpec(torch.float32, 0.0, True, "row"),
    "loss_index": ColumnSpec(torch.int32, 0, True, "row"),
    "adapter_index": ColumnSpec(torch.int32, 0, True, "row"),
}
"""Token columns (position t belongs to token t of `input_ids`), then row columns.

`loss_mask`: the policy sampled this token and is trained on it. `response_mask`: the token is of a turn's response, trained
or not; absent where that is `loss_mask`. `rewards`: a turn's reward sits on its last response token. `loss_weights`: set
when a mini-batch is closed; so are those of `algorithms/step_columns.py`. `position_ids`: where rows were packed of several
sequences, the position within each; absent where a row is one sequence. `weight_version`: of the weights that sampled the
token (outside responses that of the metadata); absent where that is the metadata's for all, so that it costs nothing where
rollouts wait for each update. `routed_experts`: `[num_tokens, layers * k]`, as the engine recorded them; -1 where it did
not. `trajectory_index`: unique in the batch; the rows of one trajectory share it. `is_padding`:
the row stands for a failed trajectory or fills up a shard; never counted. `greedy_rewards`: of the greedy sample of its
prompt. `loss_index`: which of the losses that a pass is given is the row's. `adapter_index`: which of the adapters. Beside
these there may be a row column for each of a trajectory's rewards; see `component_column`.
"""

_COMPONENT = "reward/"
_COMPONENT_SPEC = ColumnSpec(torch.float32, 0.0, True, "row")


def component_column(name: str) -> str:
    """The row column of the reward component `name`: float, equal on all rows of a trajectory."""
    return _COMPONENT + name


_FLOATS = (torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingInputBatch:
    """Rows of tokens and facts about them. Immutable: every operation returns a new batch.

    Taking, slicing, joining and padding copy, so that a part holds and ships nothing of the whole.
    Raises BatchError, naming the column, where shapes, types or names contradict the schema.
    """

    token_columns: Mapping[str, Tensor]
    """Each `[num_tokens]`; `ReferencedColumns` where they lie elsewhere."""
    row_columns: Mapping[str, Tensor]
    """Each `[num_rows]`."""
    row_offsets: Tensor
    """int64 `[num_rows + 1]`: row i is tokens `row_offsets[i]` to `row_offsets[i + 1] - 1`."""
    metadata: BatchMetadata
    padded_positions: tuple[int, Tensor] | None = None
    """`padding()` of these rows, found before they went to another device, where its size is not known."""
    num_rows: int = field(init=False)
    num_tokens: int = field(init=False)
    lengths: Tensor = field(init=False)
    """int64 `[num_rows]`, tokens of each row, at least 1."""

    def __post_init__(self) -> None:
        derive = object.__setattr__  # these follow from the columns; nobody else may set anything
        columns = self.token_columns
        if isinstance(columns, ReferencedColumns):
            # Of the offsets, since asking for a column would read it.
            derive(self, "num_tokens", int(columns.row_offsets[-1]))
        else:
            derive(self, "token_columns", dict(columns))
            derive(self, "num_tokens", len(columns.get("input_ids", ())))
        derive(self, "row_columns", dict(self.row_columns))
        derive(self, "num_rows", len(self.row_offsets) - 1)
        derive(self, "lengths", self.row_offsets.diff())
        _check_batch(self)

    def __len__(self) -> int:
        return self.num_rows

    def __contains__(self, name: object) -> bool:
        return name in self.token_columns or name in self.row_columns

    def __getitem__(self, name: str) -> Tensor:
        """The column: flat `[num_tokens]` or `[num_rows]`. Raises BatchError for a column that is not there."""
        column = self.row_columns.get(name)
        column = self.token_columns.get(name) if column is None else column
        if column is None:
            present = [*self.token_columns, *self.row_columns]
            raise BatchError(
                f"no column {name!r} in this batch, which has {', '.join(present)}. {did_you_mean(name, present)}"
            )
        return column

    def without_columns(self, *names: str) -> TrainingInputBatch:
        """The batch without these optional token columns, where it has them: what is not read need not be copied."""
        required = [name for name in names if not _spec(name).optional]
        if required:
            raise BatchError(f"column {required[0]!r} is not optional")
        if not any(name in self for name in names):
            return self
        if isinstance(self.token_columns, ReferencedColumns):
            return replace(self, token_columns=self.token_columns.without(names))
        kept = {name: column for name, column in self.token_columns.items() if name not in names}
        return replace(self, token_columns=kept)

    def with_columns(self, **columns: Tensor) -> TrainingInputBatch:
        """Adds or replaces columns, flat `[num_tokens]` or `[num_rows]`."""
        of_tokens = {name: column for name, column in columns.items() if _spec(name).per == "token"}
        of_rows = {name: column for name, column in columns.items() if name not in of_tokens}
        if isinstance(self.token_columns, ReferencedColumns):
            token_columns: Mapping[str, Tensor] = self.token_columns.with_tensors(of_tokens)
        else:
            token_columns = {**self.token_columns, **of_tokens}
        return replace(self, token_columns=token_columns, row_columns={**self.row_columns, **of_rows})

    def with_layer(self, layer: Layer) -> TrainingInputBatch:
        """Adds or replaces token columns by reference, of a batch whose columns are references."""
        if not isinstance(self.token_columns, ReferencedColumns):
            raise BatchError("the columns of this batch are here: add others with with_columns")
        return replace(self, token_columns=self.token_columns.with_layer(layer))

    def with_spread(self, name: str, values: Tensor) -> TrainingInputBatch:
        """Adds or replaces a float64 token column with one number of each row, `[num_rows]`, on its tokens with loss, and 0
        elsewhere."""
        if isinstance(self.token_columns, ReferencedColumns):
            return replace(self, token_columns=self.token_columns.with_spread(name, values.numpy()))
        mask = self["loss_mask"]
        column = torch.zeros(self.num_tokens, dtype=torch.float64, device=mask.device)
        column[mask] = torch.repeat_interleave(values, self.loss_tokens())
        return self.with_columns(**{name: column})

    def loss_tokens(self) -> Tensor:
        """int64 `[num_rows]`: how many of a row's tokens have `loss_mask`."""
        if isinstance(self.token_columns, ReferencedColumns):
            return torch.from_numpy(self.token_columns.loss_tokens.copy())
        # Differences of running totals count rows without any such token, too, and make no float of a count.
        before = torch.zeros(self.num_tokens + 1, dtype=torch.int64, device=self.row_offsets.device)
        torch.cumsum(self["loss_mask"], dim=0, out=before[1:])
        return before[self.row_offsets].diff()

    def here(self) -> TrainingInputBatch:
        """The batch with its columns read into this process; itself where they are."""
        if isinstance(self.token_columns, ReferencedColumns):
            return replace(self, token_columns=self.token_columns.here())
        return self

    def take(self, rows: Sequence[int] | Tensor) -> TrainingInputBatch:
        """The given rows, in the given order. Raises BatchError for a row that does not exist."""
        index = torch.as_tensor(rows, dtype=torch.int64, device=self.row_offsets.device)
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < self.num_rows:
            raise BatchError(f"rows {int(index.min())} to {int(index.max())} of a batch of {self.num_rows} rows")
        uids, offsets = self.metadata.uids, offsets_of(self.lengths[index])
        if isinstance(self.token_columns, ReferencedColumns):
            token_columns: Mapping[str, Tensor] = self.token_columns.take(index.numpy(), offsets.numpy())
        else:
            tokens = token_positions(self.row_offsets, index)
            token_columns = {name: column[tokens] for name, column in self.token_columns.items()}
        return TrainingInputBatch(
            token_columns=token_columns,
            row_columns={name: column[index] for name, column in self.row_columns.items()},
            row_offsets=offsets,
            metadata=self.metadata.of_rows(
                (uids[row] for row in index.tolist()), self.metadata.images_of(index.tolist())
            ),
        )

    def slice(self, start: int, stop: int) -> TrainingInputBatch:
        """Rows `start` to `stop - 1`. Raises BatchError where they are not all there."""
        if not 0 <= start <= stop <= self.num_rows:
            raise BatchError(f"rows [{start}, {stop}) of a batch of {self.num_rows} rows")
        first, last = int(self.row_offsets[start]), int(self.row_offsets[stop])
        offsets = self.row_offsets[start : stop + 1] - first
        # Copied: a view would keep, and ship to another process, the memory of the whole batch.
        if isinstance(self.token_columns, ReferencedColumns):
            token_columns: Mapping[str, Tensor] = self.token_columns.take(np.arange(start, stop), offsets.numpy())
        else:
            token_columns = {name: column[first:last].clone() for name, column in self.token_columns.items()}
        return TrainingInputBatch(
            token_columns=token_columns,
            row_columns={name: column[start:stop].clone() for name, column in self.row_columns.items()},
            row_offsets=offsets,
            metadata=self.metadata.of_rows(self.metadata.uids[start:stop], self.metadata.images[start:stop]),
        )

    @staticmethod
    def cat(batches: Sequence[TrainingInputBatch]) -> TrainingInputBatch:
        """One after the other. Raises BatchError where columns, steps or the numbering of prompts differ."""
        if not batches:
            raise BatchError("cat of no batches: there is no schema to take columns from")
        head = batches[0]
        _check_joinable(batches)
        return TrainingInputBatch(
            token_columns={name: torch.cat([batch[name] for batch in batches]) for name in head.token_columns},
            row_columns={name: torch.cat([batch[name] for batch in batches]) for name in head.row_columns},
            row_offsets=offsets_of(torch.cat([batch.lengths for batch in batches])),
            metadata=head.metadata.of_rows(
                (uid for batch in batches for uid in batch.metadata.uids),
                # One without images lists none, where another of them lists those of each row.
                (each for batch in batches for each in batch.metadata.images or ((),) * batch.num_rows),
            ),
        )

    def pad_rows(self, count: int, *, uid: str | None = None) -> TrainingInputBatch:
        """`count` dummy rows more: two tokens of id 0 without loss, counted nowhere.

        They get the last row's uid (and its prompt's number) unless `uid` is given, and then belong to no prompt.
        What was derived from the uids is extended where it stays true and dropped where it does not.
        """
        if count < 0 or (self.num_rows == 0 and uid is None):
            raise BatchError(
                f"cannot add {count} dummy rows to {self.num_rows} rows" + ("" if count < 0 else " without a uid")
            )
        if count == 0:
            return self
        device, referenced = self.row_offsets.device, self.token_columns
        by_value = {} if isinstance(referenced, ReferencedColumns) else referenced
        columns = {
            name: torch.cat(
                [self[name], self[name].new_full((count * size, *self[name].shape[1:]), _spec(name).pad_value)]
            )
            for names, size in ((by_value, DUMMY_ROW_LENGTH), (self.row_columns, 1))
            for name in names
        }
        if uid is None:  # of the last prompt, whose rows still lie together then
            columns["prompt_index"][self.num_rows :] = self["prompt_index"][-1]
        lengths = torch.cat([self.lengths, torch.full((count,), DUMMY_ROW_LENGTH, dtype=torch.int64, device=device)])
        offsets = offsets_of(lengths)
        return TrainingInputBatch(
            token_columns=referenced.padded(count, offsets.numpy())
            if isinstance(referenced, ReferencedColumns)
            else {name: columns[name] for name in by_value},
            row_columns={name: columns[name] for name in self.row_columns},
            row_offsets=offsets,
            metadata=padded_metadata(self.metadata, count, uid),
        )

    def padded(self, name: str, *, rows: Tensor | None = None) -> Tensor:
        """A token column as `[rows, max_len]`, right-padded with the schema's pad value.

        `rows` picks rows (int64); `max_len` is the longest of them.
        """
        if _spec(name).per == "row":
            raise BatchError(f"column {name!r} has one value per row: there is nothing to pad")
        column, lengths = self[name], self.lengths
        if rows is not None:
            column, lengths = column[token_positions(self.row_offsets, rows)], lengths[rows]
        width, positions = self.padding() if rows is None else padding_of(lengths)
        result = column.new_full((len(lengths) * width, *column.shape[1:]), _spec(name).pad_value)
        result[positions] = column
        return result.view(len(lengths), width, *column.shape[1:])

    def padding(self) -> tuple[int, Tensor]:
        """The longest row, and int64 `[num_tokens]`: where each token is in what `padded` gives, flattened."""
        return padding_of(self.lengths) if self.padded_positions is None else self.padded_positions

    def from_padded(self, padded: Tensor) -> Tensor:
        """The inverse of `padded`: `[num_rows, at least max_len, ...]` to flat `[num_tokens, ...]`."""
        width, positions = self.padding()
        if padded.dim() < 2 or padded.shape[0] != self.num_rows or padded.shape[1] < width:
            raise BatchError(f"shape {tuple(padded.shape)} where [{self.num_rows}, {width}] was expected")
        return padded[:, :width].flatten(0, 1)[positions]

    def to(self, device: torch.device | str) -> TrainingInputBatch:
        """Return the batch with all columns on `device`."""
        # Found here, as a size that follows from lengths would make the host wait for the device.
        width, positions = self.padding()
        return replace(
            self,
            token_columns={name: moved(column, device) for name, column in self.token_columns.items()},
            row_columns={name: moved(column, device) for name, column in self.row_columns.items()},
            row_offsets=moved(self.row_offsets, device),
            padded_positions=(width, moved(positions, device)),
        )


def batch_of_lengths(lengths: Sequence[int] | NDArray[np.int64]) -> TrainingInputBatch:
    """Rows of these lengths without content, each a trajectory and a prompt of its own: to try a strategy on."""
    sizes = torch.as_tensor(lengths, dtype=torch.int64)
    rows, tokens = len(sizes), int(sizes.sum())
    columns = {
        name: torch.full((tokens if spec.per == "token" else rows,), spec.pad_value, dtype=spec.dtype)
        for name, spec in SCHEMA.items()
        if not spec.optional
    }
    columns["prompt_index"] = columns["trajectory_index"] = torch.arange(rows, dtype=torch.int32)
    columns["is_padding"].fill_(False)
    columns["is_last_step"].fill_(True)
    columns["loss_mask"].fill_(True)
    return TrainingInputBatch(
        token_columns={name: column for name, column in columns.items() if SCHEMA[name].per == "token"},
        row_columns={name: column for name, column in columns.items() if SCHEMA[name].per == "row"},
        row_offsets=offsets_of(sizes),
        metadata=BatchMetadata(uids=tuple(f"row-{row}" for row in range(rows)), global_step=0, weight_version=0),
    )


PAD_VALUES = {name: spec.pad_value for name, spec in SCHEMA.items() if spec.per == "token"}


def by_reference(layer: Layer, batch: TrainingInputBatch, sharing: RowSharing | None = None) -> TrainingInputBatch:
    """Return the batch, whose token columns are here, with those of `layer` in their place, which has all of them."""
    columns = ReferencedColumns(
        [layer],
        batch.row_offsets.numpy(),
        batch.loss_tokens().numpy(),
        pad_values=PAD_VALUES,
        sharing=sharing,
    )
    return replace(batch, token_columns=columns)


def _spec(name: str) -> ColumnSpec:
    if name.startswith(_COMPONENT):
        return _COMPONENT_SPEC
    if name not in SCHEMA:
        raise BatchError(f"column {name!r} is not in the schema ({', '.join(SCHEMA)}). {did_you_mean(name, SCHEMA)}")
    return SCHEMA[name]


def _check_batch(batch: TrainingInputBatch) -> None:
    missing = [name for name, spec in SCHEMA.items() if not spec.optional and name not in batch]
    if missing:
        raise BatchError(f"the batch lacks the columns {', '.join(missing)}")
    # Columns by reference were looked at when their arrays were made: nothing of theirs is read here.
    of_tokens = {} if isinstance(batch.token_columns, ReferencedColumns) else batch.token_columns
    for columns, per, size in ((of_tokens, "token", batch.num_tokens), (batch.row_columns, "row", batch.num_rows)):
        for name, column in columns.items():
            spec = _spec(name)
            _require(spec.per == per, lambda: f"column {name!r} has one value per {spec.per}, not per {per}")  # noqa: B023
            _require(
                tuple(column.shape) == (size, *(column.shape[1:2] if spec.is_wide else ())),
                lambda: f"column {name!r} has shape {tuple(column.shape)} where [{size}] was expected",  # noqa: B023
            )
            _require(
                column.dtype == spec.dtype or (column.dtype in _FLOATS and spec.dtype in _FLOATS),
                lambda: f"column {name!r} is {column.dtype} where {spec.dtype} was expected",  # noqa: B023
            )
    images = batch.metadata.images
    _require(len(images) in (0, batch.num_rows), lambda: f"images of {len(images)} rows for {batch.num_rows} rows")
    _require(
        len(batch.metadata.uids) == batch.num_rows,
        lambda: f"{len(batch.metadata.uids)} uids for a batch of {batch.num_rows} rows",
    )
    offsets = batch.row_offsets
    _require(
        offsets.dtype == torch.int64 and offsets.dim() == 1,
        lambda: f"row_offsets is {offsets.dtype}, {offsets.dim()}-d",
    )
    if offsets.device.type == "cpu":  # elsewhere reading them back would stall the device
        bad = torch.nonzero(batch.lengths < 1)
        _require(
            len(bad) == 0,
            lambda: f"row {int(bad[0])} has {int(batch.lengths[int(bad[0])])} tokens: a row has at least 1",
        )
        _require(
            int(offsets[0]) == 0 and int(offsets[-1]) == batch.num_tokens,
            lambda: f"row_offsets run from {int(offsets[0])} to {int(offsets[-1])} over {batch.num_tokens} tokens",
        )


def _require(holds: bool, message: Callable[[], str]) -> None:
    if not holds:
        raise BatchError(message())


def _check_joinable(batches: Sequence[TrainingInputBatch]) -> None:
    head = batches[0]
    uid_of: dict[int, str] = {}
    for number, batch in enumerate(batches):
        if {*batch.token_columns, *batch.row_columns} != {*head.token_columns, *head.row_columns}:
            odd = {*batch.token_columns, *batch.row_columns} ^ {*head.token_columns, *head.row_columns}
            raise BatchError(f"cat: batch {number} and batch 0 differ in the columns {', '.join(sorted(odd))}")
        if batch.metadata.global_step != head.metadata.global_step:
            raise BatchError(
                f"cat: batch {number} is of step {batch.metadata.global_step}, batch 0 of {head.metadata.global_step}"
            )
        for prompt, uid in zip(batch["prompt_index"].tolist(), batch.metadata.uids):
            # Batches that each count their prompts from 0 would make one prompt of two, whose samples are then compared.
            if prompt >= 0 and uid_of.setdefault(prompt, uid) != uid:
                raise BatchError(f"cat: prompt_index {prompt} is {uid_of[prompt]!r} and, in batch {number}, {uid!r}")


def moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """On `device`; waits for what is queued there only on the way to the host. (Unpinned memory is read at once.)"""
    return tensor.to(device, non_blocking=torch.device(device).type != "cpu")


def offsets_of(lengths: Tensor) -> Tensor:
    """int64 `[rows + 1]`: 0, then the running total of `lengths` int64 `[rows]`."""
    offsets = lengths.new_zeros(len(lengths) + 1)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def token_positions(row_offsets: Tensor, rows: Tensor) -> Tensor:
    """int64: where in a flat column the tokens of `rows` are, row after row."""
    lengths = row_offsets[rows + 1] - row_offsets[rows]
    # Of each token: where its row begins in the column, less where it
    # begins in the result. Added to 0, 1, 2, ... that is its place.
    shift = torch.repeat_interleave(row_offsets[rows] - offsets_of(lengths)[:-1], lengths)
    return torch.arange(len(shift), device=shift.device) + shift


def padding_of(lengths: Tensor) -> tuple[int, Tensor]:
    """The longest row, and int64 `[tokens]`: where each token is in rows `[rows, longest]`, flattened."""
    width = int(lengths.max()) if len(lengths) else 0
    filled = width - lengths
    # Of each token: what the rows before its own are filled up with, by which it moves back.
    shift = torch.repeat_interleave(filled.cumsum(0) - filled, lengths)
    return width, torch.arange(len(shift), device=lengths.device) + shift
