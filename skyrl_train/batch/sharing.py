"""What rows have in common, told without reading all of their tokens: for dealing rows out and for plans. numpy only.

Rows are put in an order in which those that a layout computes together are neighbours: by prompt, trajectory and turn.
Each then shares its first tokens with a row before it: with the turn that it extends, or with the prompt's first row as
far as the prompt reaches. That is a prediction, checked at a few tokens of each row; a wrong one costs speed alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from skyrl_train.batch.token_budget import Rows
from skyrl_train.config.rules import LayoutChoice

if TYPE_CHECKING:
    from skyrl_train.batch.training_batch import TrainingInputBatch

Together = Literal["row", "trajectory", "prompt"]
"""The largest unit within which rows share computation."""

_PROBED_TOKENS = 16
"""Compared at the end of what two rows are thought to have in common."""


@dataclass(frozen=True, kw_only=True)
class CommonPrefixes:
    """Rows in an order in which those that are computed together are neighbours."""

    rows: Rows
    """Row numbers in this order."""
    lengths: Rows
    """Tokens that are computed of each row in this order."""
    shared: Rows
    """First tokens of each row that an earlier row of its group computes; 0 for the first of a group."""
    extends: NDArray[np.bool_]
    """Whether each row goes on where the row before it ends."""
    prompt: Rows
    """First tokens that each row has in common with any row of its group."""
    starts: Rows
    """Where groups begin in this order, and the end."""

    @property
    def num_distinct(self) -> int:
        """Positions that are computed where every group is computed by itself."""
        return int(self.lengths.sum() - self.shared.sum())

    @property
    def groups(self) -> Rows:
        """The group of each row in this order, counted from 0."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))

    def on_one_rank(self, places: Rows) -> Rows:
        """First tokens that each of the rows at `places` (ascending) has in common with one at an earlier place."""
        begins = np.diff(self.groups[places], prepend=-1) != 0
        follows = np.diff(places, prepend=-2) == 1
        shared: Rows = np.where(begins, 0, np.where(follows, self.shared[places], self.prompt[places]))
        return shared


def computed_together(layout: LayoutChoice, *, merge_turns: bool) -> Together:
    """The unit that a layout shares computation within."""
    if layout in ("prefix_shared", "auto"):
        return "prompt"
    return "trajectory" if merge_turns else "row"


def common_prefixes(batch: TrainingInputBatch, together: Together) -> CommonPrefixes:
    """Rows without loss are computed by nobody: each is a group by itself and counts as one token."""
    lengths = np.array(batch.lengths.numpy(), dtype=np.int64)
    nothing = np.zeros(batch.num_rows, dtype=np.int64)
    if together == "row":
        order, none = np.arange(batch.num_rows), nothing.astype(bool)
        return grouped(order, lengths, extends=none, prompt=nothing, new_prompt=~none, together=together)
    starts = np.asarray(batch.row_offsets[:-1].numpy(), dtype=np.int64)
    loss_mask = batch["loss_mask"].numpy()
    alone = ~np.logical_or.reduceat(loss_mask, starts) | batch["is_padding"].numpy()
    lengths[alone] = 1
    prompt, trajectory, step = (
        batch[name].numpy().astype(np.int64) for name in ("prompt_index", "trajectory_index", "step_index")
    )
    rows = np.lexsort((step, trajectory, prompt, alone))
    first = alone[rows]
    first[:1] = True
    next_trajectory = (np.diff(trajectory[rows], prepend=-1) != 0) | (np.diff(prompt[rows], prepend=-1) != 0) | first
    ids = batch["input_ids"].numpy()
    before = np.concatenate([rows[:1], rows[:-1]])
    extends = ~next_trajectory & _agree(ids, starts[before], starts[rows], lengths[before], lengths[rows])
    new_prompt = (np.diff(prompt[rows], prepend=-1) != 0) | first
    common = nothing
    if together == "prompt":
        group = np.flatnonzero(new_prompt)
        leader = np.repeat(group, np.diff(group, append=len(rows)))
        end = _prompt_ends(loss_mask, starts[rows], lengths[rows], group)[leader]
        same = _agree(ids, starts[rows[leader]], starts[rows], end, lengths[rows])
        common = np.where(same, end, 0)
    return grouped(rows, lengths[rows], extends=extends, prompt=common, new_prompt=new_prompt, together=together)


def grouped(
    rows: Rows,
    lengths: Rows,
    *,
    extends: NDArray[np.bool_],
    prompt: Rows,
    new_prompt: NDArray[np.bool_],
    together: Together,
) -> CommonPrefixes:
    """Rows in order, where it is known which of them extend the one before, and how long the prompt is that each shares
    with its group; `new_prompt`: where another prompt begins."""
    before = np.concatenate([lengths[:1], lengths[:-1]])
    if together == "prompt":
        shared, begins = np.where(extends, before, np.where(new_prompt, 0, prompt)), new_prompt
    else:
        extends = extends & (together == "trajectory")
        shared, begins, prompt = np.where(extends, before, 0), ~extends, np.zeros_like(prompt)
    starts = np.append(np.flatnonzero(begins), len(rows))
    return CommonPrefixes(rows=rows, lengths=lengths, shared=shared, extends=extends, prompt=prompt, starts=starts)


def _agree(ids: NDArray[np.int32], left: Rows, right: Rows, common: Rows, lengths: Rows) -> NDArray[np.bool_]:
    """Whether rows that begin at `left` and `right` have the same last tokens before their `common`-th, which lies
    within the right one's `lengths`."""
    agree = common <= lengths
    for back in range(1, _PROBED_TOKENS + 1):
        place = np.where(agree, np.maximum(common - back, 0), 0)
        agree &= ids[left + place] == ids[right + place]
    return agree


def _prompt_ends(loss_mask: NDArray[np.bool_], starts: Rows, lengths: Rows, group: Rows) -> Rows:
    """`[rows]`: at the first row of each group that has several, how many tokens come before its first with loss."""
    ends = np.zeros(len(starts), dtype=np.int64)
    several = group[np.diff(group, append=len(starts)) > 1]
    for place in several.tolist():
        ends[place] = loss_mask[starts[place] : starts[place] + lengths[place]].argmax()
    return ends
