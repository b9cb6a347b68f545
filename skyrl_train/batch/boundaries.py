"""Where prompts and mini-batches begin and end among the rows of a batch.

A prompt yields `n_samples_per_prompt` rows, or with step-wise trajectories as many as its samples had turns. A
mini-batch is a fixed number of prompts, however many rows they became.
"""

from __future__ import annotations

from collections.abc import Sequence

from skyrl_train.errors import BatchError


def compute_prompt_end_indices(uids: Sequence[str]) -> list[int]:
    """One past the last row of each prompt, in order: `["a", "a", "b"]` gives `[2, 3]`.

    Raises BatchError for an empty list, and for a uid whose rows do not lie together.
    """
    if not uids:
        raise BatchError("no uids: a batch has at least one row")
    first_seen = {uids[0]: 0}
    ends = []
    previous = uids[0]
    for index, uid in enumerate(uids):
        if uid == previous:
            continue
        ends.append(index)
        if uid in first_seen:
            raise BatchError(
                f"uid {uid!r} is in two places: its rows begin at index {first_seen[uid]} and again at index {index}. "
                "The rows of one prompt must lie together, and a prompt may be in a batch only once"
            )
        first_seen[uid] = index
        previous = uid
    return [*ends, len(uids)]


def compute_prompt_boundaries(uids: Sequence[str]) -> list[tuple[int, int]]:
    """`[start, stop)` rows of each prompt: `["a", "a", "b"]` gives `[(0, 2), (2, 3)]`. Raises as above."""
    ends = compute_prompt_end_indices(uids)
    return list(zip([0, *ends[:-1]], ends))


def compute_prompt_mini_batch_boundaries(
    uids: Sequence[str],
    mini_batch_size: int,
    train_batch_size: int | None = None,
    is_stepwise: bool = True,
    n_samples_per_prompt: int | None = None,
) -> list[tuple[int, int]]:
    """`[start, stop)` rows of each mini-batch of `mini_batch_size` prompts.

    With `mini_batch_size=2`, `["a", "a", "b", "c", "d", "d"]` gives `[(0, 3), (3, 6)]`.
    `train_batch_size` is the number of prompts there must be. Where rows are not step-wise, each prompt must have
    `n_samples_per_prompt` of them (None: not checked).
    Raises BatchError naming the uid and the index, or the numbers that contradict each other.
    """
    if mini_batch_size < 1:
        raise BatchError(f"mini_batch_size must be a positive number of prompts; got {mini_batch_size}")
    prompts = compute_prompt_boundaries(uids)
    if train_batch_size is not None and len(prompts) != train_batch_size:
        raise BatchError(
            f"{len(prompts)} prompts (the last is {uids[-1]!r} at index {len(uids) - 1}) where "
            f"train_batch_size={train_batch_size} were expected"
        )
    whole, rest = divmod(len(prompts), mini_batch_size)
    if rest:
        raise BatchError(
            f"{len(prompts)} prompts are not a whole number of mini-batches of {mini_batch_size}: {rest} are left "
            f"over, from uid {uids[prompts[-rest][0]]!r} at index {prompts[-rest][0]}"
        )
    if not is_stepwise and n_samples_per_prompt is not None:
        for start, stop in prompts:
            if stop - start != n_samples_per_prompt:
                raise BatchError(
                    f"uid {uids[start]!r} at index {start} has {stop - start} rows where "
                    f"n_samples_per_prompt={n_samples_per_prompt} were expected"
                )
    size = mini_batch_size
    return [(prompts[index * size][0], prompts[(index + 1) * size - 1][1]) for index in range(whole)]
