"""What the random trees of these tests consist of: the law is proved of no more than they hold."""

from __future__ import annotations

from itertools import pairwise

from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.layouts import prefix_order, tree_segments
from tests.support.layout_cases import tree_batch


def rows_of(batch: TrainingInputBatch) -> list[list[int]]:
    ids, bounds = batch["input_ids"].tolist(), batch.row_offsets.tolist()
    return [ids[start:stop] for start, stop in pairwise(bounds)]


def kinds(batch: TrainingInputBatch) -> set[str]:
    """What there is in this batch, in words."""
    kept = batch.take((~batch["is_padding"]).nonzero().squeeze(1))
    rows, ids = rows_of(kept), kept["input_ids"].numpy()
    order = prefix_order([ids[start:stop] for start, stop in pairwise(kept.row_offsets.tolist())])
    segments = tree_segments(order)
    found = {"failed trajectories"} if kept.num_rows < batch.num_rows else set()
    if len({tuple(row) for row in rows}) < len(rows):
        found.add("whole rows twice")
    branches = [segment for segment in segments if segment.subtree_stop > segment.stop]
    if any(segment.stop - segment.start == 1 for segment in branches):
        found.add("a branch after one token")
    if any(segment.stop - segment.start == 1 for segment in segments if segment not in branches):
        found.add("a leaf of one token")
    depths = {segment.stop - segment.start for segment in branches}
    if len(depths) > 1 and len({len(row) for row in rows}) > 2:
        found.add("uneven branching")
    if len({row[0] for row in rows}) < len({int(p) for p in kept["prompt_index"]}):
        found.add("prompts with a common beginning")
    for row, (trajectory, step) in enumerate(zip(kept["trajectory_index"].tolist(), kept["step_index"].tolist())):
        if step == 0:
            continue
        before = next(
            other
            for other in range(kept.num_rows)
            if (int(kept["trajectory_index"][other]), int(kept["step_index"][other])) == (trajectory, step - 1)
        )
        extends = rows[row][: len(rows[before])] == rows[before]
        found.add("a turn that extends the one before" if extends else "a turn that does not")
        mask = kept["loss_mask"][kept.row_offsets[row] : kept.row_offsets[row + 1]].tolist()
        if extends and mask.index(True) > len(rows[before]):
            found.add("observation tokens between turns")
    return found


def test_every_kind_of_tree_is_drawn() -> None:
    assert set.union(*(kinds(tree_batch(seed)) for seed in range(40))) == {
        "failed trajectories",
        "whole rows twice",
        "a branch after one token",
        "a leaf of one token",
        "uneven branching",
        "prompts with a common beginning",
        "a turn that extends the one before",
        "a turn that does not",
        "observation tokens between turns",
    }
