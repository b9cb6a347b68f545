"""How old the weights were that sampled a token: the learner's version less the token's, counted in updates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_train.batch.steps.minibatch import tokens_with_loss
from skyrl_train.batch.training_batch import TrainingInputBatch
from skyrl_train.errors import BatchError, counted


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
    begins = mask.clone()
    begins[1:] &= ~mask[:-1]
    starts = batch.row_offsets[:-1]
    begins[starts] = mask[starts]
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
