"""Where things begin and end: prompts and mini-batches among rows, tokens among rows that lie one after the other.

Rows of 3 and 2 tokens: lengths `[3, 2]`, offsets `[0, 3, 5]`; padded to `[2, 3]`, their tokens are at 0 1 2, 3 4.
Sizes that follow from lengths are known where the lengths are. On a device, asking for them makes the host wait for all
that is queued there, so that the functions on tensors are called before rows go to one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from skyrl_train.errors import BatchError, counted


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
            f"{counted(len(prompts), 'prompt')} (the last is {uids[-1]!r} at index {len(uids) - 1}) where "
            f"train_batch_size={train_batch_size} were expected"
        )
    whole, rest = divmod(len(prompts), mini_batch_size)
    if rest:
        raise BatchError(
            f"{counted(len(prompts), 'prompt')} are not a whole number of mini-batches of {mini_batch_size}: {rest} are "
            f"left over, from uid {uids[prompts[-rest][0]]!r} at index {prompts[-rest][0]}"
        )
    if not is_stepwise and n_samples_per_prompt is not None:
        for start, stop in prompts:
            if stop - start != n_samples_per_prompt:
                raise BatchError(
                    f"uid {uids[start]!r} at index {start} has {counted(stop - start, 'row')} where "
                    f"n_samples_per_prompt={n_samples_per_prompt} were expected"
                )
    size = mini_batch_size
    return [(prompts[index * size][0], prompts[(index + 1) * size - 1][1]) for index in range(whole)]


def moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """On `device`; waits for what is queued there only on the way to the host. (Unpinned memory is read at once.)"""
    return tensor.to(device, non_blocking=torch.device(device).type != "cpu")


def offsets_of(lengths: Tensor) -> Tensor:
    """int64 `[rows + 1]`: 0, then the running total of `lengths` int64 `[rows]`."""
    offsets = lengths.new_zeros(len(lengths) + 1)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def token_positions(row_offsets: Tensor, rows: Tensor) -> Tensor:
    """int64: where in a flat column the tokens of `rows` are, row after row."""
    lengths = row_offsets[rows + 1] - row_offsets[rows]
    shift = torch.repeat_interleave(row_offsets[rows] - offsets_of(lengths)[:-1], lengths)
    return torch.arange(len(shift), device=shift.device) + shift


def padding_of(lengths: Tensor) -> tuple[int, Tensor]:
    """The longest row, and int64 `[tokens]`: where each token is in rows `[rows, longest]`, flattened."""
    width = int(lengths.max()) if len(lengths) else 0
    filled = width - lengths
    shift = torch.repeat_interleave(filled.cumsum(0) - filled, lengths)
    return width, torch.arange(len(shift), device=lengths.device) + shift
