"""What one pass over real or assumed lengths would compute: micro-batches, padding, what is shared, balance. No torch."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from skyrl_train.batch import Rows
from skyrl_train.batch.layouts import CostModel, common_prefix
from skyrl_train.batch.planner import (
    DocumentStep,
    RowFacts,
    TokenBudgets,
    computed_tokens,
    document_steps,
    make_micro_batch_strategy,
    rows_over,
    shard_rows,
    training_limit,
)
from skyrl_train.config import TrainerConfig
from skyrl_train.config.fields import LayoutChoice
from skyrl_train.config.models import GeneratorConfig
from skyrl_train.plan.batch_plan import BatchPlan, LearnerPlan, ceil_div
from skyrl_train.system import derive_seed
from skyrl_train.types import RolloutBatch

ASSUMED_TRAJECTORIES = 4096
"""Drawn for a guess of the lengths."""


@dataclass(frozen=True, kw_only=True)
class RowLengths:
    """Tokens of the training rows of a number of trajectories."""

    trajectories: tuple[Rows, ...]
    """The lengths of each trajectory's rows: one, or one per turn."""
    source: str
    """Where they come from, for the reader of the plan."""
    shared: tuple[Rows, ...] = ()
    """For each row, how many first tokens the row before it in its trajectory has too, and of a trajectory's first row
    the length of its prompt; empty where that is not known."""
    prompts: tuple[tuple[int, ...], ...] = ()
    """Which trajectories are samples of one prompt; empty where that is not known."""

    def draw(
        self,
        rng: np.random.Generator,
        *,
        num_trajectories: int,
        samples: int,
        layout: LayoutChoice,
        merge_turns: bool,
    ) -> RowFacts:
        """The facts of the rows of so many trajectories, in groups of `samples` of a prompt where prompts are known.

        Rows are in an order in which neighbours share: a turn extends the one before, and the trajectories of a prompt
        have that in common.
        """
        if self.prompts:
            chosen = rng.integers(0, len(self.prompts), ceil_div(num_trajectories, samples)).tolist()
            groups = [
                np.sort(rng.choice(members, samples, replace=len(members) < samples))
                for members in map(self.prompts.__getitem__, chosen)
            ]
            drawn = np.concatenate(groups)[:num_trajectories].tolist()
        else:
            drawn = rng.integers(0, len(self.trajectories), num_trajectories).tolist()
        sizes = np.array([len(self.trajectories[index]) for index in drawn])
        lengths = np.concatenate([self.trajectories[index] for index in drawn])
        shared = np.concatenate([self.shared[index] for index in drawn]) if self.shared else np.zeros_like(lengths)
        firsts = np.cumsum(sizes) - sizes
        is_first = np.zeros(len(lengths), dtype=bool)
        is_first[firsts] = True
        before = np.concatenate([[-1], lengths[:-1]])
        extends = ~is_first & (shared > 0) & (shared == before)
        trajectories = np.repeat(np.arange(len(drawn)), sizes)
        prompts = trajectories // samples
        in_common = np.where(extends, before, np.repeat(shared[firsts], sizes))
        in_common[np.diff(prompts, prepend=-1) != 0] = 0
        numbers = np.arange(len(lengths))
        # The last of a run of turns that extend one another computes the run.
        last = np.flatnonzero(np.append(~extends[1:], True))
        return RowFacts(
            lengths=lengths,
            loss_tokens=lengths - 1,
            prompts=prompts,
            trajectories=trajectories,
            order=numbers,
            shared=in_common if layout in ("prefix_shared", "auto") else np.zeros_like(lengths),
            hosts=last[np.searchsorted(last, numbers)] if merge_turns else numbers,
            layout=layout,
        )

    @property
    def all_rows(self) -> Rows:
        return np.concatenate(self.trajectories)


@dataclass(frozen=True, kw_only=True)
class PassEstimate:
    """One optimizer step of one model (of the reference: one scoring of a batch), as it would be computed."""

    role: str
    training: bool
    num_rows: int
    dummy_rows: int
    num_tokens: int
    layout: str
    """The first rank's; `auto` chooses for each."""
    distinct_tokens: int
    """Positions that one rank without a cap would compute: each shared prefix once, no padding."""
    computed_tokens: int
    """Positions over all ranks, padding included, and prefixes where they are computed again."""
    micro_batches_per_rank: int
    """The micro-batches of the rank with the most; the others run dummies to keep step."""
    largest_micro_batch_tokens: int
    """Computed by the largest forward."""
    load_max_over_mean: float
    """Work of the busiest rank over the mean: how much longer all wait for it."""
    rows_over_cap: int
    """Rows that exceed the token budget by themselves and go alone."""
    first_come_padding: float
    """Padding's share of what is computed with `fixed` micro-batches in the order of arrival, for comparison."""
    document_steps: tuple[DocumentStep, ...] = ()
    """With `docs_per_step`, the optimizer steps of one training batch of such rows."""

    @property
    def padding(self) -> float:
        """Share of what is computed beyond the rows' tokens; 0 where fewer positions than tokens are."""
        return max(0.0, 1 - self.num_tokens / self.computed_tokens)


