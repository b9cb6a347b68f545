"""The verb `estimate`: advantages and returns for a whole training batch, some prompts at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_train.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageEstimator
from skyrl_train.algorithms.inputs import AdvantageInputs
from skyrl_train.algorithms.losses.checks import check_advantage_output, needed, require_finite
from skyrl_train.algorithms.losses.kl import token_kl
from skyrl_train.batch import TrainingInputBatch, component_column, token_positions, whiten
from skyrl_train.batch.steps import tokens_with_loss
from skyrl_train.config.algorithm import AlgorithmConfig, estimator_reads, starts_at_rollout
from skyrl_train.errors import BatchError
from skyrl_train.registry import part_name

MAX_PADDED_TOKENS = 2**22
"""Positions that are padded at once, so that one long row does not widen all others. Results do not depend on it."""


def estimate_advantages(
    batch: TrainingInputBatch, config: AlgorithmConfig, *, kl_reward_coef: float | None = None
) -> TrainingInputBatch:
    """Return the batch with columns `advantages` and `returns`, in the dtype of `rewards`; other columns stay as they are.

    With a weight above 0, `kl_reward_coef` times the KL to the reference is taken from each trained token's reward
    before advantages are estimated (the column `rewards` keeps what the environment gave). None means the configured
    weight; an adaptive controller passes its own.

    Raises ConfigError for an unknown estimator; BatchError for malformed columns, naming column and row, and for
    log-probabilities of the rollout that are missing or not finite where the loss needs them.
    """
    estimator: AdvantageEstimator = ADVANTAGE_ESTIMATORS.resolve(config.advantage_estimator)
    coef = config.kl_reward_coef if kl_reward_coef is None else kl_reward_coef
    read = batch.without_columns(*_unread_columns(config, coef))
    kept = _tokens_that_count(batch, config)
    try:
        found = _estimate(estimator, _of_tokens(read, kept), config, coef)
    except BatchError:
        if len(kept) == batch.num_tokens:
            raise
        kept = torch.arange(batch.num_tokens, device=kept.device)
        found = _estimate(estimator, read, config, coef)  # raises it again, with positions in the whole row
    advantages, returns = batch["rewards"].new_zeros(2, batch.num_tokens)
    advantages[kept], returns[kept] = found.advantages * found.scale, found.returns
    if bool(found.to_whiten.any()):
        to_whiten = torch.zeros_like(batch["loss_mask"])
        to_whiten[kept] = found.to_whiten
        advantages = torch.where(to_whiten, whiten(advantages, tokens_with_loss(batch)), advantages)
    return batch.with_columns(advantages=advantages, returns=returns)


@dataclass(frozen=True, kw_only=True)
class _Estimated:
    """What an estimator's answer becomes: flat columns `[num_tokens]` and how they are scaled."""

    advantages: Tensor
    returns: Tensor
    to_whiten: Tensor
    scale: float
    """Factor on all advantages."""


def _estimate(
    estimator: AdvantageEstimator, batch: TrainingInputBatch, config: AlgorithmConfig, kl_reward_coef: float
) -> _Estimated:
    advantages = torch.zeros_like(batch["rewards"])
    returns = torch.zeros_like(advantages)
    to_whiten = torch.zeros_like(batch["loss_mask"])
    counts = torch.zeros(2, dtype=torch.float64)
    for rows in groups_of_whole_prompts(batch["prompt_index"], batch.lengths):
        part = batch.take(rows)
        inputs = advantage_inputs(part, config, kl_reward_coef=kl_reward_coef)
        _check_rollout_logprobs(part, inputs, config)
        output = estimator(inputs, config)
        check_advantage_output(output, inputs, part_name(config.advantage_estimator))
        positions = token_positions(batch.row_offsets, rows)
        advantages[positions] = part.from_padded(output.advantages).to(advantages.dtype)
        returns[positions] = part.from_padded(output.returns).to(returns.dtype)
        if output.whiten_over_batch is not None:
            to_whiten[positions] = part.from_padded(output.whiten_over_batch)
        if output.scale_over_batch is not None:
            counts += torch.tensor(output.scale_over_batch, dtype=torch.float64)
    scale = float(counts[0] / counts[1]) if counts[1] > 0 else 1.0
    return _Estimated(advantages=advantages, returns=returns, to_whiten=to_whiten, scale=scale)


