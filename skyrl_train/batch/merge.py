"""Turns of one trajectory that are one conversation: computed together, trained as the rows they are.

One row per turn repeats the conversation so far in every row. Where a turn's row begins with all tokens of the row of
the turn before, the longer row, its host, computes both: under causal attention the hidden states are the same. Each
row keeps its own mask, advantages, old log-probabilities and weights, so step identity and row-wise losses stay exact.
Where the prompt is no extension (a template that drops earlier reasoning, an edited history) the row stays on its own.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from skyrl_train.batch.prefix_tree import common_prefix
from skyrl_train.batch.training_batch import TrainingInputBatch


def hosts_of(rows: TrainingInputBatch) -> NDArray[np.int64]:
    """`[num_rows]`: the row that each row is computed in; itself where no later turn of its trajectory extends it."""
    host = np.arange(rows.num_rows, dtype=np.int64)
    ids = rows["input_ids"].cpu().numpy()
    bounds = rows.row_offsets.tolist()
    for members in _turns(rows).values():
        following = members[-1]
        for row in reversed(members[:-1]):
            mine, theirs = ids[bounds[row] : bounds[row + 1]], ids[bounds[following] : bounds[following + 1]]
            if common_prefix(mine, theirs) == len(mine):
                host[row] = host[following]
            following = row
    return host


def merge_counts(rows: TrainingInputBatch) -> tuple[int, int]:
    """Rows that another row computes, and rows that have a later turn which does not extend them."""
    merged = int((hosts_of(rows) != np.arange(rows.num_rows)).sum())
    return merged, sum(len(members) - 1 for members in _turns(rows).values()) - merged


def _turns(rows: TrainingInputBatch) -> Mapping[int, list[int]]:
    """Rows of each trajectory that has several, in the order of its turns. Padding belongs to none."""
    trajectory = rows["trajectory_index"].cpu().numpy()
    step = rows["step_index"].cpu().numpy()
    kept = np.flatnonzero(~rows["is_padding"].cpu().numpy())
    kept = kept[np.lexsort((step[kept], trajectory[kept]))]
    groups = np.split(kept, np.flatnonzero(np.diff(trajectory[kept])) + 1) if len(kept) else []
    return {int(trajectory[members[0]]): members.tolist() for members in groups if len(members) > 1}
