"""One optimizer step: a closed mini-batch, whose loss denominators are counted before anything is split.

`loss = sum over tokens of w_t * token_loss_t`, for policy, KL, entropy and value terms alike. The weights `w_t` are
fixed here, over the whole step, and travel with the rows. Each micro-batch and each rank then contributes a sum, so
that how the rows are cut, ordered, padded or dealt cannot change the gradient.

A mini-batch is staged onto data-parallel ranks with equal work for each, what shares computation together, and results are
put back in order. How old the weights were that sampled a token is the learner's version less the token's, in updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from skyrl_train.batch.layouts.cost import CostModel
from skyrl_train.batch.planner.balance import shard_rows
from skyrl_train.batch.planner.rows import facts_of
from skyrl_train.batch.reduce import whiten
from skyrl_train.batch.training_batch import TrainingInputBatch, token_positions
from skyrl_train.config.fields import LayoutChoice
from skyrl_train.errors import BatchError, counted
from skyrl_train.parts import LOSS_REDUCTIONS
from skyrl_train.registry import PartSpec, part_name


@dataclass(frozen=True, kw_only=True)
class LossDenominators:
    """What the step consists of. Dummy rows and placeholders of failed trajectories are never counted."""

    num_tokens: int
    """Tokens with loss; those of a trajectory that was drawn k times (`sample_count`) count k times."""
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
    """With the column `loss_weights`, float64 `[num_tokens]`, which has all divisors of the loss in it."""
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
    row_tokens = _tokens_with_loss_by_row(batch)
    counts = _count(batch, row_tokens, max_sequence_length_for_norm)
    row_weights = torch.zeros(batch.num_rows, dtype=torch.float64, device=row_tokens.device)
    if counts.denominators.num_tokens:
        copies = (
            batch["sample_count"].double() if "sample_count" in batch else torch.ones_like(counts.trajectory_tokens)
        )
        # A reduction divides by a row's own tokens: what it says of rows without any is no number.
        is_counted = (row_tokens > 0) & (copies > 0)
        row_weights = torch.where(
            is_counted, copies * _weights_of_rows(reduction(counts), is_counted, part_name(loss_reduction)), 0.0
        )
    closed = batch.with_spread("loss_weights", row_weights)
    if normalize_advantages:
        advantages = whiten(batch["advantages"], tokens_with_loss(batch), copies=copies_of_tokens(batch))
        closed = closed.with_columns(advantages=advantages)
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


def copies_of_tokens(batch: TrainingInputBatch) -> Tensor | None:
    """Return `[num_tokens]` integers, how often statistics over the step count each token: what was drawn k times weighs as
    k copies in the loss, and so in these. None where nothing was resampled."""
    return torch.repeat_interleave(batch["sample_count"], batch.lengths) if "sample_count" in batch else None


def rows_with_loss(batch: TrainingInputBatch) -> Tensor:
    """Return int64 `[rows with loss]`: the numbers of rows that are not padding and have at least one token with loss."""
    return _tokens_with_loss_by_row(batch).nonzero().squeeze(1)


def _tokens_with_loss_by_row(batch: TrainingInputBatch) -> Tensor:
    """Return int64 `[num_rows]`: how many of `tokens_with_loss` each row has."""
    return batch.loss_tokens() * ~batch["is_padding"]


def _count(batch: TrainingInputBatch, row_tokens: Tensor, max_sequence_length_for_norm: int) -> RowCounts:
    row_tokens = row_tokens.double()
    copies = batch["sample_count"].double() if "sample_count" in batch else torch.ones_like(row_tokens)
    counted = row_tokens * copies
    has_loss = counted > 0

    def over(group: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """One row of each group with loss, and each row's group total."""
        _, number = torch.unique(group, return_inverse=True)
        totals = torch.zeros_like(row_tokens).index_add_(0, number, tokens)
        # Any one row with loss stands for its group: groups without such a row are in no denominator.
        rows = has_loss.nonzero().squeeze(1)
        one_of = torch.full_like(number, -1).scatter_(0, number[rows], rows)
        return one_of[one_of >= 0], totals[number]

    # Of one trajectory its own tokens, however often it was drawn: a mean
    # over it is the same for each draw. A prompt has the tokens of all draws.
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


