"""Token columns of a batch by reference: which rows of which arrays, read only by who computes with the tokens.

A batch whose arrays lie elsewhere keeps of each row its length, how many of its tokens have loss, and where they are. Taking
and padding rows moves those numbers alone. Rows `a b c` and `d e`, whose log-probabilities were scored in two shares:

    layer of the rows        one piece of rows [abc, de]              piece_of_row 0 0, row_in_piece 0 1
    layer of the scores      two pieces, of rows [de] and [abc]       piece_of_row 1 0, row_in_piece 0 0

Whoever asks for a column reads it (`columns["input_ids"]`); `here` reads all of them, each piece once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from skyrl_train.batch.batch_metadata import Rows, ranges


class Arrays(Protocol):
    """Arrays of plain types by name, in this process or elsewhere."""

    def read(self) -> Mapping[str, NDArray[Any]]:
        """Return the arrays, which nobody writes into. Raises SkyrlTrainError where they are gone."""
        ...


@dataclass(frozen=True, eq=False)
class ArraysHere:
    """Arrays of this process: the reference is what it refers to."""

    arrays: Mapping[str, NDArray[Any]]

    def read(self) -> Mapping[str, NDArray[Any]]:
        """Return the arrays themselves, which nobody may write into."""
        return self.arrays


@dataclass(frozen=True, eq=False)
class Piece:
    """Rows whose arrays lie together."""

    source: Arrays
    offsets: Rows
    """int64 `[rows + 1]`: where the rows begin in each of the arrays."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """Columns that were made together, and where each row of a batch has them."""

    dtypes: Mapping[str, torch.dtype]
    """The columns that the layer has, with their types."""
    pieces: tuple[Piece, ...]
    piece_of_row: NDArray[np.int32]
    """`[num_rows]`; -1 is a dummy row, which has the pad value of each column."""
    row_in_piece: Rows
    """`[num_rows]`."""
    absent: Mapping[str, Any] = field(default_factory=dict)
    """What a column holds in pieces that lack it, as its values are those of every row there; that of `response_mask` is
    `loss_mask`."""

    @staticmethod
    def of(pieces: Sequence[Piece], dtypes: Mapping[str, torch.dtype], order: Rows | None = None) -> Layer:
        """Return the rows of all pieces, one piece after the other, or as the row numbers `order` says: its element i is the
        row of the batch that stands i-th in the pieces."""
        counts = [len(piece.offsets) - 1 for piece in pieces]
        piece_of_row = np.repeat(np.arange(len(pieces), dtype=np.int32), counts)
        row_in_piece = np.concatenate([np.arange(count, dtype=np.int64) for count in counts])
        if order is not None:
            # The inverse of `order`: where the pieces have each row.
            place = np.argsort(order, kind="stable")
            piece_of_row, row_in_piece = piece_of_row[place], row_in_piece[place]
        return Layer(dtypes=dtypes, pieces=tuple(pieces), piece_of_row=piece_of_row, row_in_piece=row_in_piece)

    def take(self, rows: Rows) -> Layer:
        """Return the given rows, with no more pieces than they lie in."""
        piece_of_row = self.piece_of_row[rows]
        used = np.unique(piece_of_row[piece_of_row >= 0])
        if len(used) < len(self.pieces):
            renumbered = np.full(len(self.pieces) + 1, -1, np.int32)  # the last one is that of dummy rows, -1
            renumbered[used] = np.arange(len(used), dtype=np.int32)
            piece_of_row = renumbered[piece_of_row]
        # A reference that nothing is read by would keep arrays alive, and travel with the rows.
        pieces = tuple(self.pieces[number] for number in used.tolist())
        return replace(self, pieces=pieces, piece_of_row=piece_of_row, row_in_piece=self.row_in_piece[rows])

    def behind(self, count: int) -> Layer:
        """Return the rows behind so many that have none of the columns, but their pad values."""
        return replace(
            self,
            piece_of_row=np.concatenate([np.full(count, -1, np.int32), self.piece_of_row]),
            row_in_piece=np.concatenate([np.zeros(count, np.int64), self.row_in_piece]),
        )

    def padded(self, count: int) -> Layer:
        """Return so many dummy rows more."""
        return replace(
            self,
            piece_of_row=np.concatenate([self.piece_of_row, np.full(count, -1, np.int32)]),
            row_in_piece=np.concatenate([self.row_in_piece, np.zeros(count, np.int64)]),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSharing:
    """What rows have in common, found where their tokens are."""

    facts: Any
    """`RowFacts` (`batch/planner/rows.py`) of all rows that were made together."""
    merge_turns: bool
    """Whether `facts.hosts` say which rows others compute."""
    rows: Rows
    """int64 `[num_rows]`: which of them the rows of a batch are; from `facts.num_rows` on, dummy rows."""


class ReferencedColumns(Mapping[str, Tensor]):
    """The token columns of a batch, which are read when they are asked for."""

    def __init__(
        self,
        layers: Sequence[Layer],
        row_offsets: Rows,
        loss_tokens: Rows,
        *,
        pad_values: Mapping[str, Any],
        spread: Mapping[str, NDArray[np.float64]] | None = None,
        sharing: RowSharing | None = None,
    ) -> None:
        """
        Args:
            layers: Of a column that several have, the last one's counts.
            row_offsets: int64 `[num_rows + 1]`, of the batch.
            loss_tokens: int64 `[num_rows]`: tokens with `loss_mask`.
            pad_values: Of each column, for dummy rows.
            spread: Columns that hold one number for all tokens with loss of a row, float64 `[num_rows]`, and 0 elsewhere.
            sharing: What rows have in common, if it was looked for.
        """
        self.layers, self.row_offsets, self.loss_tokens = tuple(layers), row_offsets, loss_tokens
        self.spread, self._pad_values, self.sharing = dict(spread or {}), pad_values, sharing
        self.dtypes: dict[str, torch.dtype] = {}
        for layer in self.layers:
            self.dtypes |= layer.dtypes
        self.dtypes |= dict.fromkeys(self.spread, torch.float64)

    def __getitem__(self, name: str) -> Tensor:
        """Read one column of all rows, `[num_tokens]`, from where its pieces lie. Raises KeyError."""
        if name not in self.dtypes:
            raise KeyError(name)
        return self._read((name,))[name]

    def __contains__(self, name: object) -> bool:
        return name in self.dtypes

    def __iter__(self) -> Iterator[str]:
        return iter(self.dtypes)

    def __len__(self) -> int:
        return len(self.dtypes)

    def here(self) -> dict[str, Tensor]:
        """Read every column, `[num_tokens]` each, into this process."""
        return self._read(tuple(self.dtypes))

    def take(self, rows: Rows, row_offsets: Rows) -> ReferencedColumns:
        """Return the columns of the given rows, whose offsets are then `row_offsets`."""
        return self._with(
            layers=[layer.take(rows) for layer in self.layers],
            row_offsets=row_offsets,
            loss_tokens=self.loss_tokens[rows],
            spread={name: values[rows] for name, values in self.spread.items()},
            sharing=self.sharing and replace(self.sharing, rows=self.sharing.rows[rows]),
        )

    def padded(self, count: int, row_offsets: Rows) -> ReferencedColumns:
        """Return so many dummy rows more, with which the offsets are `row_offsets`."""
        sharing, dummies = self.sharing, np.zeros(count, np.int64)
        return self._with(
            layers=[layer.padded(count) for layer in self.layers],
            row_offsets=row_offsets,
            loss_tokens=np.concatenate([self.loss_tokens, dummies]),
            spread={name: np.concatenate([values, np.zeros(count)]) for name, values in self.spread.items()},
            sharing=sharing and replace(sharing, rows=np.concatenate([sharing.rows, dummies + sharing.facts.num_rows])),
        )

    def without(self, names: Sequence[str]) -> ReferencedColumns:
        """Return the other columns. Arrays that no column is left of are let go."""
        layers = [
            replace(layer, dtypes={name: dtype for name, dtype in layer.dtypes.items() if name not in names})
            for layer in self.layers
        ]
        return self._with(
            layers=[layer for layer in layers if layer.dtypes],
            spread={name: values for name, values in self.spread.items() if name not in names},
        )

    def with_layer(self, layer: Layer) -> ReferencedColumns:
        """Return these columns and those of one more layer, of the same rows."""
        return self._with(layers=[*self.without(tuple(layer.dtypes)).layers, layer])

    def with_tensors(self, columns: Mapping[str, Tensor]) -> ReferencedColumns:
        """Return these columns and others, `[num_tokens]` each, that are here."""
        if not columns:
            return self
        source = ArraysHere({name: column.numpy() for name, column in columns.items()})
        # As a layer of its own, so that columns that are here and others are read in one way.
        layer = Layer.of([Piece(source, self.row_offsets)], {name: each.dtype for name, each in columns.items()})
        found = self.without(tuple(columns)).with_layer(layer)
        # The counts are of the mask: they would stay those of the old one.
        if "loss_mask" in columns:
            found = found._with(loss_tokens=count_by_row(columns["loss_mask"].numpy(), self.row_offsets))
        return found

    def with_spread(self, name: str, values: NDArray[np.float64]) -> ReferencedColumns:
        """Return these columns and one with a number for all tokens with loss of a row."""
        return self.without((name,))._with(spread={**self.spread, name: values})

    def _with(self, **changes: Any) -> ReferencedColumns:
        known = {
            "layers": self.layers,
            "row_offsets": self.row_offsets,
            "loss_tokens": self.loss_tokens,
            "spread": self.spread,
            "sharing": self.sharing,
        }
        return ReferencedColumns(pad_values=self._pad_values, **{**known, **changes})

    def _read(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        wanted = {*names} - self.spread.keys()
        if self.spread.keys() & {*names}:
            # A number of a row stands on its tokens with loss: which these are only the mask says.
            wanted.add("loss_mask")
        found: dict[str, NDArray[Any]] = {}
        for layer in self.layers:
            self._fill(layer, [name for name in layer.dtypes if name in wanted], found)
        for name in self.spread.keys() & {*names}:
            mask = found["loss_mask"]
            column = np.zeros(len(mask), np.float64)
            column[mask] = np.repeat(self.spread[name], self.loss_tokens)
            found[name] = column
        return {name: torch.from_numpy(found[name]) for name in names}

    def _fill(self, layer: Layer, names: Sequence[str], found: dict[str, NDArray[Any]]) -> None:
        """Add columns of one layer to what is `found`."""
        if not names:
            return
        # Piece by piece, all columns of it at once: reading one may fetch it from another node.
        for number, piece in enumerate(layer.pieces):
            arrays = piece.source.read()
            rows = np.flatnonzero(layer.piece_of_row == number)
            there, here = positions(piece.offsets, layer.row_in_piece[rows]), positions(self.row_offsets, rows)
            for name in names:
                array = arrays.get("loss_mask" if name == "response_mask" and name not in arrays else name)
                if name not in found:
                    shape = () if array is None else array.shape[1:]
                    found[name] = self._padding(layer, name, shape)
                found[name][here] = layer.absent[name] if array is None else array[there]
        for name in names:
            if name not in found:  # dummy rows alone
                found[name] = self._padding(layer, name, ())

    def _padding(self, layer: Layer, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        of_tokens = (int(self.row_offsets[-1]), *shape)
        return torch.full(of_tokens, self._pad_values[name], dtype=layer.dtypes[name]).numpy()


def positions(offsets: Rows, rows: Rows) -> slice | Rows:
    """Return where in a flat array the tokens of `rows` are: a slice where the rows follow one another."""
    if len(rows) and bool((np.diff(rows) == 1).all()):
        return slice(int(offsets[rows[0]]), int(offsets[rows[-1] + 1]))
    return ranges(offsets[rows], offsets[rows + 1] - offsets[rows])


def count_by_row(flags: NDArray[np.bool_], row_offsets: Rows) -> Rows:
    """Return int64 `[num_rows]`: how many of each row's tokens are flagged."""
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(flags, dtype=np.int64)])
    return np.diff(before[row_offsets])
