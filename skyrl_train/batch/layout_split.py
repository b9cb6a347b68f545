"""Micro-batches for layouts that compute rows together, and the layout that is predicted to be cheapest.

Rows whose tokens are computed once for several of them must share a micro-batch to gain from it. So whole groups are
dealt out: a host with the rows it computes (`batch/merge.py`), or the rows of one prompt, sorted so that equal prefixes
are neighbours. Only a group that exceeds the cap by itself is cut, between rows, and its parts repeat what they shared.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from skyrl_train.batch.forwards import LAYOUT_CHOICES, Forward, ForwardCost, Planner, forward_of_rows, split_tree
from skyrl_train.batch.merge import hosts_of
from skyrl_train.batch.prefix_tree import prefix_order
from skyrl_train.batch.training_batch import TrainingInputBatch
from skyrl_train.config.rules import LayoutName


def cheapest_layout(
    batch: TrainingInputBatch, planners: Mapping[LayoutName, Planner], *, training: bool, merge: bool, cost: ForwardCost
) -> LayoutName:
    """The layout whose pass over `batch` is predicted to be cheapest."""
    costs = {
        name: cost.of(split_forwards(batch, planners[name], name, training=training, merge=merge))
        for name in LAYOUT_CHOICES
    }
    return min(LAYOUT_CHOICES, key=costs.__getitem__)


def split_forwards(
    batch: TrainingInputBatch, planner: Planner, layout: LayoutName, *, training: bool, merge: bool
) -> list[Forward]:
    """Every row in exactly one forward."""
    if batch.num_rows == 0:
        return []
    if layout == "prefix_shared":
        return _split_shared(batch, planner, training=training)
    lengths = np.asarray(batch.lengths.cpu().numpy(), dtype=np.int64)
    host = hosts_of(batch) if merge else np.arange(batch.num_rows)
    hosts = np.unique(host)
    guests = np.argsort(host, kind="stable")
    bounds = np.searchsorted(host[guests], hosts), np.searchsorted(host[guests], hosts, side="right")
    return [
        forward_of_rows(
            np.concatenate([guests[bounds[0][place] : bounds[1][place]] for place in part.tolist()]),
            lengths[hosts[part]],
            padded=layout == "padded",
        )
        for part in planner.split_lengths(lengths[hosts], training=training)
    ]


def _split_shared(batch: TrainingInputBatch, planner: Planner, *, training: bool) -> list[Forward]:
    ids, bounds = batch["input_ids"].cpu().numpy(), batch.row_offsets.tolist()
    order = prefix_order([ids[start:stop] for start, stop in pairwise(bounds)])
    prompts = batch["prompt_index"].cpu().numpy()[order.rows]
    return split_tree(order, prompts, planner, training=training)
