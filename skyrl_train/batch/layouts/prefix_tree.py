"""What rows have in common: the one place where first tokens are compared. numpy only.

Rows are put in an order in which equal prefixes are neighbours. Two neighbours have so many first tokens in common; any
two rows then have the least of what lies between them. Everything else follows from that: the tree that one forward
computes, what a row adds to a rank or to a micro-batch, and which turn of a conversation computes the ones before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from skyrl_train.images import distinct

if TYPE_CHECKING:
    from skyrl_train.batch.batch_metadata import Rows
    from skyrl_train.batch.training_batch import TrainingInputBatch


class Segment(NamedTuple):
    """A run of positions without a branch. Its tokens attend to the tokens of the run up to themselves and to all
    tokens of the segments above it; `[stop, subtree_stop)` are the positions below it, which attend to all of it."""

    start: int
    stop: int
    subtree_stop: int


@dataclass(frozen=True)
class PrefixOrder:
    """Rows sorted by their tokens, a prefix before what extends it."""

    rows: list[int]
    lengths: list[int]
    """Of the rows in this order."""
    shared: list[int]
    """How many first tokens each has in common with the row before it in this order; 0 for the first."""


def prefix_order(rows: Sequence[NDArray[np.int32]]) -> PrefixOrder:
    """Sorts rows of token ids (at least 0)."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    ids = np.concatenate([*rows, np.empty(0, dtype=np.int32)])
    starts = np.cumsum(lengths) - lengths
    # Big-endian bytes sort as the numbers do, and comparing them ends at the first difference.
    keys = [row.astype(">i4").tobytes() for row in rows]
    order = np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)
    shared = np.zeros(len(order), dtype=np.int64)
    left, right = order[:-1], order[1:]
    shared[1:] = common_prefixes(ids, starts[left], starts[right], np.minimum(lengths[left], lengths[right]))
    return PrefixOrder(rows=order.tolist(), lengths=lengths[order].tolist(), shared=shared.tolist())


def common_prefixes(ids: NDArray[np.int32], left: Rows, right: Rows, sizes: Rows) -> Rows:
    """`[pairs]`: of the `sizes` tokens of `ids` from `left` and from `right` on, how many are equal before the first that
    differ."""
    pairs = zip(left.tolist(), right.tolist(), sizes.tolist())
    found = (common_prefix(ids[one : one + size], ids[other : other + size]) for one, other, size in pairs)
    return np.fromiter(found, dtype=np.int64, count=len(sizes))


def common_prefix(left: NDArray[np.int32], right: NDArray[np.int32]) -> int:
    """Number of equal first tokens."""
    size = min(len(left), len(right))
    differs = left[:size] != right[:size]
    first = int(differs.argmax()) if size else 0
    return first if size and differs[first] else size


def least_between(shared: Rows, first: Rows, last: Rows) -> Rows:
    """`[pairs]`: what the rows at places `first` and `last` (later ones) of an order have in common, where `shared` is
    what each row of the order shares with the one before."""
    common: Rows = shared[last]
    apart = np.flatnonzero(last - first > 1)
    if len(apart):
        # Ranges from the last to the first: what `reduceat` sums up between two of them is then empty.
        apart = apart[np.argsort(-first[apart], kind="stable")]
        bounds = np.stack([first[apart] + 1, last[apart] + 1], axis=1).reshape(-1)
        common = common.copy()
        common[apart] = np.minimum.reduceat(np.append(shared, 0), bounds)[::2]
    return common


def sharing_keys(rows: TrainingInputBatch) -> NDArray[np.int32]:
    """`[num_tokens]`, at least 0: equal where one computation may serve both tokens, as far as they themselves go. That is
    their id, or which part of which image they stand for; and where the experts that tokens are sent to have been
    recorded, these with it; and where rows are of several adapters, which one computes them."""
    ids: NDArray[np.int32] = rows["input_ids"].cpu().numpy()
    if rows.metadata.images:
        ids = _with_images(ids, rows)
    if "adapter_index" in rows:
        # Each pair of an adapter and an id becomes a number: under another adapter the same token has another hidden state.
        of_tokens = np.repeat(rows["adapter_index"].cpu().numpy(), rows.lengths.cpu().numpy())
        ids = np.unique(np.stack((of_tokens, ids)), axis=1, return_inverse=True)[1].reshape(-1).astype(np.int32)
    if "routed_experts" not in rows:
        return ids
    # Id and experts as one run of bytes for each token, whose equality is that of all of them.
    facts = np.concatenate([ids[:, None].view(np.int16), rows["routed_experts"].cpu().numpy()], axis=1)
    numbers: dict[bytes, int] = {}
    return np.fromiter((numbers.setdefault(fact.tobytes(), len(numbers)) for fact in facts), np.int32, len(facts))


