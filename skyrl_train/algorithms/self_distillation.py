"""The policy as its own teacher: the same weights, shown something that the student was not.

The student samples from the data row's prompt. The teacher scores the same responses with privileged context in the
prompt, a solution say, so that it knows better which tokens were good. On-policy self-distillation, as in
Self-Distillation Enables Continual Learning (SDFT), arXiv:2601.19897, here with the reverse KL of the sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from skyrl_train.batch import BatchMetadata, TrainingInputBatch, offsets_of
from skyrl_train.errors import BatchError
from skyrl_train.types import RolloutBatch, Trajectory


def teacher_logprobs(
    batch: TrainingInputBatch, rollouts: RolloutBatch, forward: Callable[[TrainingInputBatch], Tensor]
) -> Tensor:
    """Return `[num_tokens]` of `batch`, assembled from `rollouts`: `forward`'s log-probability of each token with
    `loss_mask` where the conversation begins with the teacher's prompt in place of the student's; 0 elsewhere.

    Raises BatchError naming the trajectory that has no teacher's prompt, or a turn that does not begin with the first
    prompt, so that it cannot be exchanged.
    """
    taught = teacher_rows(batch, rollouts)
    scores = forward(taught)
    found = torch.zeros(batch.num_tokens, dtype=scores.dtype)
    found[batch["loss_mask"]] = scores[taught["loss_mask"]]
    return found


def teacher_rows(batch: TrainingInputBatch, rollouts: RolloutBatch) -> TrainingInputBatch:
    """Return the rows in their order, as the teacher reads them: only the first prompt of each is another."""
    ids, mask, bounds = batch["input_ids"], batch["loss_mask"], batch.row_offsets.tolist()
    prompts: dict[int, tuple[Tensor, Tensor]] = {}
    new_ids: list[Tensor] = []
    new_masks: list[Tensor] = []
    trajectories, padding = batch["trajectory_index"].tolist(), batch["is_padding"].tolist()
    for row, (index, is_padding) in enumerate(zip(trajectories, padding)):
        own, own_mask = ids[bounds[row] : bounds[row + 1]], mask[bounds[row] : bounds[row + 1]]
        if not is_padding:
            trajectory = rollouts.trajectories[index]
            if index not in prompts:
                prompts[index] = _prompts(trajectory)
            student, teacher = prompts[index]
            if not torch.equal(own[: len(student)], student):
                raise BatchError(
                    f"trajectory {trajectory.prompt_uid}/{trajectory.sample_index}: a turn does not begin with the first"
                    " prompt, so that the teacher's cannot take its place. Use a chat template that keeps earlier turns"
                )
            own = torch.cat([teacher, own[len(student) :]])
            own_mask = torch.cat([torch.zeros(len(teacher), dtype=torch.bool), own_mask[len(student) :]])
        new_ids.append(own)
        new_masks.append(own_mask)
    lengths = torch.tensor([len(row) for row in new_ids], dtype=torch.int64)
    metadata = batch.metadata
    return TrainingInputBatch(
        token_columns={
            "input_ids": torch.cat(new_ids),
            "loss_mask": torch.cat(new_masks),
            "rewards": torch.zeros(int(lengths.sum())),
        },
        row_columns=batch.row_columns,
        row_offsets=offsets_of(lengths),
        metadata=BatchMetadata(
            uids=metadata.uids, global_step=metadata.global_step, weight_version=metadata.weight_version
        ),
    )


def _prompts(trajectory: Trajectory) -> tuple[Tensor, Tensor]:
    """Return the student's first prompt and the teacher's, int32."""
    if not len(trajectory.teacher_prompt_token_ids):
        raise BatchError(
            f"trajectory {trajectory.prompt_uid}/{trajectory.sample_index} has no prompt for the teacher: it was generated"
            " without generator.privileged_context, or its environment changed the data row's messages"
        )
    # Copied, since a tensor may not share the memory of a read-only column.
    both = trajectory.turns[0].added_token_ids, trajectory.teacher_prompt_token_ids
    student, teacher = (torch.tensor(column, dtype=torch.int32) for column in both)
    return student, teacher
