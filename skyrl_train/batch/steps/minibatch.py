"""One optimizer step: a closed mini-batch, whose loss denominators are counted before anything is split.

`loss = sum over tokens of w_t * token_loss_t`, for policy, KL, entropy and value terms alike. The weights `w_t` are
fixed here, over the whole step, and travel with the rows. Each micro-batch and each rank then contributes a sum, so
that how the rows are cut, ordered, padded or dealt cannot change the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_train.batch.reduce import whiten
from skyrl_train.batch.training_batch import TrainingInputBatch
from skyrl_train.errors import BatchError
from skyrl_train.parts import LOSS_REDUCTIONS
from skyrl_train.registry import PartSpec, part_name

__all__ = ["LOSS_REDUCTIONS", "LossDenominators", "MiniBatch", "RowCounts", "close_mini_batch", "mini_batches"]


@dataclass(frozen=True, kw_only=True)
class LossDenominators:
    """What the step consists of. Dummy rows and placeholders of failed trajectories are never counted."""

    num_tokens: int
    """Tokens with loss."""
    num_sequences: int
    """Trajectories with at least one such token, whether they are one row or one row per turn."""
    num_rows: int
    """Rows that are not padding."""
    num_prompts: int
    """Prompts with at least one such token."""


@dataclass(frozen=True, kw_only=True)
class MiniBatch:
    """The rows of one optimizer step."""

    batch: TrainingInputBatch
    """Has the column `loss_weights`."""
    denominators: LossDenominators


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """What a loss reduction may divide by: the step's denominators and, float64 `[num_rows]`, each row's own counts."""

    denominators: LossDenominators
    trajectory_tokens: Tensor
    """Tokens with loss of the row's whole trajectory in this step."""
    prompt_tokens: Tensor
    """The same of the row's whole prompt."""
    max_sequence_length_for_norm: int


def token_mean(counts: RowCounts) -> Tensor:
    """`1 / num_tokens`: every token weighs the same (DAPO, arXiv:2503.14476)."""
    return torch.full_like(counts.trajectory_tokens, 1.0 / counts.denominators.num_tokens)


def sequence_mean(counts: RowCounts) -> Tensor:
    """`1 / (num_sequences * tokens of the trajectory)`: every trajectory weighs the same (GRPO, arXiv:2402.03300)."""
    return 1.0 / (counts.denominators.num_sequences * counts.trajectory_tokens)


def seq_mean_token_sum_norm(counts: RowCounts) -> Tensor:
    """`1 / (num_sequences * max_sequence_length_for_norm)`: a constant divisor (Dr. GRPO, arXiv:2503.20783)."""
    divisor = counts.denominators.num_sequences * counts.max_sequence_length_for_norm
    return torch.full_like(counts.trajectory_tokens, 1.0 / divisor)


def prompt_mean(counts: RowCounts) -> Tensor:
    """`1 / (num_prompts * tokens of the prompt)`: every prompt weighs the same."""
    return 1.0 / (counts.denominators.num_prompts * counts.prompt_tokens)


def close_mini_batch(
    batch: TrainingInputBatch,
    *,
    loss_reduction: PartSpec,
    max_sequence_length_for_norm: int,
    normalize_advantages: bool = False,
) -> MiniBatch:
    """Counts the step's denominators and sets `loss_weights` (float64; 0 outside `loss_mask` and on padding rows).

    `batch` holds all rows of each of its trajectories. With `normalize_advantages` the column `advantages` is whitened
    over this step's tokens with loss. A step without any such token gets weights of 0.
    Raises ConfigError for an unknown reduction, BatchError for a missing column and for weights that are none.
    """
    reduction: Callable[[RowCounts], Tensor] = LOSS_REDUCTIONS.resolve(loss_reduction)
    trained = tokens_with_loss(batch)
    row_tokens = _count_by_row(batch, trained)
    counts = _count(batch, row_tokens, max_sequence_length_for_norm)
    weights = torch.zeros(batch.num_tokens, dtype=torch.float64, device=trained.device)
    if counts.denominators.num_tokens:
        copies = (
            batch["sample_count"].double() if "sample_count" in batch else torch.ones_like(counts.trajectory_tokens)
        )
        is_counted = (row_tokens > 0) & (copies > 0)
        row_weights = torch.where(
            is_counted, copies * _weights_of_rows(reduction(counts), is_counted, part_name(loss_reduction)), 0.0
        )
        weights[trained] = torch.repeat_interleave(row_weights, row_tokens)
    closed = batch.with_columns(loss_weights=weights)
    if normalize_advantages:
        closed = closed.with_columns(advantages=whiten(batch["advantages"], trained))
    return MiniBatch(batch=closed, denominators=counts.denominators)