def recorded_lengths(rollouts: Iterable[RolloutBatch], *, step_wise: bool, source: str) -> RowLengths:
    """The row lengths of recorded rollouts; failed trajectories are left out. Raises ValueError where none is left."""
    trajectories: list[Rows] = []
    shared: list[Rows] = []
    prompts: list[list[int]] = []
    for batch in rollouts:
        of_prompt: dict[str, list[int]] = {}
        for trajectory in batch.trajectories:
            if trajectory.turns and not trajectory.failed:
                of_prompt.setdefault(trajectory.prompt_uid, []).append(len(trajectories))
                rows = trajectory.contexts()
                lengths = np.array([len(row) for row in rows], dtype=np.int64)
                common = [
                    trajectory.prompt_lengths()[0],
                    *(common_prefix(left, right) for left, right in pairwise(rows)),
                ]
                trajectories.append(lengths if step_wise else lengths[-1:])
                shared.append(np.array(common if step_wise else common[:1], dtype=np.int64))
        prompts += of_prompt.values()
    if not trajectories:
        raise ValueError(f"{source}: every trajectory failed, so there are no lengths to plan with")
    return RowLengths(
        trajectories=tuple(trajectories),
        source=source,
        shared=tuple(shared),
        prompts=tuple(map(tuple, prompts)),
    )


def assumed_lengths(generator: GeneratorConfig, *, seed: int, max_prompt_length: int) -> RowLengths:
    """A long-tailed guess for a run that has not been made: prompts of half to all of `max_prompt_length`, responses
    log-normal around a third of `max_generate_length` (sigma 0.9) and cut there, observations an eighth of it, one to
    `max_turns` turns with equal chances, everything cut at `max_context_length`. The samples of a prompt share it, and
    each turn extends the one before.
    """
    return _assumed_lengths(
        samples=generator.n_samples_per_prompt,
        longest=generator.sampling.max_generate_length,
        max_turns=generator.max_turns,
        max_context_length=generator.max_context_length,
        max_prompt_length=max_prompt_length,
        is_step_wise=generator.is_step_wise,
        seed=seed,
    )


