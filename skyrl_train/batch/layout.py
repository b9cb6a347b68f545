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
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from skyrl_train.batch.merge import hosts_of
from skyrl_train.batch.prefix_tree import PrefixOrder, Segment, prefix_order, tree_segments
from skyrl_train.batch.training_batch import TrainingInputBatch, offsets_of
from skyrl_train.config.rules import LayoutName


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One forward."""

    name: LayoutName
    input_ids: Tensor
    """int64: `[rows, longest]` padded, `[1, positions]` else."""
    position_ids: Tensor
    """int64, of the same shape: how many tokens of its row come before each."""
    position_of_token: Tensor
    """int64 `[num_tokens]`: where each token of the rows is in `input_ids.flatten()`."""
    segments: tuple[Segment, ...]
    """Who attends to whom; empty where rows are padded (each to itself, causally)."""
    is_shared: bool
    """Whether a position may stand for tokens of several rows."""

    def to(self, device: torch.device) -> Layout:
        """On `device`."""
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            position_of_token=self.position_of_token.to(device),
        )

    @property
    def num_positions(self) -> int:
        """Token positions that the forward computes."""
        return self.input_ids.numel()


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
    )


def packed_layout(rows: TrainingInputBatch, *, merge: bool = False) -> Layout:
    """Rows back to back. With `merge`, rows that another row extends are part of that one."""
    hosts = _Hosts.of(rows, merge=merge)
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
    )


def shared_layout(rows: TrainingInputBatch, *, merge: bool = False) -> Layout:  # noqa: ARG001
    """A prefix tree in depth-first order, so that a segment's subtree lies behind it in one piece.

    `merge` says nothing here: a row that extends another shares all of it in any case.
    """
    bounds = sequence_offsets(rows).tolist()
    ids = rows["input_ids"].cpu().numpy()
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
    )


LAYOUTS: dict[LayoutName, Callable[..., Layout]] = {
    "padded": padded_layout,
    "packed": packed_layout,
    "prefix_shared": shared_layout,
}


def sequence_offsets(rows: TrainingInputBatch) -> Tensor:
    """int64: where sequences begin in the flat columns, and the end: at each row, and, in rows that were packed of
    several sequences (column `position_ids`), at each of those."""
    if "position_ids" not in rows:
        return rows.row_offsets
    begins = rows["position_ids"] == 0
    begins[rows.row_offsets[:-1]] = True
    return torch.cat([begins.nonzero().squeeze(1), rows.row_offsets[-1:]])


def _tree_positions(bounds: list[int], order: PrefixOrder) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each token is in the tree, `[num_tokens]`, and the depth of each position."""
    position_of_token = np.empty(bounds[-1], dtype=np.int64)
    depths: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
    size, previous = 0, np.empty(0, dtype=np.int64)
    for row, shared, length in zip(order.rows, order.shared, order.lengths):
        own = position_of_token[bounds[row] : bounds[row] + length]
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
    mask = rows.attention_mask()
    return values.new_zeros(mask.shape).masked_scatter(mask, values)
