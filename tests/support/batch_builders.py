"""Tiny batches and rollouts for the tests of this folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from skyrl_train.batch import BatchMetadata, TrainingInputBatch, offsets_of
from skyrl_train.config import Config, TrainerConfig
from skyrl_train.config.models import CriticConfig, CriticModelConfig, GeneratorConfig, PlacementConfig
from skyrl_train.types import Failure, FailureKind, Outcome, Prompt, RolloutBatch, Trajectory, Turn
from tests.support import fakes_trainer


def make_batch(rows: Sequence[tuple[str, int, Sequence[int]]], *, prompt_tokens: int = 1) -> TrainingInputBatch:
    """Rows `(uid, trajectory_index, token ids)`; the first `prompt_tokens` of each carry no loss."""
    uids = tuple(uid for uid, _, _ in rows)
    numbers = {uid: number for number, uid in enumerate(dict.fromkeys(uids))}
    lengths = torch.tensor([len(ids) for _, _, ids in rows], dtype=torch.int64)
    position = torch.cat([torch.arange(length) for length in lengths.tolist()] or [torch.zeros(0)])
    trajectory = torch.tensor([index for _, index, _ in rows], dtype=torch.int32)
    steps = torch.tensor([sum(t == index for _, t, _ in rows[:i]) for i, (_, index, _) in enumerate(rows)])
    return TrainingInputBatch(
        token_columns={
            "input_ids": torch.tensor([token for _, _, ids in rows for token in ids], dtype=torch.int32),
            "loss_mask": position >= prompt_tokens,
            "rewards": torch.zeros(int(lengths.sum())),
        },
        row_columns={
            "prompt_index": torch.tensor([numbers[uid] for uid in uids], dtype=torch.int32),
            "trajectory_index": trajectory,
            "step_index": steps.to(torch.int32),
            "is_last_step": torch.tensor(
                [all(t != index for _, t, _ in rows[i + 1 :]) for i, (_, index, _) in enumerate(rows)]
            ),
            "is_padding": torch.zeros(len(rows), dtype=torch.bool),
        },
        row_offsets=offsets_of(lengths),
        metadata=BatchMetadata(uids=uids, global_step=3, weight_version=7),
    )


def make_turn(prompt: Sequence[int], response: Sequence[int], *, reward: float = 0.0, **changes: Any) -> Turn:
    """A turn with its whole prompt; `make_trajectory` finds what it continues."""
    logprobs = tuple(-float(token) for token in response)
    return fakes_trainer.make_turn(prompt, response, reward=reward, **{"response_logprobs": logprobs, **changes})


def make_trajectory(uid: str, sample: int, *turns: Turn) -> Trajectory:
    return Trajectory(prompt_uid=uid, sample_index=sample, turns=fakes_trainer.linked(*turns), outcome=Outcome.DONE)


def failed_trajectory(uid: str, sample: int, *turns: Turn) -> Trajectory:
    failure = Failure(kind=FailureKind.ENVIRONMENT_ERROR, message="ValueError: no", turn_index=len(turns))
    return Trajectory(
        prompt_uid=uid,
        sample_index=sample,
        turns=fakes_trainer.linked(*turns),
        outcome=Outcome.FAILED,
        failure=failure,
    )


def make_rollouts(*trajectories: Trajectory, n_samples: int) -> RolloutBatch:
    uids = list(dict.fromkeys(trajectory.prompt_uid for trajectory in trajectories))
    prompts = tuple(Prompt(uid=uid, messages=()) for uid in uids)
    return RolloutBatch(prompts=prompts, trajectories=trajectories, n_samples_per_prompt=n_samples)


def make_config(
    *,
    prompts: int,
    mini_batch: int,
    critic_mini_batch: int = 0,
    n_samples: int = 1,
    step_wise: bool = False,
    max_context_length: int = 512,
    trainer: Mapping[str, Any] | None = None,
    placement: Mapping[str, Any] | None = None,
) -> Config:
    return Config(
        trainer=TrainerConfig(
            train_batch_size=prompts,
            policy_mini_batch_size=mini_batch,
            **{"critic_mini_batch_size": critic_mini_batch or prompts, **(trainer or {})},
        ),
        generator=GeneratorConfig(
            n_samples_per_prompt=n_samples, step_wise_trajectories=step_wise, max_context_length=max_context_length
        ),
        placement=PlacementConfig(**(placement or {})),
        critic=CriticConfig(model=CriticModelConfig(path="policy" if critic_mini_batch else "")),
    )
