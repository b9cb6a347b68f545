"""What is known of a training batch beside its columns: of each row its prompt and its images, and where things end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from skyrl_train.images import ImageSpans

Rows = NDArray[np.int64]
"""Row numbers, or the rows' lengths."""

DUMMY_ROW_LENGTH = 2
"""Tokens of a dummy row: one of context and one after it, the shortest row that a model can score."""


@dataclass(frozen=True, kw_only=True)
class BatchMetadata:
    """What is known of the batch beside its tensors."""

    uids: tuple[str, ...]
    """The prompt of each row; rows of one prompt lie together."""
    global_step: int
    weight_version: int
    """Of the weights that the update starts from: the learner's when the batch closes."""
    max_staleness: int | None = None
    """By how many versions the weights that sampled a trained token may be older; None: not bounded, as of recordings."""
    prompt_end_indices: tuple[int, ...] | None = None
    """One past the last row of each prompt. Derived for a whole batch; None once rows were taken from it."""
    policy_mini_batch_boundaries: tuple[tuple[int, int], ...] | None = None
    """`[start, stop)` rows of each of the policy's mini-batches; None as above."""
    critic_mini_batch_boundaries: tuple[tuple[int, int], ...] | None = None
    """The same for the critic; None also where there is no critic."""
    first_scored_row: int = 0
    """`old_logprobs` says nothing of rows before it: they are of the first optimizer step, whose policy is the old one."""
    images: tuple[ImageSpans, ...] = ()
    """Of each row the images among its tokens; empty where no row has any."""

    def of_rows(self, uids: Iterable[str], images: Iterable[ImageSpans] = ()) -> BatchMetadata:
        """For other rows: these uids and images, and nothing that was derived from the old ones."""
        of_each = tuple(images)
        return BatchMetadata(
            uids=tuple(uids),
            global_step=self.global_step,
            weight_version=self.weight_version,
            max_staleness=self.max_staleness,
            images=of_each if any(of_each) else (),
        )

    def images_of(self, rows: Iterable[int]) -> tuple[ImageSpans, ...]:
        """Return the images of these rows; nothing where no row has any."""
        return tuple(self.images[row] for row in rows) if self.images else ()


def padded_metadata(metadata: BatchMetadata, count: int, uid: str | None) -> BatchMetadata:
    """Return what is known of a batch with `count` dummy rows more, as `TrainingInputBatch.pad_rows` adds them."""
    images = (*metadata.images, *[()] * count) if metadata.images else ()
    # Another uid is a further prompt, which lies in no mini-batch: what was derived of the old ones is not true any more.
    if uid is not None and (not metadata.uids or uid != metadata.uids[-1]):
        return metadata.of_rows((*metadata.uids, *[uid] * count), images)

    def grow(boundaries: tuple[tuple[int, int], ...] | None) -> tuple[tuple[int, int], ...] | None:
        # Only the last range: dummy rows stand behind all others.
        return boundaries and (*boundaries[:-1], (boundaries[-1][0], boundaries[-1][1] + count))

    ends = metadata.prompt_end_indices
    return replace(
        metadata,
        uids=(*metadata.uids, *[metadata.uids[-1]] * count),
        images=images,
        prompt_end_indices=ends and (*ends[:-1], ends[-1] + count),
        policy_mini_batch_boundaries=grow(metadata.policy_mini_batch_boundaries),
        critic_mini_batch_boundaries=grow(metadata.critic_mini_batch_boundaries),
    )


def ranges(starts: Rows, sizes: Rows) -> Rows:
    """Return int64: `starts[0], starts[0] + 1, ...` (`sizes[0]` of them), then the same from `starts[1]`, and so on."""
    begins = np.cumsum(sizes) - sizes
    found: Rows = np.arange(int(sizes.sum())) + np.repeat(starts - begins, sizes)
    return found
