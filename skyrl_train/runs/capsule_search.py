"""Finds what makes a loss or a gradient bad: among numbers that are there to be read, then by halving what is computed.

A gradient that is not finite stays so whatever is added to it. So where all of a mini-batch is bad, one of its halves is,
unless two finite halves overflow together; each pass over a half then halves what is left: about as much work as two passes
over all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from skyrl_train.batch import TrainingInputBatch

T = TypeVar("T")
Decode = Callable[[list[int]], str]
"""Token ids to text."""
CAUSES = ("rewards", "rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "returns", "advantages")
"""Columns of a batch, each of which may be made of those before it."""
_GROUPS = 2
"""That are looked at item by item."""
_BEFORE, _BEHIND = 24, 8
"""Tokens that are shown around one."""


@dataclass(frozen=True, kw_only=True)
class TokenPlace:
    """One token of a batch, as a reader of rollouts knows it."""

    uid: str
    sample: int
    turn: int
    position: int
    """In its row."""
    token_id: int
    text: str
    """The token and what is around it, with the token between `>>` and `<<`; ids where there is no tokenizer."""

    def __str__(self) -> str:
        return (
            f"trajectory {self.uid}/{self.sample}, turn {self.turn}, position {self.position}, token {self.token_id}:"
            f"\n    {self.text}"
        )


def place_of(batch: TrainingInputBatch, row: int, position: int, decode: Decode | None) -> TokenPlace:
    """Describe the token at `position` of a row."""
    start, stop = int(batch.row_offsets[row]), int(batch.row_offsets[row + 1])
    ids = batch["input_ids"][start:stop].tolist()
    prompts = batch["prompt_index"]
    numbers = batch["trajectory_index"][prompts == prompts[row]]
    first = numbers[numbers >= 0].min()
    return TokenPlace(
        uid=batch.metadata.uids[row],
        sample=int(batch["trajectory_index"][row] - first),
        turn=int(batch["step_index"][row]) + _turns_before(batch, start, start + position),
        position=position,
        token_id=ids[position],
        text=in_context(ids, position, decode),
    )


def _turns_before(batch: TrainingInputBatch, start: int, token: int) -> int:
    """Return how many responses of the row ended before this token."""
    mask = batch["response_mask"] if "response_mask" in batch else batch["loss_mask"]
    seen = mask[start : token + 1].int()
    begins = int(((seen[1:] == 1) & (seen[:-1] == 0)).sum()) + int(seen[0])
    return max(0, begins - 1) if int(seen[-1]) else begins


def in_context(ids: Sequence[int], position: int, decode: Decode | None) -> str:
    """Return the token with what is around it."""
    parts = (
        ids[max(0, position - _BEFORE) : position],
        ids[position : position + 1],
        ids[position + 1 : position + 1 + _BEHIND],
    )
    shown = [str(list(part)) if decode is None else decode(list(part)) for part in parts]
    return f"{shown[0]}>>{shown[1]}<<{shown[2]}"


def non_finite_tensors(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Return, for each tensor with numbers that are not finite, how many, and its first index among the flat ones."""
    found = {}
    for name, tensor in tensors.items():
        bad = ~tensor.flatten().isfinite() if tensor.is_floating_point() else None
        if bad is not None and bool(bad.any()):
            found[name] = int(bad.sum()), int(bad.nonzero()[0])
    return found


@dataclass(frozen=True, kw_only=True)
class BadColumn:
    """A column of a batch with numbers that are not finite."""

    name: str
    count: int
    row: int
    position: int
    """Of the first."""
    value: float


def non_finite_column(batch: TrainingInputBatch) -> BadColumn | None:
    """Return the first column, in the order in which they are made of one another, that is not finite where it counts."""
    padding = torch.repeat_interleave(batch["is_padding"], batch.lengths)
    for name in CAUSES:
        if name not in batch:
            continue
        column = batch[name]
        bad = ~column.isfinite() & ~padding & (batch["loss_mask"] | torch.tensor(name == "rewards"))
        if bool(bad.any()):
            token = int(bad.nonzero()[0])
            row = int(torch.searchsorted(batch.row_offsets, token, right=True)) - 1
            position = token - int(batch.row_offsets[row])
            return BadColumn(name=name, count=int(bad.sum()), row=row, position=position, value=float(column[token]))
    return None


def halve(items: Sequence[T], is_bad: Callable[[Sequence[T]], bool]) -> list[T]:
    """Halve `items`, which are bad together, to one that is bad by itself, or to the fewest found that only are together."""
    left = list(items)
    while len(left) > 1:
        middle = len(left) // 2
        if is_bad(left[:middle]):
            left = left[:middle]
        elif is_bad(left[middle:]):
            left = left[middle:]
        else:
            break
    return left


def first_bad(count: int, is_bad: Callable[[int], bool]) -> int:
    """Return the index of the first of `count` items with which those from the first on become bad: the least n with
    `is_bad(n + 1)`, which all of them are."""
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_bad(middle) else (middle, high)
    return high - 1


def suspects(count: int, size: Callable[[Sequence[int]], float]) -> dict[int, float]:
    """Return the sizes of those of `count` items that are worth a look, by index: all of the two groups that are largest as
    a whole.

    Sizes are those of sums of vectors. One that is ten times the others stands out of a group of the square root of all,
    unless they all point against it; so about three times that many are computed in place of all.
    """
    width = max(1, math.isqrt(count))
    groups = [range(start, min(start + width, count)) for start in range(0, count, width)]
    found = sorted(groups, key=lambda group: -size(group))[:_GROUPS]
    return {index: size([index]) for group in found for index in group}


def largest_part(items: Sequence[T], vector: Callable[[Sequence[T]], Tensor]) -> tuple[T, float]:
    """Halve `items` to one, each time into the half whose vector is longer; the item, and its vector's length.

    Vectors add up: that of the second half is what the first leaves of that of both, so that half of them are computed.
    """
    left, whole = list(items), vector(items)
    while len(left) > 1:
        middle = len(left) // 2
        first = vector(left[:middle])
        rest = whole - first
        left, whole = (left[:middle], first) if first.norm() >= rest.norm() else (left[middle:], rest)
    return left[0], float(whole.norm())


def with_loss_on(batch: TrainingInputBatch, tokens: Tensor) -> TrainingInputBatch:
    """The batch with loss on these tokens alone, `[num_tokens]` bool; what they read stays."""
    changed = {"loss_mask": batch["loss_mask"] & tokens}
    if "response_mask" not in batch:
        changed["response_mask"] = batch["loss_mask"]
    if "loss_weights" in batch:
        changed["loss_weights"] = torch.where(tokens, batch["loss_weights"], 0.0)
    return batch.with_columns(**changed)


def ninth_decile(values: Sequence[float]) -> float:
    """Return the value that nine of ten do not exceed: what is large among them, where most may be near 0; NaN where there
    is none."""
    ranked = sorted(values)
    return ranked[int(0.9 * (len(ranked) - 1))] if ranked else math.nan
