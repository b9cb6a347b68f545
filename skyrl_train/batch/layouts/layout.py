"""What one forward computes of a micro-batch's rows, and where each row's tokens are in it.

    padded         rows side by side, as wide as the longest
    packed         rows back to back; each attends to itself alone
    prefix_shared  a prefix tree of the rows; every distinct token is computed once and attends to its ancestors

Under causal attention a token's hidden state depends on the tokens before it alone, so rows with equal prefixes have
equal hidden states there, and one computation serves all of them. Losses are taken per row from `position_of_token`,
whose adjoint adds up what several rows send to one position: no layout changes the gradient.

Worked example, rows `a b c` and `a b d e`:

    padded         a b c . / a b d e      8 positions, position_of_token 0 1 2  4 5 6 7
    packed         a b c a b d e          7 positions, position_of_token 0 1 2  3 4 5 6
    prefix_shared  a b c d e              5 positions, position_of_token 0 1 2  0 1 3 4; position ids 0 1 2 2 3
                   segments [0, 2) with its subtree up to 5, [2, 3), [3, 5)

Several ranks may compute one forward together (`part_of`): each has the same number of columns of `input_ids`, one after
the other, and whatever reads hidden states finds out by `Layout.locate` which of them are its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from skyrl_train.batch.layouts.prefix_tree import (
    PrefixOrder,
    Segment,
    hosts_of,
    prefix_order,
    sharing_keys,
    tree_segments,
)
from skyrl_train.batch.training_batch import TrainingInputBatch, moved, offsets_of
from skyrl_train.config.fields import LayoutName
from skyrl_train.errors import BatchError


class PositionGroup(Protocol):
    """Ranks that compute one forward together. All call each method, in step."""

    size: int
    rank: int
    """Which columns are its own: the first, the second, ..."""

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From all heads of this rank's positions `[rows, heads, own, size]` to this rank's heads of all positions
        `[rows, own heads, positions, size]`."""
        ...

    def to_positions(self, out: Tensor) -> Tensor:
        """The way back, of what attention gives."""
        ...

    def combine(self, values: Tensor) -> Tensor:
        """The sum over the ranks of tensors of which each element is computed by one rank and 0 on the others. Its
        gradient goes to the rank that computed it, once."""
        ...