Together = Literal["row", "trajectory", "prompt"]
"""The largest unit within which rows share computation."""


def computed_together(layout: LayoutChoice, *, merge_turns: bool) -> Together:
    """The unit that a layout shares computation within."""
    if layout in ("prefix_shared", "auto"):
        return "prompt"
    return "trajectory" if merge_turns else "row"


@dataclass(frozen=True, kw_only=True)
class StagedBatch:
    """One shard per rank, with what is needed to put their results back in order."""

    shards: tuple[TrainingInputBatch, ...]
    """By rank; each has at least one row. Equal numbers of rows where no rows share computation, else equal work."""
    order: Tensor
    """int64: the rows of all shards, one after the other, as row numbers of the batch with its dummy rows."""
    row_offsets: Tensor
    """int64, of the batch with its dummy rows."""
    num_rows: int
    """Of the batch itself, without the dummy rows that were added."""
    num_tokens: int

    @property
    def num_dummy_rows(self) -> int:
        """Rows without loss that were added."""
        return len(self.order) - self.num_rows

    def collect(self, results: Sequence[Tensor]) -> Tensor:
        """`[num_tokens, ...]` in the batch's own order, without dummy rows, from each rank's `[tokens of its shard, ...]`.

        Raises BatchError naming a rank whose result does not fit its shard.
        """
        if len(results) != len(self.shards):
            raise BatchError(f"{counted(len(results), 'result')} for {counted(len(self.shards), 'rank')}")
        for rank, (result, shard) in enumerate(zip(results, self.shards)):
            if tuple(result.shape) != (shard.num_tokens, *results[0].shape[1:]):
                raise BatchError(f"rank {rank} returned {tuple(result.shape)} for a shard of {shard.num_tokens} tokens")
        # Dummy rows stand behind all others, and so do their tokens.
        return restore_rows(torch.cat(list(results)), self.order, self.row_offsets)[: self.num_tokens]


def stage(
    batch: TrainingInputBatch, dp_size: int, *, cost: CostModel | None = None, together: Together = "row"
) -> StagedBatch:
    """Shards the rows of `batch`, with dummy rows where ranks need them.

    Rows within one `together` unit share computation: units stay whole where ranks then have equal work, and what a row
    costs is what it adds. Where no rows share, each rank gets as many rows as the others.

    A closed mini-batch keeps its `loss_weights`, so that its shards' losses add up to its own. Works with fewer rows
    than ranks, and gives each of them at least one row. Raises BatchError for an empty batch.
    """
    if batch.num_rows == 0:
        raise BatchError("no rows to shard")
    if "position_ids" in batch or dp_size == 1:
        together = "row"  # rows that hold several sequences share nothing; one rank has all rows in any case
    # Whatever the layout is called: dealing asks of it only within which unit rows share.
    layout: LayoutChoice = "prefix_shared" if together == "prompt" else "packed"
    facts = facts_of(batch, layout=layout, merge_turns=together == "trajectory")
    dealt, _ = shard_rows(facts, dp_size, cost or CostModel())
    # What was dealt beyond the batch are numbers of dummy rows.
    padded = batch.pad_rows(sum(map(len, dealt)) - batch.num_rows)
    shares = [torch.from_numpy(rows) for rows in dealt]
    return StagedBatch(
        shards=tuple(padded.take(rows) for rows in shares),
        order=torch.cat(shares),
        row_offsets=padded.row_offsets,
        num_rows=batch.num_rows,
        num_tokens=batch.num_tokens,
    )


