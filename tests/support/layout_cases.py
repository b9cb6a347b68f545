"""Batches whose rows form uneven prefix trees, and what a learner computes of them under a layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from skyrl_train.batch import BatchMetadata, TrainingInputBatch, offsets_of
from skyrl_train.batch.planner import make_micro_batch_strategy
from skyrl_train.batch.steps import MiniBatch, close_mini_batch
from skyrl_train.config import TrainerConfig
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.fields import LayoutChoice
from skyrl_train.learner import PolicyLearner

VOCABULARY = 50
Row = tuple[list[int], list[bool]]


def tree_batch(seed: int, *, num_prompts: int = 3) -> TrainingInputBatch:
    """Step-wise rows of random trajectories; every row is trained somewhere.

    Prompts begin with the same system tokens or do not. Responses come from two tokens, so that they branch unevenly,
    often after one token, and whole rows repeat. Turns follow an observation, or nothing; some have a prompt that does
    not extend the turn before. Every fourth trajectory failed and is a placeholder.
    """
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    facts: list[tuple[int, int, int, bool, bool]] = []
    for prompt in range(num_prompts):
        start = ([3, 4, 5] if rng.random() < 0.5 else []) + rng.integers(3, 9, rng.integers(1, 6)).tolist()
        for sample in range(int(rng.integers(1, 5))):
            trajectory = prompt * 8 + sample
            if rng.random() < 0.1 and sample:
                rows.append(([0, 0], [False, False]))
                facts.append((prompt, trajectory, 0, False, True))
                continue
            context, num_turns = list(start), int(rng.integers(1, 4))
            for turn in range(num_turns):
                response = rng.integers(40, 42, rng.choice([1, 1, 2, 3, 6])).tolist()
                rows.append((context + response, [False] * len(context) + [True] * len(response)))
                facts.append((prompt, trajectory, turn, turn == num_turns - 1, False))
                context = context + response + rng.integers(9, 12, rng.integers(0, 4)).tolist()
                if rng.random() < 0.3:
                    context = context[:2] + context[3:]
    return batch_of_rows(rows, facts, seed=seed)


def batch_of_rows(
    rows: list[Row], facts: list[tuple[int, int, int, bool, bool]], *, seed: int = 0
) -> TrainingInputBatch:
    """`facts` of each row: prompt, trajectory, step, whether it is the last, whether it is padding. Other columns are
    random numbers of the size they have in training."""
    lengths = torch.tensor([len(tokens) for tokens, _ in rows])
    num_tokens = int(lengths.sum())
    generator = torch.Generator().manual_seed(seed)

    def numbers(scale: float, offset: float = 0.0) -> Tensor:
        return offset + scale * torch.randn(num_tokens, generator=generator, dtype=torch.float64)

    prompt, trajectory, step, last, padding = (list(column) for column in zip(*facts))
    return TrainingInputBatch(
        token_columns={
            "input_ids": torch.tensor([token for tokens, _ in rows for token in tokens], dtype=torch.int32),
            "loss_mask": torch.tensor([scored for _, mask in rows for scored in mask]),
            "rewards": torch.zeros(num_tokens),
            "old_logprobs": numbers(0.3, -4.0),
            "rollout_logprobs": numbers(0.3, -4.0),
            "ref_logprobs": numbers(0.3, -4.0),
            "values": numbers(1.0),
            "advantages": numbers(1.0),
            "returns": numbers(1.0),
        },
        row_columns={
            "prompt_index": torch.tensor(prompt, dtype=torch.int32),
            "trajectory_index": torch.tensor(trajectory, dtype=torch.int32),
            "step_index": torch.tensor(step, dtype=torch.int32),
            "is_last_step": torch.tensor(last),
            "is_padding": torch.tensor(padding),
        },
        row_offsets=offsets_of(lengths),
        metadata=BatchMetadata(uids=tuple(f"p{index}" for index in prompt), global_step=1, weight_version=1),
    )


Regime = Literal["drawn", "shared", "own"]
REGIMES: tuple[Regime, ...] = ("drawn", "shared", "own")
"""Where old, reference and rollout log-probabilities come from: random numbers, as after many updates; or on-policy, as in
the first update after scoring: the model itself, in one plain layout for all, or in each layout by itself."""


def on_policy(batch: TrainingInputBatch, scores: Tensor) -> TrainingInputBatch:
    """The batch as before the first optimizer step: old, reference and rollout log-probabilities are these."""
    return batch.with_columns(old_logprobs=scores, ref_logprobs=scores, rollout_logprobs=scores)


def close(batch: TrainingInputBatch, *, reduction: str = "sequence_mean") -> MiniBatch:
    return close_mini_batch(batch, loss_reduction=reduction, max_sequence_length_for_norm=64)


def use_layout(
    learner: PolicyLearner, layout: LayoutChoice, *, merge: bool = True, rows: int = 1000, tokens: int | None = None
) -> None:
    """Micro-batches of at most so many rows, or tokens where they are given."""
    trainer = TrainerConfig(
        layout=layout,
        micro_batching="fixed" if tokens is None else "token_budget",
        micro_train_batch_size_per_gpu=rows,
        micro_forward_batch_size_per_gpu=rows,
        max_tokens_per_microbatch=tokens or 1,
        max_tokens_per_forward_microbatch=tokens or 1,
    )
    batching = make_micro_batch_strategy(trainer, merge_turns=merge)
    learner.engine.oom_retry.use(micro_batching=batching)


def flat_gradient(learner: PolicyLearner) -> Tensor:
    """All gradients in one vector, and none left behind."""
    parameters = learner.engine.parameters.values()
    found = [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters]
    learner.engine.zero_grad()
    return torch.cat(found)


def distance(found: Tensor, expected: Tensor) -> float:
    """Length of the difference, relative to that of the expected vector, which is not 0."""
    assert float(expected.norm()) > 0
    return float((found - expected).norm() / expected.norm())


TOLERANCE = 1e-10
ALGORITHM = AlgorithmConfig(kl_loss_coef=0.1, entropy_coef=0.02)
LOSS_ARGUMENTS = {"clip_cov": {"share": 0.3, "low": 0.0}, "kl_cov": {"share": 0.3}}


def with_loss(loss: str) -> AlgorithmConfig:
    """`ALGORITHM` with another loss, at arguments that choose some tokens of a short row."""
    return replace(ALGORITHM, policy_loss={"_target_": loss, **LOSS_ARGUMENTS.get(loss, {})})


LAYOUTS = [("padded", True), ("packed", False), ("packed", True), ("prefix_shared", False), ("auto", True)]
"""With and without turns merged."""


def plain(learner: PolicyLearner) -> None:
    """One row at a time, padded, nothing shared."""
    use_layout(learner, "padded", merge=False, rows=1)