@functools.lru_cache(maxsize=8)
def _assumed_lengths(
    *,
    samples: int,
    longest: int,
    max_turns: int,
    max_context_length: int,
    max_prompt_length: int,
    is_step_wise: bool,
    seed: int,
) -> RowLengths:
    """Draw them once: 4,096 trajectories take a tenth of a second, and a search for a form asks at each step."""
    rng = np.random.default_rng(derive_seed(seed, "assumed_lengths"))
    trajectories: list[Rows] = []
    shared: list[Rows] = []
    prompt = 0
    for number in range(ASSUMED_TRAJECTORIES):
        turns = int(rng.integers(1, max_turns + 1))
        if number % samples == 0:
            prompt = int(rng.integers(max(1, max_prompt_length // 2), max_prompt_length + 1))
        responses = np.clip(longest / 3 * np.exp(0.9 * rng.standard_normal(turns)), 1, longest).astype(np.int64)
        observed = rng.integers(1, max(2, longest // 4), turns)
        ends = np.minimum(prompt + np.cumsum(responses + observed) - observed, max_context_length)
        within = max(1, int((np.diff(ends, prepend=0) > 0).sum()))
        rows = ends[:within] if is_step_wise else ends[within - 1 : within]
        trajectories.append(rows)
        shared.append(np.concatenate([[min(prompt, int(rows[0]))], rows[:-1]]))
    for each in (*trajectories, *shared):
        each.setflags(write=False)  # all who ask have the same ones
    share = f"up to {max_prompt_length} prompt and {longest} response tokens, 1 to {max_turns} turns"
    numbers = range(0, ASSUMED_TRAJECTORIES, samples)
    return RowLengths(
        trajectories=tuple(trajectories),
        source=f"assumed: long-tailed, {share}",
        shared=tuple(shared),
        prompts=tuple(tuple(range(first, min(first + samples, ASSUMED_TRAJECTORIES))) for first in numbers),
    )


def sampled_lengths(lengths: RowLengths) -> tuple[Rows, Rows]:
    """Return the tokens of each trajectory's prompt, and all that come after it in its last row."""
    prompts = np.array([int(shared[0]) for shared in lengths.shared])
    return prompts, np.array([int(rows[-1]) for rows in lengths.trajectories]) - prompts


def estimate_passes(
    plan: BatchPlan,
    lengths: RowLengths,
    *,
    trainer: TrainerConfig,
    generator: GeneratorConfig,
    seed: int,
    costs: Mapping[str, CostModel] | None = None,
    budgets: Mapping[str, TokenBudgets] | None = None,
) -> list[PassEstimate]:
    """One optimizer step of each model that learns, and one scoring by the reference.

    Args:
        costs: By role, where known.
        budgets: By role, of micro-batches that size themselves, where it is known what fits the memory.
    """
    return [
        _estimate_pass(
            plan,
            learner,
            lengths,
            trainer,
            generator,
            seed,
            cost=(costs or {}).get(learner.role) or CostModel(),
            budgets=(budgets or {}).get(learner.role),
        )
        for learner in plan.learners
    ]


def _estimate_pass(
    plan: BatchPlan,
    learner: LearnerPlan,
    lengths: RowLengths,
    trainer: TrainerConfig,
    generator: GeneratorConfig,
    seed: int,
    *,
    cost: CostModel,
    budgets: TokenBudgets | None,
) -> PassEstimate:
    """Deals and cuts one pass over trajectories drawn from `lengths` (with a derived seed), and says where the optimizer
    steps of one training batch close that count documents."""
    ranks, training = learner.data_parallel_size, learner.role != "reference"
    merge_turns = generator.merge_stepwise == "auto"

    def draw(seed: int, num_trajectories: int, layout: LayoutChoice, *, merge_turns: bool) -> RowFacts:
        return lengths.draw(
            np.random.default_rng(seed),
            num_trajectories=num_trajectories,
            samples=generator.n_samples_per_prompt,
            layout=layout,
            merge_turns=merge_turns,
        )

    rows = draw(
        derive_seed(seed, "estimate", ranks), learner.sequences_per_pass, trainer.layout, merge_turns=merge_turns
    )
    dealt, loads = shard_rows(rows, ranks, cost)
    planner = make_micro_batch_strategy(trainer, merge_turns=merge_turns, cost=cost)
    planner = planner if budgets is None else planner.under(budgets)
    layout, positions = "", []
    for share in map(rows.take, dealt):
        forwards = planner.forwards_of(share, training=training)
        layout = layout or str(forwards[0].layout)
        positions.append([share.positions(forward.rows, forward.layout) for forward in forwards])
    cap = trainer.max_tokens_per_microbatch if training else trainer.max_tokens_per_forward_microbatch
    limit = trainer.micro_train_batch_size_per_gpu if training else trainer.micro_forward_batch_size_per_gpu
    # The same rows in the order in which they came, so many at a time.
    by_arrival = np.split(rows.lengths, range(limit, rows.num_rows, limit))
    first_come = sum(computed_tokens(part, padded=True) for part in by_arrival)
    steps: list[DocumentStep] = []
    if trainer.docs_per_step and training:
        batch = draw(derive_seed(seed, "documents"), plan.num_samples_per_batch, "packed", merge_turns=False)
        steps = document_steps(
            batch.lengths,
            batch.trajectories,
            batch.loss_tokens > 0,
            docs_per_step=trainer.docs_per_step,
            num_ranks=learner.data_parallel_size,
            admits=training_limit(trainer),
            exact=trainer.docs_per_step_exact,
        )
    return PassEstimate(
        role=learner.role,
        training=training,
        num_rows=rows.num_rows,
        dummy_rows=sum(map(len, dealt)) - rows.num_rows,
        num_tokens=int(rows.lengths.sum()),
        layout=layout,
        distinct_tokens=rows.num_distinct,
        computed_tokens=sum(map(sum, positions)),
        micro_batches_per_rank=max(map(len, positions)),
        largest_micro_batch_tokens=max(map(max, positions)),
        load_max_over_mean=float(loads.max() / loads.mean()),
        rows_over_cap=rows_over(rows.lengths, cap) if trainer.micro_batching == "token_budget" else 0,
        first_come_padding=1 - int(rows.lengths.sum()) / first_come,
        document_steps=tuple(steps),
    )