def _weights_of_rows(found: Tensor, is_counted: Tensor, reduction: str) -> Tensor:
    """float64 `[num_rows]`. Raises BatchError where a custom reduction gives rows that count no such weights."""
    if found.shape != is_counted.shape or not bool(torch.isfinite(found[is_counted]).all()):
        raise BatchError(
            f"loss reduction {reduction!r} gave {list(found.shape)} weights, or one that is not finite; it must give each "
            f"of {len(is_counted)} rows one finite weight"
        )
    return found.double()


def mini_batches(
    batch: TrainingInputBatch,
    boundaries: Sequence[tuple[int, int]],
    *,
    loss_reduction: PartSpec,
    max_sequence_length_for_norm: int,
    normalize_advantages: bool = False,
) -> Iterator[MiniBatch]:
    """One closed mini-batch for each `[start, stop)` range of rows, in order; without `old_logprobs` where the policy
    did not score its rows."""
    for start, stop in boundaries:
        rows = batch.slice(start, stop)
        yield close_mini_batch(
            rows.without_columns("old_logprobs") if start < batch.metadata.first_scored_row else rows,
            loss_reduction=loss_reduction,
            max_sequence_length_for_norm=max_sequence_length_for_norm,
            normalize_advantages=normalize_advantages,
        )


def tokens_with_loss(batch: TrainingInputBatch) -> Tensor:
    """Return `[num_tokens]` bool: the tokens with `loss_mask` of rows that are not padding."""
    if not bool(batch["is_padding"].any()):
        return batch["loss_mask"]
    return batch["loss_mask"] & ~torch.repeat_interleave(batch["is_padding"], batch.lengths)


def rows_with_loss(batch: TrainingInputBatch) -> Tensor:
    """Return int64 `[rows with loss]`: the numbers of rows that are not padding and have at least one token with loss."""
    return _count_by_row(batch, tokens_with_loss(batch)).nonzero().squeeze(1)


def _count_by_row(batch: TrainingInputBatch, trained: Tensor) -> Tensor:
    """Return int64 `[num_rows]`: how many of a row's tokens `trained` `[num_tokens]` marks."""
    before = torch.zeros(batch.num_tokens + 1, dtype=torch.int64, device=trained.device)
    torch.cumsum(trained, dim=0, out=before[1:])
    return before[batch.row_offsets].diff()


def _count(batch: TrainingInputBatch, row_tokens: Tensor, max_sequence_length_for_norm: int) -> RowCounts:
    row_tokens = row_tokens.double()
    copies = batch["sample_count"].double() if "sample_count" in batch else torch.ones_like(row_tokens)
    counted = row_tokens * copies
    has_loss = counted > 0

    def over(group: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """One row of each group with loss, and each row's group total."""
        _, number = torch.unique(group, return_inverse=True)
        totals = torch.zeros_like(row_tokens).index_add_(0, number, tokens)
        rows = has_loss.nonzero().squeeze(1)
        one_of = torch.full_like(number, -1).scatter_(0, number[rows], rows)
        return one_of[one_of >= 0], totals[number]

    trajectories, trajectory_tokens = over(batch["trajectory_index"], row_tokens)
    prompts, prompt_tokens = over(batch["prompt_index"], counted)
    return RowCounts(
        denominators=LossDenominators(
            num_tokens=int(counted.sum()),
            num_sequences=int(copies[trajectories].sum()),
            num_rows=int((~batch["is_padding"]).sum()),
            num_prompts=len(prompts),
        ),
        trajectory_tokens=trajectory_tokens,
        prompt_tokens=prompt_tokens,
        max_sequence_length_for_norm=max_sequence_length_for_norm,
    )