def restore_rows(flat: Tensor, order: Tensor, row_offsets: Tensor) -> Tensor:
    """Undoes a reordering: `flat` `[num_tokens]` holds the tokens of rows `order[0]`, `order[1]`, ... of a batch with
    `row_offsets`; returned in the batch's own order. Raises BatchError where `order` is not every row once.
    """
    num_rows = len(row_offsets) - 1
    if len(order) != num_rows or len(torch.unique(order)) != num_rows:
        raise BatchError(
            f"an order of {len(order)} rows ({len(torch.unique(order))} different) for a batch of {num_rows}"
        )
    restored = torch.empty_like(flat)
    restored[token_positions(row_offsets, order)] = flat
    return restored


def token_ages(batch: TrainingInputBatch) -> Tensor | None:
    """Return `[num_tokens]` int32, the age of each token in versions, 0 outside responses; None where all are 0 and none
    may be older.

    Below 0 is what the learner's own weights cannot have sampled yet: recorded tokens of another run.
    """
    if "weight_version" in batch:
        return batch.metadata.weight_version - batch["weight_version"]
    return torch.zeros_like(batch["input_ids"]) if batch.metadata.max_staleness else None


@dataclass(frozen=True, kw_only=True)
class Ages:
    """What there is of ages among the trained tokens of a batch."""

    found: tuple[int, ...] = ()
    """Each once, ascending; none where `token_ages` is None."""
    fresh_behind_updates: bool = False
    """Whether tokens of age 0 stand behind an update within their turn."""


def ages_in(batch: TrainingInputBatch) -> Ages:
    """Return what ages there are."""
    ages = token_ages(batch)
    if ages is None:
        return Ages()
    return Ages(
        found=tuple(torch.unique(ages[tokens_with_loss(batch)]).tolist()),
        fresh_behind_updates=bool((behind_updates(batch) & (ages == 0)).any()),
    )


def behind_updates(batch: TrainingInputBatch) -> Tensor:
    """Return `[num_tokens]` bool: the trained tokens that weights of a later version sampled than the first one of their
    turn, since engines took new weights meanwhile. A turn is the trained tokens of a row that stand side by side."""
    mask = tokens_with_loss(batch)
    if "weight_version" not in batch or not mask.any():
        return torch.zeros_like(mask)
    # A turn begins behind a token that is not trained, or at the first token of its row.
    begins = mask.clone()
    begins[1:] &= ~mask[:-1]
    starts = batch.row_offsets[:-1]
    begins[starts] = mask[starts]
    # Which turn each token is of, or is behind; tokens ahead of the
    # first one are masked anyway, and need any index that there is.
    turn = (begins.cumsum(0) - 1).clamp(min=0)
    return mask & (batch["weight_version"] > batch["weight_version"][begins][turn])


def check_staleness(batch: TrainingInputBatch) -> None:
    """Raise BatchError, naming a prompt and the versions, unless the age of every trained token lies between 0 and
    `metadata.max_staleness`. Nothing is asked of a batch that has no such bound."""
    ages, most = token_ages(batch), batch.metadata.max_staleness
    if ages is None or most is None:
        return
    wrong = (tokens_with_loss(batch) & ((ages < 0) | (ages > most))).nonzero().squeeze(1)
    if not len(wrong):
        return
    token = int(wrong[0])
    row = int(torch.searchsorted(batch.row_offsets, token, right=True)) - 1
    learner, version = batch.metadata.weight_version, int(batch["weight_version"][token])
    raise BatchError(
        f"prompt {batch.metadata.uids[row]!r}: token {token - int(batch.row_offsets[row])} of its row {row} was sampled by "
        f"weights of version {version}, and the learner has those of version {learner}; trained tokens must be from 0 to "
        f"trainer.max_staleness={most} versions old. {counted(len(wrong), 'token')} of the batch are not. Does the engine "
        "serve the weights that it is given?"
    )
