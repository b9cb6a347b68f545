"""Random rollouts, the ways in which one optimizer step over them may be laid out, and the step's gradient.

The law: the gradient is a function of the set of trajectories alone. Everything here is float64 on a model of two
layers, where only the order of summation is left to differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from skyrl_train.algorithms import with_step_columns
from skyrl_train.algorithms.losses import PolicyLossInputs, ValueLossInputs, policy_loss, token_kl, value_loss
from skyrl_train.batch import TrainingInputBatch
from skyrl_train.batch.planner import (
    Forward,
    MemoryAwareBatchIterator,
    RowFacts,
    TokenBudgets,
    make_micro_batch_strategy,
    token_budget,
)
from skyrl_train.batch.steps import MiniBatch, close_mini_batch, stage
from skyrl_train.config import Config, TrainerConfig
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.models import ModelConfig, OptimizerConfig
from skyrl_train.learner import ModelEngine, PolicyLearner
from skyrl_train.runs import assembler
from skyrl_train.types import (
    Failure,
    FailureKind,
    Outcome,
    Prompt,
    RolloutBatch,
    StopReason,
    Trajectory,
    Turn,
    VersionRun,
    token_ids,
)
from tests.support.layout_cases import Regime, on_policy

VOCABULARY = 50
TOLERANCE = 1e-10

ROWS = ("per_trajectory", "per_turn")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a step is laid out. The defaults are the plainest: rows in order, one rank, one forward."""

    step_wise: bool = False
    """One row per turn instead of one per trajectory."""
    order_seed: int | None = None
    """Shuffles the rows before the mini-batch is closed."""
    dummy_rows: int = 0
    """Added before the mini-batch is closed; staging adds its own after."""
    dp_size: int = 1
    micro_batching: str = "fixed"
    rows: int = 1000
    tokens: int = 100_000
    packed: bool = False
    """A token budget of the sum of lengths instead of rows times the longest."""

    def strategy(self) -> MemoryAwareBatchIterator:
        if self.packed and self.micro_batching == "token_budget":
            budgets = TokenBudgets(training=self.tokens, forward=TrainerConfig().max_tokens_per_forward_microbatch)
            return MemoryAwareBatchIterator(budgets, plan=by_sum_of_lengths)
        return make_micro_batch_strategy(
            TrainerConfig(
                micro_batching=self.micro_batching,
                micro_train_batch_size_per_gpu=self.rows,
                max_tokens_per_microbatch=self.tokens,
            )
        )


def by_sum_of_lengths(rows: RowFacts) -> list[Forward]:
    """A planner: padded forwards of rows that would fit the budget packed."""
    return [Forward(forward.rows) for forward in token_budget(replace(rows, layout="packed"))]


def layouts() -> st.SearchStrategy[Layout]:
    """Any layout."""
    return st.builds(
        Layout,
        step_wise=st.booleans(),
        order_seed=st.one_of(st.none(), st.integers(0, 99)),
        dummy_rows=st.integers(0, 3),
        dp_size=st.integers(1, 8),
        micro_batching=st.sampled_from(["fixed", "token_budget"]),
        rows=st.integers(1, 5),
        tokens=st.integers(1, 120),
        packed=st.booleans(),
    )


@st.composite
def rollouts(draw: st.DrawFn, *, min_observation: int = 1) -> RolloutBatch:
    """One to three prompts: groups with failures, one to three turns, one-token responses, masked observations, a tail.

    At least one trajectory did not fail. Between two turns lie at least `min_observation` tokens: a chat template puts
    some there, and by them a loss that looks at whole turns tells where one ends.
    """
    num_prompts, num_samples = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    trajectories = []
    for prompt in range(num_prompts):
        start = _tokens(rng, int(rng.integers(1, 6)))
        for sample in range(num_samples):
            fails = draw(st.sampled_from([False, False, False, True])) and len(trajectories) > 0
            trajectories.append(
                _trajectory(
                    rng,
                    f"p{prompt}",
                    sample,
                    start,
                    draw(st.integers(1, 3)),
                    failed=fails,
                    min_observation=min_observation,
                )
            )
    prompts = tuple(Prompt(uid=f"p{index}", messages=()) for index in range(num_prompts))
    return RolloutBatch(prompts=prompts, trajectories=tuple(trajectories), n_samples_per_prompt=num_samples)


def fixed_rollouts(seed: int = 0) -> RolloutBatch:
    """Four prompts of two samples with one to three turns, one of them failed: always the same for a seed."""
    rng = np.random.default_rng(seed)
    trajectories = []
    for prompt in range(4):
        start = _tokens(rng, 2 + prompt)
        for sample in range(2):
            failed = (prompt, sample) == (1, 1)
            trajectories.append(_trajectory(rng, f"p{prompt}", sample, start, 1 + (prompt + sample) % 3, failed=failed))
    prompts = tuple(Prompt(uid=f"p{index}", messages=()) for index in range(4))
    return RolloutBatch(prompts=prompts, trajectories=tuple(trajectories), n_samples_per_prompt=2)


