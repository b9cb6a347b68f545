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
    """Of the rows in this order."""
    shared: Rows
    """First tokens of each row that an earlier row of its group computes; 0 for the first of a group."""
    starts: Rows
    """Where groups begin in this order, and the end."""

    @property
    def num_distinct(self) -> int:
        """Positions that are computed where every group is computed by itself."""
        return int(self.lengths.sum() - self.shared.sum())


def computed_together(layout: LayoutChoice, *, merge_turns: bool) -> Together:
    """The unit that a layout shares computation within."""
    if layout in ("prefix_shared", "auto"):
        return "prompt"
    return "trajectory" if merge_turns else "row"


def common_prefixes(batch: TrainingInputBatch, together: Together) -> CommonPrefixes:
    """Rows without loss are computed by nobody: each is a group by itself. So are all rows for `row`."""
    lengths = np.asarray(batch.lengths.numpy(), dtype=np.int64)
    starts = np.asarray(batch.row_offsets[:-1].numpy(), dtype=np.int64)
    loss_mask = batch["loss_mask"].numpy()
    scored = np.logical_or.reduceat(loss_mask, starts) & ~batch["is_padding"].numpy()
    alone = ~scored if together != "row" else np.ones(batch.num_rows, dtype=bool)
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
    shared = np.where(extends, lengths[before], 0)
    if together == "trajectory":
        group = np.flatnonzero(~extends)
    else:
        group = np.flatnonzero((np.diff(prompt[rows], prepend=-1) != 0) | first)
        leader = np.repeat(group, np.diff(group, append=len(rows)))
        end = _prompt_ends(loss_mask, starts[rows], lengths[rows], group)[leader]
        same = _agree(ids, starts[rows[leader]], starts[rows], end, lengths[rows])
        shared = np.where(extends, shared, np.where(same, end, 0))
        shared[group] = 0
    return CommonPrefixes(rows=rows, lengths=lengths[rows], shared=shared, starts=np.append(group, len(rows)))


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
