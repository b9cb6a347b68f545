"""What one pass over real or assumed lengths would compute: micro-batches, padding, balance. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skyrl_train.batch.balance import CostModel, deal_rows
from skyrl_train.batch.microbatch import split_lengths
from skyrl_train.batch.plan import BatchPlan, LearnerPlan
from skyrl_train.batch.token_budget import DUMMY_ROW_LENGTH, Rows, computed_tokens, rows_over
from skyrl_train.config.schema import Config
from skyrl_train.seeding import derive_seed
from skyrl_train.types import RolloutBatch

ASSUMED_TRAJECTORIES = 4096
"""Drawn for a guess of the lengths."""


@dataclass(frozen=True, kw_only=True)
class RowLengths:
    """Tokens of the training rows of a number of trajectories."""

    trajectories: tuple[Rows, ...]
    """Of each trajectory, the lengths of its rows: one, or one per turn."""
    source: str
    """Where they come from, for the reader of the plan."""

    @property
    def all_rows(self) -> Rows:
        return np.concatenate(self.trajectories)

    @property
    def rows_per_trajectory(self) -> float:
        return len(self.all_rows) / len(self.trajectories)


@dataclass(frozen=True, kw_only=True)
class PassEstimate:
    """One optimizer step of one model (of the reference: one scoring of a batch), as it would be computed."""

    role: str
    training: bool
    num_rows: int
    dummy_rows: int
    num_tokens: int
    computed_tokens: int
    """Padding included, over all ranks."""
    micro_batches_per_rank: int
    """Of the rank with the most; the others run dummies to keep step."""
    largest_micro_batch_tokens: int
    """Computed by the largest forward."""
    load_max_over_mean: float
    """Work of the busiest rank over the mean: how much longer all wait for it."""
    rows_over_cap: int
    """Rows that exceed the token budget by themselves and go alone."""
    first_come_padding: float
    """Padding's share of what is computed with `fixed` micro-batches in the order of arrival, for comparison."""

    @property
    def padding(self) -> float:
        """Padding's share of what is computed."""
        return 1 - self.num_tokens / self.computed_tokens


def recorded_lengths(rollouts: Iterable[RolloutBatch], *, step_wise: bool, source: str) -> RowLengths:
    """The row lengths of recorded rollouts; failed trajectories are left out. Raises ValueError where none is left."""
    trajectories = []
    for batch in rollouts:
        for trajectory in batch.trajectories:
            rows = [len(turn.prompt_token_ids) + len(turn.response_token_ids) for turn in trajectory.turns]
            if rows and not trajectory.failed:
                trajectories.append(np.array(rows if step_wise else rows[-1:], dtype=np.int64))
    if not trajectories:
        raise ValueError(f"{source}: every trajectory failed, so there are no lengths to plan with")
    return RowLengths(trajectories=tuple(trajectories), source=source)


def assumed_lengths(config: Config) -> RowLengths:
    """A long-tailed guess for a run that has not been made: prompts of half to all of `max_prompt_length`, responses
    log-normal around a third of `max_generate_length` (sigma 0.9) and cut there, observations an eighth of it, one to
    `max_turns` turns with equal chances, everything cut at `max_context_length`.
    """
    generator = config.generator
    rng = np.random.default_rng(derive_seed(config.seed, "assumed_lengths"))
    longest = generator.sampling.max_generate_length
    trajectories = []
    for _ in range(ASSUMED_TRAJECTORIES):
        turns = int(rng.integers(1, generator.max_turns + 1))
        prompt = int(rng.integers(max(1, config.data.max_prompt_length // 2), config.data.max_prompt_length + 1))
        responses = np.clip(longest / 3 * np.exp(0.9 * rng.standard_normal(turns)), 1, longest).astype(np.int64)
        observed = rng.integers(1, max(2, longest // 4), turns)
        ends = np.minimum(prompt + np.cumsum(responses + observed) - observed, generator.max_context_length)
        within = max(1, int((np.diff(ends, prepend=0) > 0).sum()))
        trajectories.append(ends[:within] if generator.step_wise_trajectories else ends[within - 1 : within])
    share = (
        f"up to {config.data.max_prompt_length} prompt and {longest} response tokens, 1 to {generator.max_turns} turns"
    )
    return RowLengths(trajectories=tuple(trajectories), source=f"assumed: long-tailed, {share}")


def estimate_pass(config: Config, learner: LearnerPlan, lengths: RowLengths, *, training: bool) -> PassEstimate:
    """Deals and cuts one pass over trajectories drawn from `lengths` (with a derived seed)."""
    trainer, ranks = config.trainer, learner.data_parallel_size
    rng = np.random.default_rng(derive_seed(config.seed, "estimate", ranks))
    drawn = rng.integers(0, len(lengths.trajectories), learner.sequences_per_pass)
    rows = np.concatenate([lengths.trajectories[index] for index in drawn.tolist()])
    dummies = -len(rows) % ranks
    padded_rows = np.concatenate([rows, np.full(dummies, DUMMY_ROW_LENGTH, dtype=np.int64)])
    costs = CostModel().of(padded_rows)
    dealt = deal_rows(costs, ranks)
    padded_layout = trainer.layout not in ("packed", "prefix_shared")
    forwards = [
        [padded_rows[shard][part] for part in split_lengths(trainer, padded_rows[shard], training=training)]
        for shard in dealt
    ]
    computed = [[computed_tokens(part, padded=padded_layout) for part in rank] for rank in forwards]
    cap = trainer.max_tokens_per_microbatch if training else trainer.max_tokens_per_forward_microbatch
    loads = costs[dealt].sum(axis=1)
    return PassEstimate(
        role=learner.role,
        training=training,
        num_rows=len(rows),
        dummy_rows=dummies,
        num_tokens=int(rows.sum()),
        computed_tokens=sum(map(sum, computed)),
        micro_batches_per_rank=max(map(len, computed)),
        largest_micro_batch_tokens=max(map(max, computed)),
        load_max_over_mean=float(loads.max() / loads.mean()),
        rows_over_cap=rows_over(rows, cap) if trainer.micro_batching == "token_budget" else 0,
        first_come_padding=_first_come_padding(rows, _fixed_limit(config, training=training)),
    )


def estimate_passes(config: Config, plan: BatchPlan, lengths: RowLengths) -> list[PassEstimate]:
    """One optimizer step of each model that learns, and one scoring by the reference."""
    return [estimate_pass(config, learner, lengths, training=learner.role != "reference") for learner in plan.learners]


def _fixed_limit(config: Config, *, training: bool) -> int:
    trainer = config.trainer
    return trainer.micro_train_batch_size_per_gpu if training else trainer.micro_forward_batch_size_per_gpu


def _first_come_padding(rows: Rows, limit: int) -> float:
    """Padding's share with micro-batches of `limit` rows in the order in which they came."""
    parts: Sequence[NDArray[np.int64]] = np.split(rows, range(limit, len(rows), limit))
    return 1 - int(rows.sum()) / sum(computed_tokens(part, padded=True) for part in parts)