@dataclass(frozen=True, kw_only=True)
class ScoredTokens:
    """The tokens of a micro-batch that carry loss, and the hidden states that predict them, as far as they are this rank's.

    A token is predicted by the state of the one before it; tokens at one position are predicted once. Which tokens these are
    is a question of masks and of equal prefixes, whose answers have sizes that nobody knows beforehand: asked on a device,
    each would make the host wait for all that is queued there. So they are found on the host, where the rows are, before the
    forward begins, and moved with it.
    """

    tokens: Tensor
    """int64 `[scored]`: places in the flat columns."""
    states: Tensor
    """int64 `[distinct]`: which of this rank's hidden states come before them."""
    representatives: Tensor
    """int64 `[distinct]`: one of `tokens`, by its place among them, for each state."""
    copies: Tensor | None
    """int64 `[scored]`: the state of each token, by its place in `states`; None where each token has its own."""
    by_state: Tensor
    """int64 `[scored]`: places among `tokens`, those of one state together; empty where each token has its own."""
    ends: Tensor
    """int64 `[distinct]`, always on the host: where the tokens of each state end in `by_state`."""
    read: Tensor
    """int64, sorted: `states`, each once."""
    num_loss_tokens: int
    """Tokens of the rows that `loss_mask` marks, over all ranks that share the forward."""
    mismatches: list[Tensor] = field(default_factory=list)
    """bool scalars on the device, one for each gradient that was foreseen: True where another was asked for."""

    def to(self, device: torch.device) -> ScoredTokens:
        """On `device`, but for `ends`."""
        return replace(
            self,
            tokens=moved(self.tokens, device),
            states=moved(self.states, device),
            representatives=moved(self.representatives, device),
            copies=None if self.copies is None else moved(self.copies, device),
            by_state=moved(self.by_state, device),
            read=moved(self.read, device),
            mismatches=[],
        )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One forward, or one rank's part of it."""

    name: LayoutName
    input_ids: Tensor
    """int64: `[rows, longest]` padded, `[1, positions]` else; with a `group`, this rank's columns of it."""
    position_ids: Tensor
    """int64, of the same shape: how many tokens of its row come before each."""
    position_of_token: Tensor
    """int64 `[num_tokens]`: where each token of the rows is in `input_ids.flatten()`, that of all ranks."""
    segments: tuple[Segment, ...]
    """Who attends to whom; empty where rows are padded (each to itself, causally)."""
    is_shared: bool
    """Whether a position may stand for tokens of several rows."""
    longest: int
    """Tokens of the longest row."""
    group: PositionGroup | None = None
    """The ranks that compute it together; None: this one computes all of it."""
    scored: ScoredTokens | None = None
    """The tokens that carry loss, where they have been found (`with_scored`)."""

    def to(self, device: torch.device) -> Layout:
        """Return the layout with all of its index tensors on `device`."""
        return replace(
            self,
            input_ids=moved(self.input_ids, device),
            position_ids=moved(self.position_ids, device),
            position_of_token=moved(self.position_of_token, device),
            scored=None if self.scored is None else self.scored.to(device),
        )

    def with_scored(self, rows: TrainingInputBatch) -> Layout:
        """With `scored`, unless it is there; `rows` are those of the layout. Raises BatchError as `find_scored`."""
        return self if self.scored is not None else replace(self, scored=find_scored(rows, self))

    @property
    def num_positions(self) -> int:
        """Token positions that the forward computes, on all ranks."""
        return self.input_ids.numel() * (self.group.size if self.group else 1)

    def locate(self, positions: Tensor) -> Tensor:
        """int64: where each of `positions` is among this rank's own, `input_ids.flatten()`; -1: another rank's."""
        if self.group is None:
            return positions
        own = self.input_ids.shape[1]
        width = own * self.group.size
        row, column = positions // width, positions % width
        # Each rank has `own` columns of every row, one rank's after the other's.
        return torch.where(column // own == self.group.rank, row * own + column % own, -1)

    def own_columns(self, values: Tensor) -> Tensor:
        """This rank's of `values` `[positions]`, of the shape of `input_ids`."""
        if self.group is None:
            return values.view(self.input_ids.shape)
        return _columns(values.view(len(self.input_ids), -1), self.group)

    def combine(self, values: Tensor) -> Tensor:
        """What all ranks computed, from what this one did (0 where another does)."""
        return values if self.group is None else self.group.combine(values)


def padded_layout(rows: TrainingInputBatch, *, merge: bool = False) -> Layout:
    """Rows `[rows, longest]`, right-padded. With `merge`, rows that another row extends are part of that one."""
    hosts = _Hosts.of(rows, merge=merge)
    ids = hosts.rows.padded("input_ids").long()
    width = ids.shape[1]
    counted = torch.arange(width, device=ids.device).expand(ids.shape)
    return Layout(
        name="padded",
        input_ids=ids,
        position_ids=hosts.rows.padded("position_ids").long() if "position_ids" in rows else counted,
        position_of_token=hosts.positions(torch.arange(len(ids), device=ids.device) * width),
        segments=(),
        is_shared=hosts.rows is not rows,
        longest=width,
    )


def packed_layout(rows: TrainingInputBatch, *, merge: bool = False) -> Layout:
    """Rows back to back. With `merge`, rows that another row extends are part of that one."""
    hosts = _Hosts.of(rows, merge=merge)
    # Sequences, not rows: those that were packed into one row must not attend to one another either.
    bounds = sequence_offsets(hosts.rows)
    lengths = bounds.diff()
    starts = torch.repeat_interleave(bounds[:-1], lengths)
    ends = bounds.tolist()
    return Layout(
        name="packed",
        input_ids=hosts.rows["input_ids"].long().unsqueeze(0),
        position_ids=(torch.arange(len(starts), device=starts.device) - starts).unsqueeze(0),
        position_of_token=hosts.positions(hosts.rows.row_offsets[:-1]),
        segments=tuple(Segment(start, stop, stop) for start, stop in pairwise(ends)),
        is_shared=hosts.rows is not rows,
        longest=max((stop - start for start, stop in pairwise(ends)), default=0),
    )


def shared_layout(rows: TrainingInputBatch, *, merge: bool = False) -> Layout:  # noqa: ARG001
    """A prefix tree in depth-first order, so that a segment's subtree lies behind it in one piece.

    `merge` says nothing here: a row that extends another shares all of it in any case.
    """
    # Sequences, not rows: of a row that was packed of several, each begins at the root of the tree.
    bounds = sequence_offsets(rows).tolist()
    ids = sharing_keys(rows)
    order = prefix_order([ids[start:stop] for start, stop in pairwise(bounds)])
    position_of_token, depths = _tree_positions(bounds, order)
    a_token = np.empty(len(depths), dtype=np.int64)
    a_token[position_of_token] = np.arange(len(position_of_token))  # any one of those at a position: all are equal
    device = rows["input_ids"].device
    return Layout(
        name="prefix_shared",
        input_ids=rows["input_ids"].long()[torch.from_numpy(a_token).to(device)].unsqueeze(0),
        position_ids=torch.from_numpy(depths).to(device).unsqueeze(0),
        position_of_token=torch.from_numpy(position_of_token).to(device),
        segments=tree_segments(order),
        is_shared=True,
        longest=max(order.lengths, default=0),
    )


LAYOUTS: dict[LayoutName, Callable[..., Layout]] = {
    "padded": padded_layout,
    "packed": packed_layout,
    "prefix_shared": shared_layout,
}


def make_layout(
    rows: TrainingInputBatch, name: LayoutName, *, merge: bool = False, group: PositionGroup | None = None
) -> Layout:
    """The layout of this name, or this rank's part of it where the ranks of a `group` compute it together.

    Padded rows that hold several sequences each are then laid out packed, since only segments keep those apart.
    """
    if group is None:
        return LAYOUTS[name](rows, merge=merge)
    if name == "padded" and "position_ids" in rows:
        name = "packed"
    return part_of(LAYOUTS[name](rows, merge=merge), group)


def part_of(layout: Layout, group: PositionGroup) -> Layout:
    """This rank's columns. Rows are filled up to a multiple of the ranks; behind segments, the filler is one of them."""
    # Collectives exchange equal parts, so that every rank needs as many columns as the others.
    width = layout.input_ids.shape[1]
    full = width + -width % group.size
    own = [
        _columns(torch.nn.functional.pad(each, (0, full - width)), group)
        for each in (layout.input_ids, layout.position_ids)
    ]
    # A segment by itself, so that neither tokens of rows nor the filler attend to one another.
    filler = (Segment(width, full, full),) if full > width and layout.segments else ()
    return replace(
        layout,
        input_ids=own[0],
        position_ids=own[1],
        # Rows are wider by the filler, so that those behind the first begin later.
        position_of_token=layout.position_of_token // width * full + layout.position_of_token % width,
        segments=layout.segments + filler,
        group=group,
    )


def _columns(whole: Tensor, group: PositionGroup) -> Tensor:
    """`[rows, own]` of `[rows, width]`, whose width is a multiple of the group's size."""
    return whole.chunk(group.size, dim=1)[group.rank].contiguous()


def _tree_positions(bounds: list[int], order: PrefixOrder) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each token is in the tree, `[num_tokens]`, and the depth of each position."""
    position_of_token = np.empty(bounds[-1], dtype=np.int64)
    depths: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
    size, previous = 0, np.empty(0, dtype=np.int64)
    for row, shared, length in zip(order.rows, order.shared, order.lengths):
        own = position_of_token[bounds[row] : bounds[row] + length]
        # What the row has in common with the one before it in the order is computed there.
        own[:shared] = previous[:shared]
        own[shared:] = np.arange(size, size + length - shared)
        depths.append(np.arange(shared, length))
        size, previous = size + length - shared, own
    return position_of_token, np.concatenate(depths)


@dataclass(frozen=True)
class _Hosts:
    """The rows that are computed, and where the others are in them."""

    rows: TrainingInputBatch
    """Hosts alone, in their order."""
    place: Tensor
    """int64 `[all rows]`: the host, by its place in `rows`, that each row is a prefix of; a host's own place."""
    all_rows: TrainingInputBatch

    @classmethod
    def of(cls, rows: TrainingInputBatch, *, merge: bool) -> _Hosts:
        device = rows.row_offsets.device
        # Rows that hold several sequences each are no turns of one conversation.
        if not merge or "position_ids" in rows:
            return cls(rows, torch.arange(rows.num_rows, device=device), rows)
        host = torch.from_numpy(hosts_of(rows)).to(device)
        chosen, place = torch.unique(host, return_inverse=True)
        return cls(rows if len(chosen) == rows.num_rows else rows.take(chosen), place, rows)

    def positions(self, first: Tensor) -> Tensor:
        """`[tokens of all rows]`, where host i begins at `first[i]`."""
        lengths = self.all_rows.lengths
        starts = offsets_of(lengths)[:-1]
        within = torch.arange(self.all_rows.num_tokens, device=first.device) - torch.repeat_interleave(starts, lengths)
        return within + torch.repeat_interleave(first[self.place], lengths)


def spread_to_rows(values: Tensor, rows: TrainingInputBatch) -> Tensor:
    """`[num_tokens]` to `[rows, longest]`, 0 in padding; carries gradients."""
    width, places = rows.padding()
    shape = values.shape[1:]
    padded = values.new_zeros((rows.num_rows * width, *shape)).index_copy(0, places, values)
    return padded.view(rows.num_rows, width, *shape)


def find_scored(rows: TrainingInputBatch, layout: Layout) -> ScoredTokens:
    """Raises BatchError where `loss_mask` marks the first token of a row, before which there is nothing."""
    marked = loss_tokens(rows)
    tokens, before = states_before(marked, layout)
    nothing = tokens.new_empty(0)
    if not layout.is_shared:
        return ScoredTokens(
            tokens=tokens,
            states=before,
            representatives=torch.arange(len(tokens), device=tokens.device),
            copies=None,
            by_state=nothing,
            ends=nothing.cpu(),
            read=torch.unique(before),
            num_loss_tokens=len(marked),
        )
    # Tokens at one position are predicted by one state: the head computes it once and hands it to all of them.
    _, copies = torch.unique(layout.position_of_token[tokens], return_inverse=True)
    number = torch.arange(len(copies), device=copies.device)
    one_of = torch.empty_like(copies[: int(copies.max()) + 1 if len(copies) else 0]).scatter_(0, copies, number)
    states = before[one_of]
    return ScoredTokens(
        tokens=tokens,
        states=states,
        representatives=one_of,
        copies=copies,
        by_state=torch.argsort(copies, stable=True),  # in the order of rows, in which gradients are then added up
        # The head cuts its tiles by them on the host, which would wait for the device to read them back.
        ends=torch.bincount(copies).cumsum(0).cpu(),
        read=torch.unique(states),
        num_loss_tokens=len(marked),
    )


def states_before(tokens: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Those of `tokens` (flat places, int64) that this rank's hidden states predict, and which of these states are before
    them."""
    # The token before is of the same row: `loss_tokens` refuses a first one.
    before = layout.locate(layout.position_of_token[tokens - 1])
    if layout.group is None:
        return tokens, before
    own = before >= 0
    return tokens[own], before[own]


def sequence_offsets(rows: TrainingInputBatch) -> Tensor:
    """int64: where sequences begin in the flat columns, and the end: at each row, and, in rows that were packed of
    several sequences (column `position_ids`), at each of those."""
    if "position_ids" not in rows:
        return rows.row_offsets
    # Position ids begin again at 0 with each sequence; a row does whatever its first id is.
    begins = rows["position_ids"] == 0
    begins[rows.row_offsets[:-1]] = True
    return torch.cat([begins.nonzero().squeeze(1), rows.row_offsets[-1:]])


def loss_tokens(rows: TrainingInputBatch) -> Tensor:
    """int64: the flat places of the tokens that `loss_mask` marks. Raises BatchError for the first token of a row."""
    mask = rows["loss_mask"]
    begins = sequence_offsets(rows)[:-1]
    first = mask[begins]
    if bool(first.any()):
        row = int(torch.searchsorted(rows.row_offsets, begins[first][0], right=True)) - 1
        raise BatchError(f"row {row} marks its first token for the loss, but nothing comes before it to predict it")
    return mask.nonzero().squeeze(1)