def _tokens(rng: np.random.Generator, count: int) -> tuple[int, ...]:
    return tuple(int(token) for token in rng.integers(3, VOCABULARY, count))


def _trajectory(
    rng: np.random.Generator,
    uid: str,
    sample: int,
    start: tuple[int, ...],
    num_turns: int,
    *,
    failed: bool,
    min_observation: int = 1,
) -> Trajectory:
    turns: list[Turn] = []
    added = start
    for _ in range(num_turns):
        length = int(rng.choice([1, 2, 4, 7, 25], p=[0.3, 0.2, 0.2, 0.2, 0.1]))
        response = _tokens(rng, length)
        turns.append(
            Turn(
                parent=len(turns) - 1 if turns else None,
                added_token_ids=token_ids(added),
                response_token_ids=token_ids(response),
                response_logprobs=rng.normal(-4.0, 0.3, length).astype(np.float32),
                response_text="",
                reward=float(rng.integers(0, 2)),
                stop_reason=StopReason.STOP,
                weight_versions=(VersionRun(0, 0),),
            )
        )
        added = _tokens(rng, int(rng.integers(min_observation, 4)))
    failure = Failure(kind=FailureKind.ENVIRONMENT_ERROR, message="", turn_index=0) if failed else None
    outcome = Outcome.FAILED if failed else Outcome.DONE
    return Trajectory(prompt_uid=uid, sample_index=sample, turns=tuple(turns), outcome=outcome, failure=failure)


def scored_batch(batch_of: RolloutBatch, *, step_wise: bool) -> TrainingInputBatch:
    """The assembled batch, with every column that losses read. A token has the same numbers in either form."""
    size = len(batch_of.prompts)
    config = Config(
        trainer=TrainerConfig(
            train_batch_size=size,
            policy_mini_batch_size=size,
            critic_mini_batch_size=size,
            moe_routing_replay=any(len(turn.routed_experts) for each in batch_of.trajectories for turn in each.turns),
        )
    )
    batch = assembler(config, rows=ROWS[step_wise])(batch_of, step=1, weight_version=1)
    longest = max(len(t.contexts()[-1]) for t in batch_of.trajectories)
    position = torch.cat([torch.arange(length) for length in batch.lengths.tolist()])
    trajectory = torch.repeat_interleave(batch["trajectory_index"].long(), batch.lengths)
    generator = torch.Generator().manual_seed(0)
    columns = {}
    for name, offset, scale in (
        ("old_logprobs", -4.0, 0.3),
        ("ref_logprobs", -4.0, 0.3),
        ("rollout_logprobs", -4.0, 0.3),
        ("advantages", 0.0, 1.0),
        ("values", 0.0, 1.0),
        ("returns", 0.0, 1.0),
    ):
        shape = (len(batch_of.trajectories), longest + 1)
        table = offset + scale * torch.randn(shape, generator=generator, dtype=torch.float64)
        columns[name] = torch.where(batch["loss_mask"], table[trajectory, position], 0.0)
    return batch.with_columns(**columns)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What is computed, apart from how."""

    algorithm: AlgorithmConfig
    """Its `loss_reduction` and `normalize_advantages` count too."""

    def close(self, batch: TrainingInputBatch) -> MiniBatch:
        return close_mini_batch(
            batch,
            loss_reduction=self.algorithm.loss_reduction,
            max_sequence_length_for_norm=self.algorithm.max_sequence_length_for_norm,
            normalize_advantages=self.algorithm.normalize_advantages,
        )


Rescore = Callable[[TrainingInputBatch], TrainingInputBatch]


def closed(step: Step, batch_of: RolloutBatch, layout: Layout, rescore: Rescore = lambda batch: batch) -> MiniBatch:
    """The mini-batch with its rows ordered and padded as the layout says, scored again before it is closed."""
    batch = scored_batch(batch_of, step_wise=layout.step_wise)
    if layout.order_seed is not None:
        order = torch.randperm(batch.num_rows, generator=torch.Generator().manual_seed(layout.order_seed))
        batch = batch.take(order)
    return step.close(rescore(batch.pad_rows(layout.dummy_rows)))


def learner_of(model: nn.Module, step: Step, layout: Layout) -> PolicyLearner:
    engine = ModelEngine(
        model,  # type: ignore[arg-type]
        name="policy",
        micro_batching=layout.strategy(),
        optimizer=OptimizerConfig(),
    )
    return PolicyLearner(engine, model=ModelConfig(), algorithm=step.algorithm, temperature=1.0)


def rescoring(model: nn.Module, step: Step, batch_of: RolloutBatch, layout: Layout, regime: Regime) -> Rescore:
    """What gives a batch of these rollouts the columns of this regime."""
    if regime == "drawn":
        return lambda batch: batch
    if regime == "own":
        learner = learner_of(model, step, layout)

        def scored_by_layout(batch: TrainingInputBatch) -> TrainingInputBatch:
            staged = stage(batch, layout.dp_size)
            return on_policy(batch, staged.collect([learner.forward(shard) for shard in staged.shards]))

        return scored_by_layout
    plain = scored_batch(batch_of, step_wise=False)
    scores = learner_of(model, step, Layout()).forward(plain)
    trajectory, position = _places(plain)
    table = scores.new_zeros(len(batch_of.trajectories), int(position.max()) + 1)
    table[trajectory, position] = scores

    def scored_once(batch: TrainingInputBatch) -> TrainingInputBatch:
        trajectory, position = _places(batch)
        return on_policy(batch, torch.where(batch["loss_mask"], table[trajectory, position], 0.0))

    return scored_once


def _places(batch: TrainingInputBatch) -> tuple[Tensor, Tensor]:
    """Trajectory and position of each token; dummy rows are told as the last trajectory's."""
    position = torch.cat([torch.arange(length) for length in batch.lengths.tolist()])
    return torch.repeat_interleave(batch["trajectory_index"].long(), batch.lengths), position