def _tokens_that_count(batch: TrainingInputBatch, config: AlgorithmConfig) -> Tensor:
    """Return int64: tokens that were sampled or have a reward, the token after each, which tells turns apart, and each
    row's first.

    The others are most of a batch with one row per turn; an estimator that reads them, too, declares it.
    """
    reads = estimator_reads(config)
    if reads.every_token or not reads.declared:
        return torch.arange(batch.num_tokens, device=batch.row_offsets.device)
    counts = batch["loss_mask"] | (batch["rewards"] != 0)
    if "response_mask" in batch:
        counts |= batch["response_mask"]
    counts[1:] |= counts[:-1].clone()
    counts[batch.row_offsets[:-1]] = True
    return counts.nonzero().squeeze(1)


def _of_tokens(batch: TrainingInputBatch, kept: Tensor) -> TrainingInputBatch:
    """Return the rows with these tokens alone, at least one of each row."""
    if len(kept) == batch.num_tokens:
        return batch
    return TrainingInputBatch(
        token_columns={name: column[kept] for name, column in batch.token_columns.items()},
        row_columns=batch.row_columns,
        row_offsets=torch.searchsorted(kept, batch.row_offsets),
        metadata=batch.metadata.of_rows(batch.metadata.uids),
    )


def _unread_columns(config: AlgorithmConfig, kl_reward_coef: float) -> list[str]:
    """Return the optional columns that neither the estimator nor a check reads: they are most of what a group would
    copy and pad.
    """
    optional = ["rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "sum_pi_squared", "weight_version"]
    reads = estimator_reads(config)
    if not reads.declared:
        return []
    read = set(reads.columns)
    if kl_reward_coef > 0:
        read |= {"old_logprobs", "ref_logprobs"}
    if _needs_rollout_logprobs(config):
        read.add("rollout_logprobs")
    return [name for name in optional if name not in read]


def _needs_rollout_logprobs(config: AlgorithmConfig) -> bool:
    return config.off_policy.enabled or config.proximal == "behaviour" or starts_at_rollout(config)


def advantage_inputs(
    batch: TrainingInputBatch, config: AlgorithmConfig, *, kl_reward_coef: float = 0.0
) -> AdvantageInputs:
    """Return the padded view that estimators take, with the KL penalty in the rewards where its weight is above 0."""

    def padded(name: str) -> Tensor | None:
        return batch.padded(name) if name in batch else None

    components = [name for name in map(component_column, config.reward_components) if name in batch]
    rewards, loss_mask = batch.padded("rewards"), batch.padded("loss_mask")
    old_logprobs, ref_logprobs = padded("old_logprobs"), padded("ref_logprobs")
    if kl_reward_coef > 0:
        old, ref = needed("old_logprobs", old_logprobs), needed("ref_logprobs", ref_logprobs)
        trained = loss_mask & ~batch["is_padding"].unsqueeze(1)
        penalty = kl_reward_coef * token_kl(config.kl_estimator, old.double(), ref.double(), trained)
        rewards = (rewards.double() - penalty).to(rewards.dtype)
    return AdvantageInputs(
        rewards=rewards,
        loss_mask=loss_mask,
        prompt_index=batch["prompt_index"],
        trajectory_index=batch["trajectory_index"],
        step_index=batch["step_index"],
        is_last_step=batch["is_last_step"],
        is_padding=batch["is_padding"],
        values=padded("values"),
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        response_mask=padded("response_mask"),
        sum_pi_squared=padded("sum_pi_squared"),
        greedy_rewards=batch.row_columns.get("greedy_rewards"),
        reward_components=torch.stack([batch[name] for name in components], dim=1) if components else None,
    )


def _check_rollout_logprobs(batch: TrainingInputBatch, inputs: AdvantageInputs, config: AlgorithmConfig) -> None:
    if _needs_rollout_logprobs(config):
        rollout = needed("rollout_logprobs", batch.padded("rollout_logprobs") if "rollout_logprobs" in batch else None)
        require_finite("rollout_logprobs", rollout, inputs.loss_mask & ~inputs.is_padding.unsqueeze(1), inputs)


def groups_of_whole_prompts(
    prompt_index: Tensor, lengths: Tensor, *, max_padded_tokens: int = MAX_PADDED_TOKENS
) -> Iterator[Tensor]:
    """Yield row indices `[n]`, all rows of a prompt together; rows x longest row stays under the cap where prompts allow."""
    order = torch.argsort(prompt_index, stable=True)
    counts = torch.unique_consecutive(prompt_index[order], return_counts=True)[1]
    group: list[Tensor] = []
    num_rows = longest = 0
    for rows in torch.split(order, counts.tolist()):
        own = int(lengths[rows].max())
        if group and (num_rows + len(rows)) * max(longest, own) > max_padded_tokens:
            yield torch.cat(group)
            group, num_rows, longest = [], 0, 0
        group.append(rows)
        num_rows, longest = num_rows + len(rows), max(longest, own)
    if group:
        yield torch.cat(group)