def _with_images(ids: NDArray[np.int32], rows: TrainingInputBatch) -> NDArray[np.int32]:
    """The ids, with numbers above all of them in place of the tokens of images."""
    found: NDArray[np.int32] = ids.copy()
    above = int(ids.max(initial=0)) + 1
    numbers = distinct(span for spans in rows.metadata.images for span in spans)
    for offset, spans in zip(rows.row_offsets.tolist(), rows.metadata.images):
        for span in spans:
            # A number for each part of each image: the ids of all image tokens are the same, whatever they show.
            first = above + numbers[span.image]
            found[offset + span.start : offset + span.stop] = np.arange(first, first + span.image.num_tokens)
    return found


def hosts_of(rows: TrainingInputBatch) -> Rows:
    """`[num_rows]`: the row that each row is computed in; itself where no later turn of its trajectory extends it.

    One row per turn repeats the conversation so far in every row. Where the row of the next turn begins with all tokens
    of a row, the longer one, its host, computes both: under causal attention the hidden states are the same. Each row
    keeps its own mask, advantages, old log-probabilities and weights, so step identity and row-wise losses stay exact.
    Where the prompt is no extension (a template that drops earlier reasoning, an edited history) a row is its own host.
    """
    host = np.arange(rows.num_rows, dtype=np.int64)
    turn, is_next = _turns(rows)
    row, following = turn[:-1][is_next], turn[1:][is_next]
    starts, lengths = rows.row_offsets[:-1].cpu().numpy(), rows.lengths.cpu().numpy()
    sizes = np.minimum(lengths[row], lengths[following])
    common = common_prefixes(sharing_keys(rows), starts[row], starts[following], sizes)
    extends = np.zeros(len(turn), dtype=bool)
    # Extending goes on from turn to turn: the last of a run of such rows begins with every one of them.
    extends[:-1][is_next] = common == lengths[row]
    # In the order of turns, the host is the next row at which a run of extensions ends.
    ends = np.flatnonzero(~extends)
    host[turn] = turn[ends[np.searchsorted(ends, np.arange(len(turn)))]]
    return host


def merge_counts(rows: TrainingInputBatch) -> tuple[int, int]:
    """Rows that another row computes, and rows that have a later turn which does not extend them."""
    merged = int((hosts_of(rows) != np.arange(rows.num_rows)).sum())
    return merged, int(_turns(rows)[1].sum()) - merged


def _turns(rows: TrainingInputBatch) -> tuple[Rows, NDArray[np.bool_]]:
    """Rows by trajectory, in the order of turns, padding left out; and whether each but the last is followed by a turn of
    its own trajectory."""
    trajectory = rows["trajectory_index"].cpu().numpy()
    kept = np.flatnonzero(~rows["is_padding"].cpu().numpy())
    kept = kept[np.lexsort((rows["step_index"].cpu().numpy()[kept], trajectory[kept]))]
    return kept, np.diff(trajectory[kept]) == 0


@dataclass
class _Open:
    """A segment on the path to the newest row, whose subtree may still grow."""

    start: int
    depth: int
    """How many tokens of a row come before its first one."""
    length: int
    has_children: bool = False


def tree_segments(order: PrefixOrder) -> tuple[Segment, ...]:
    """The tree's segments in the order of their positions, which is depth first."""
    closed: list[Segment] = []
    path: list[_Open] = []
    size = 0

    def close(segment: _Open) -> None:
        closed.append(Segment(segment.start, segment.start + segment.length, size))

    for shared, length in zip(order.shared, order.lengths):
        if length == shared:
            continue  # the same row again
        # Segments that begin where the row has already branched off: no later row has any of them either.
        while path and path[-1].depth >= shared:
            close(path.pop())
        top = path[-1] if path else None
        if top is not None and shared < top.depth + top.length:
            # The row leaves the segment within it: what comes after the branch is a child of its own.
            upper = shared - top.depth
            # Closed at once: rows are sorted, so that none comes back to what is below the branch.
            lower = _Open(top.start + upper, shared, top.length - upper)
            close(lower)
            top.length = upper
            top.has_children = True
        if top is not None and not top.has_children:
            top.length += length - shared  # the row goes on where the one before it ended
        else:
            if top is not None:
                top.has_children = True
            path.append(_Open(size, shared, length - shared))
        size += length - shared
    while path:
        close(path.pop())
    return tuple(sorted(closed))
