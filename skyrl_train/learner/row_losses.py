"""Losses of rows that each have their own: what the server's clients ask of a policy, outside a trainer's step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from skyrl_train.algorithms.losses import PolicyLossInputs, is_tokenwise, policy_loss
from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.layouts import Layout
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.learner.policy import PolicyLearner, column_or_default
from skyrl_train.telemetry import StepMetrics


@dataclass(frozen=True, kw_only=True)
class TokenLosses:
    """What a pass with a loss for each row found, `[num_tokens]` on the CPU, 0 at tokens without `loss_mask`."""

    logprobs: Tensor
    losses: Tensor
    """Weighted: their sum is the loss."""

    @staticmethod
    def of(both: Tensor) -> TokenLosses:
        """Return the two columns of a `[num_tokens, 2]` tensor."""
        return TokenLosses(logprobs=both[..., 0], losses=both[..., 1])


class RowLossLearner(PolicyLearner):
    """A policy whose rows may have losses of their own."""

    def forward_losses(
        self, batch: TrainingInputBatch, losses: Sequence[AlgorithmConfig], *, backward: bool
    ) -> TokenLosses:
        """What each token's loss is where each row has a loss of its own (`loss_index`; without it the first), as registered
        for `trainer.algorithm.policy_loss`; with `backward` the gradient of their weighted sum is added to what is
        accumulated. The terms that a whole step has beside it, KL and entropy, are not in it.

        Rows are told apart by `trajectory_index`, which must be unique. Raises BatchError for columns that a loss lacks.
        """
        found: dict[int, Tensor] = {}

        def scored(hidden: Tensor, rows: TrainingInputBatch, layout: Layout) -> Tensor:
            def loss_of_tokens(places: Tensor, logprobs: Tensor, entropy: Tensor) -> Tensor:
                del entropy
                columns = {name: column[places].unsqueeze(0) for name, column in rows.token_columns.items()}
                return _loss_of_rows(columns, logprobs.unsqueeze(0), losses, None).sum()

            # With several losses the head would have to know of whose row a token is, which it is not told.
            foreseen = backward and len(losses) == 1 and is_tokenwise(losses[0])
            scores = self._scores(
                hidden, rows, layout, with_entropy=False, loss_of_tokens=loss_of_tokens if foreseen else None
            )
            columns = {name: rows.padded(name) for name in rows.token_columns}
            index = rows.row_columns.get("loss_index")
            return torch.stack((scores.logprobs, _loss_of_rows(columns, scores.logprobs, losses, index)), dim=-1)

        if not backward:
            return TokenLosses.of(self.engine.forward(batch, scored, numbers=(2,)))

        def loss_of(hidden: Tensor, rows: TrainingInputBatch, layout: Layout) -> tuple[Tensor, StepMetrics]:
            both = scored(hidden, rows, layout)
            parts = torch.split(rows.from_padded(both.detach()), rows.lengths.tolist())
            # What runs out of memory is computed anew: the later result of a row is the one that counts.
            found.update(zip(rows["trajectory_index"].tolist(), parts))
            return both[..., 1].sum(), {}

        self.engine.forward_backward(batch, loss_of)
        # Rows without loss were not computed, and stay 0.
        flat = torch.zeros(batch.num_tokens, 2, dtype=torch.float64)
        for row, (start, stop) in zip(batch["trajectory_index"].tolist(), pairwise(batch.row_offsets.tolist())):
            if row in found:
                flat[start:stop] = found[row].to("cpu", torch.float64)
        return TokenLosses.of(flat)


def _loss_of_rows(
    columns: Mapping[str, Tensor], logprobs: Tensor, losses: Sequence[AlgorithmConfig], index: Tensor | None
) -> Tensor:
    """`[rows, len]`: weighted losses of tokens. `index` `[rows]` says which loss is a row's; None where all have the first
    one. Taken in float64, as rounding of a token's loss would show where losses of both signs are added up."""
    logprobs = logprobs.double()
    inputs = PolicyLossInputs(
        logprobs=logprobs,
        old_logprobs=column_or_default(columns, "old_logprobs", logprobs),
        advantages=column_or_default(columns, "advantages", torch.zeros_like(logprobs)),
        loss_mask=columns["loss_mask"],
    )
    weights = columns["loss_weights"]
    if index is None:
        return weights * policy_loss(inputs, losses[0]).token_losses
    total = torch.zeros_like(weights)
    for number, algorithm in enumerate(losses):
        own = inputs.loss_mask & (index == number).unsqueeze(1)
        total = total + weights * policy_loss(replace(inputs, loss_mask=own), algorithm).token_losses
    return total