def learner_gradient(
    model: nn.Module, step: Step, batch_of: RolloutBatch, layout: Layout = Layout(), regime: Regime = "drawn"
) -> Tensor:
    """By the learner that trains: each rank's shard is cut and computed on its own, and the gradients add up."""
    mini_batch = closed(step, batch_of, layout, rescoring(model, step, batch_of, layout, regime))
    learner = learner_of(model, step, layout)
    learner.engine.zero_grad()
    scores = {"logprobs": learner.forward, "entropy": lambda batch: learner.forward_with_entropy(batch)[:, 1]}
    rows, _ = with_step_columns(mini_batch.batch, step.algorithm, lambda what, batch: scores[what](batch))
    for shard in stage(rows, layout.dp_size).shards:
        learner.forward_backward(replace(mini_batch, batch=shard))
    return flat_gradient(model)


def plain_gradient(
    model: nn.Module, step: Step, batch_of: RolloutBatch, layout: Layout = Layout(), regime: Regime = "drawn"
) -> Tensor:
    """The same written out: full logits of every row, dummy rows and dummy micro-batches computed, a value term
    added."""
    mini_batch = closed(step, batch_of, layout, rescoring(model, step, batch_of, layout, regime))
    shards = stage(mini_batch.batch, layout.dp_size).shards
    counts = [len(layout.strategy().forwards(shard, training=True)) for shard in shards]
    model.zero_grad(set_to_none=True)
    for shard in shards:
        for micro_batch in layout.strategy().iterate(shard, training=True, agree=lambda _: max(counts)):
            plain_loss(model, step.algorithm, micro_batch.batch).backward()  # type: ignore[no-untyped-call]
    return flat_gradient(model)


def plain_loss(model: nn.Module, algorithm: AlgorithmConfig, rows: TrainingInputBatch) -> Tensor:
    """The rows' share of policy, KL, entropy and value terms: `sum(loss_weights * ...)`."""
    ids, mask, weights = rows.padded("input_ids").long(), rows.padded("loss_mask"), rows.padded("loss_weights")
    log_probs = model(input_ids=ids).logits.log_softmax(-1)
    log_probs = torch.cat([torch.zeros_like(log_probs[:, :1]), log_probs[:, :-1]], dim=1)
    scores = log_probs.gather(-1, ids[..., None]).squeeze(-1)
    entropy = torch.where(mask, -(log_probs.exp() * log_probs).sum(-1), 0.0)
    inputs = PolicyLossInputs(
        logprobs=scores,
        old_logprobs=rows.padded("old_logprobs"),
        advantages=rows.padded("advantages"),
        loss_mask=mask,
        rollout_logprobs=rows.padded("rollout_logprobs"),
    )
    value_inputs = ValueLossInputs(
        values=log_probs[..., 0], old_values=rows.padded("values"), returns=rows.padded("returns"), loss_mask=mask
    )
    terms = (
        policy_loss(inputs, algorithm).token_losses
        + algorithm.kl_loss_coef * token_kl(algorithm.kl_estimator, scores, rows.padded("ref_logprobs"), mask)
        - algorithm.entropy_coef * entropy
        + value_loss(value_inputs, algorithm).token_losses
    )
    return (weights * terms).sum()


def flat_gradient(model: nn.Module) -> Tensor:
    """All gradients in one vector, and none left behind."""
    found = [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return torch.cat(found)


def assert_same_gradient(found: Tensor, expected: Tensor) -> None:
    """Within 1e-10 of the expected one's length, which is not 0."""
    assert float(expected.norm()) > 0
    difference = float((found - expected).norm() / expected.norm())
    assert difference < TOLERANCE, f"the gradients differ by {difference:.1e} of their length"


ALL_DIFFERENT: Sequence[Layout] = (
    Layout(rows=1),
    Layout(rows=3, order_seed=1),
    Layout(micro_batching="token_budget", tokens=30),
    Layout(micro_batching="token_budget", tokens=40, packed=True, order_seed=2),
    Layout(dp_size=3, rows=2),
    Layout(dp_size=8, dummy_rows=3),
    Layout(step_wise=True),
    Layout(step_wise=True, dp_size=4, rows=2, order_seed=3, dummy_rows=1),
)
"""One of each kind, for tests that cannot draw."""
