"""The verb `estimate`: advantages and returns for a whole training batch, some prompts at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from skyrl_train.algorithms.advantages import ADVANTAGE_ESTIMATORS
from skyrl_train.algorithms.checks import check_advantage_output
from skyrl_train.algorithms.inputs import AdvantageInputs
from skyrl_train.algorithms.reduce import whiten
from skyrl_train.batch.training_batch import TrainingInputBatch
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.errors import BatchError
from skyrl_train.registry import resolve

MAX_PADDED_TOKENS = 2**22
"""Positions that are padded at once, so that one long row does not widen all others. Results do not depend on it."""


def estimate_advantages(batch: TrainingInputBatch, config: AlgorithmConfig) -> TrainingInputBatch:
    """The batch with columns `advantages` and `returns`, in the dtype of `rewards`.

    Raises ConfigError for an unknown estimator; BatchError for malformed columns, naming column and row.
    """
    estimator = resolve(config.advantage_estimator, ADVANTAGE_ESTIMATORS, field="trainer.algorithm.advantage_estimator")
    advantages = torch.zeros(batch.num_tokens, dtype=batch["rewards"].dtype)
    returns = torch.zeros_like(advantages)
    whiten_over_batch = False
    for rows in groups_of_whole_prompts(batch["prompt_index"], batch.lengths, max_padded_tokens=MAX_PADDED_TOKENS):
        part = batch.take(rows)
        inputs = advantage_inputs(part)
        output = estimator(inputs, config)
        check_advantage_output(output, inputs, config.advantage_estimator)
        positions = token_positions(batch.row_offsets, rows)
        advantages[positions] = part.from_padded(output.advantages)
        returns[positions] = part.from_padded(output.returns)
        whiten_over_batch = output.whiten_over_batch
    if whiten_over_batch:
        trained = batch["loss_mask"] & ~torch.repeat_interleave(batch["is_padding"], batch.lengths)
        advantages = whiten(advantages, trained)
    return batch.with_columns(advantages=advantages, returns=returns)


def advantage_inputs(batch: TrainingInputBatch) -> AdvantageInputs:
    """The padded view that estimators take."""
    for name in ("rewards", "loss_mask"):
        if name not in batch:
            raise BatchError(f"the batch has no column {name!r}, which advantages are estimated from")
    return AdvantageInputs(
        rewards=batch.padded("rewards"),
        loss_mask=batch.padded("loss_mask"),
        prompt_index=batch["prompt_index"],
        trajectory_index=batch["trajectory_index"],
        step_index=batch["step_index"],
        is_last_step=batch["is_last_step"],
        is_padding=batch["is_padding"],
        values=batch.padded("values") if "values" in batch else None,
    )


def groups_of_whole_prompts(prompt_index: Tensor, lengths: Tensor, *, max_padded_tokens: int) -> Iterator[Tensor]:
    """Row indices `[n]`, all rows of a prompt together; rows x longest row stays under the cap where prompts allow."""
    order = torch.argsort(prompt_index, stable=True)
    counts = torch.unique_consecutive(prompt_index[order], return_counts=True)[1]
    group: list[Tensor] = []
    num_rows = longest = 0
    for rows in torch.split(order, counts.tolist()):
        longest_with = max(longest, int(lengths[rows].max()))
        if group and (num_rows + len(rows)) * longest_with > max_padded_tokens:
            yield torch.cat(group)
            group, num_rows, longest_with = [], 0, int(lengths[rows].max())
        group.append(rows)
        num_rows, longest = num_rows + len(rows), longest_with
    if group:
        yield torch.cat(group)


def token_positions(row_offsets: Tensor, rows: Tensor) -> Tensor:
    """Flat positions of the tokens of `rows`, row by row in that order."""
    lengths = row_offsets[rows + 1] - row_offsets[rows]
    shift = row_offsets[rows] - (lengths.cumsum(0) - lengths)
    return torch.arange(int(lengths.sum())) + torch.repeat_interleave(shift, lengths)
