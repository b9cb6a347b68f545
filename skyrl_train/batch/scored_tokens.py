"""The tokens of a micro-batch that carry loss, and the hidden states that predict them.

A token is predicted by the state of the one before it. Which tokens these are is a question of masks and of equal
prefixes, whose answers have sizes that nobody knows beforehand: asked on a device, each would make the host wait for all
that is queued there. So they are found on the host, where the rows are, before the forward begins, and moved with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from skyrl_train.batch.boundaries import moved
from skyrl_train.batch.training_batch import TrainingInputBatch
from skyrl_train.errors import BatchError


@dataclass(frozen=True, kw_only=True)
class ScoredTokens:
    """Of one micro-batch, as far as this rank's hidden states predict them. Tokens at one position are predicted once."""

    tokens: Tensor
    """int64 `[scored]`: places in the flat columns."""
    states: Tensor
    """int64 `[distinct]`: which of this rank's hidden states come before them."""
    representatives: Tensor
    """int64 `[distinct]`: one of `tokens`, by its place among them, for each state."""
    copies: Tensor | None
    """int64 `[scored]`: the state of each token, by its place in `states`; None where each token has its own."""
    by_state: Tensor
    """int64 `[scored]`: places among `tokens`, those of one state together; empty where each token has its own."""
    ends: Tensor
    """int64 `[distinct]`, always on the host: where the tokens of each state end in `by_state`."""
    read: Tensor
    """int64, sorted: `states`, each once."""
    num_loss_tokens: int
    """Tokens of the rows that `loss_mask` marks, over all ranks that share the forward."""
    mismatches: list[Tensor] = field(default_factory=list)
    """bool scalars on the device, one for each gradient that was foreseen: True where another was asked for."""

    def to(self, device: torch.device) -> ScoredTokens:
        """On `device`, but for `ends`."""
        return replace(
            self,
            tokens=moved(self.tokens, device),
            states=moved(self.states, device),
            representatives=moved(self.representatives, device),
            copies=None if self.copies is None else moved(self.copies, device),
            by_state=moved(self.by_state, device),
            read=moved(self.read, device),
            mismatches=[],
        )


def sequence_offsets(rows: TrainingInputBatch) -> Tensor:
    """int64: where sequences begin in the flat columns, and the end: at each row, and, in rows that were packed of
    several sequences (column `position_ids`), at each of those."""
    if "position_ids" not in rows:
        return rows.row_offsets
    begins = rows["position_ids"] == 0
    begins[rows.row_offsets[:-1]] = True
    return torch.cat([begins.nonzero().squeeze(1), rows.row_offsets[-1:]])


def loss_tokens(rows: TrainingInputBatch) -> Tensor:
    """int64: the flat places of the tokens that `loss_mask` marks. Raises BatchError for the first token of a row."""
    mask = rows["loss_mask"]
    begins = sequence_offsets(rows)[:-1]
    first = mask[begins]
    if bool(first.any()):
        row = int(torch.searchsorted(rows.row_offsets, begins[first][0], right=True)) - 1
        raise BatchError(f"row {row} marks its first token for the loss, but nothing comes before it to predict it")
    return mask.nonzero().squeeze(1)
