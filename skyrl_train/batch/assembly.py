"""Rollouts to training rows: one row per trajectory, or one per turn.

Worked example, one trajectory of two turns, `[p p]` answered with `[r r]`, and `[p p r r o]` answered with `[s]`:

    one row        p p r r o s          loss_mask  0 0 1 1 0 1     rewards on the second r and on s
    step-wise      p p r r              loss_mask  0 0 1 1
                   p p r r o s          loss_mask  0 0 0 0 0 1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from skyrl_train.batch.batch_metadata import DUMMY_ROW_LENGTH
from skyrl_train.batch.planner.documents import document_steps
from skyrl_train.batch.planner.forwards import training_limit
from skyrl_train.batch.training_batch import ROUTED, BatchMetadata, TrainingInputBatch
from skyrl_train.config import TrainerConfig
from skyrl_train.errors import BatchError, counted
from skyrl_train.images import Image, ImageSpans, with_pixels
from skyrl_train.parts import TRAJECTORY_ROWS
from skyrl_train.registry import PartSpec, part_name
from skyrl_train.types import RolloutBatch, TokenIds, Trajectory, Turn, token_ids


@dataclass(frozen=True)
class _Row:
    """One training row to be: the context of its last turn, with the responses of all its turns to be trained."""

    prompt_index: int
    trajectory_index: int
    step_index: int
    is_last_step: bool
    turns: tuple[Turn, ...]
    """Empty for the placeholder of a failed trajectory."""
    prompt_lengths: tuple[int, ...]
    """Of `turns`: where their responses begin in the row."""
    input_ids: TokenIds
    """`[tokens]` int32: prompt and response of the last turn."""
    routed_experts: NDArray[np.int16] | None = None
    """`[tokens, layers * k]`, -1 where none are known; None where they are not asked for."""
    images: ImageSpans = ()
    """Images among the tokens, each with the position of its first one."""


_PLACEHOLDER = token_ids([0] * DUMMY_ROW_LENGTH)


def assemble(
    rollouts: RolloutBatch,
    trainer: TrainerConfig,
    *,
    rows: PartSpec,
    policy_shares: int,
    critic_shares: int | None,
    max_staleness: int | None,
    read_image: Callable[[str], Image] | None,
    global_step: int,
    weight_version: int,
) -> TrainingInputBatch:
    """The training batch of `rollouts`, with the boundaries of its prompts and mini-batches in the metadata.

    Args:
        rows: The part that makes the rows of a trajectory.
        policy_shares: Data-parallel ranks of the policy.
        critic_shares: Data-parallel ranks of the critic; None where there is no critic.
        max_staleness: Versions that trained tokens may be old; None for recorded rollouts, whose versions are those of
            another run.
        read_image: Gives an image by its key, of rollouts that were recorded; None for a model that reads none.
        weight_version: That of the learner.

    A failed trajectory becomes one placeholder (a dummy row with its prompt's uid and its own number), so that prompts
    and samples stay countable; it has no loss and no estimator or denominator counts it.

    Raises BatchError naming the trajectory and the turn: a turn that does not extend the one before (one row cannot
    hold both), or adds no token to it where the returns of turns are compared, a turn without response,
    log-probabilities that do not match, a reward that is no number; and as `compute_prompt_mini_batch_boundaries` does.
    """
    step_wise = TRAJECTORY_ROWS.name_of(rows) != "per_trajectory"
    made = list(_rows(rollouts, rows, with_experts=trainer.moe_routing_replay))
    # In one row, two turns with nothing between them would be one run of sampled tokens.
    if trainer.algorithm.step_rewards == "turn_return":
        _check_turns_are_apart(rollouts, made)
    uids = tuple(rollouts.prompts[row.prompt_index].uid for row in made)
    lengths = np.fromiter((len(row.input_ids) for row in made), np.int64, len(made))
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    row_columns = _row_columns(made)

    def boundaries(mini_batch_size: int, num_shares: int) -> tuple[tuple[int, int], ...]:
        # Also where documents close steps, for what it checks: that all prompts and all of their samples are there.
        by_prompts = compute_prompt_mini_batch_boundaries(
            uids,
            mini_batch_size,
            train_batch_size=trainer.train_batch_size,
            is_stepwise=step_wise,
            n_samples_per_prompt=rollouts.n_samples_per_prompt,
        )
        if trainer.docs_per_step:
            return _document_boundaries(lengths, row_columns, trainer, num_shares)
        return tuple(by_prompts)

    return TrainingInputBatch(
        token_columns={
            name: torch.from_numpy(column)
            for name, column in {
                **_token_columns(made, offsets),
                **_version_column(made, offsets, weight_version),
                **_experts_column(made),
            }.items()
        },
        row_columns={name: torch.from_numpy(column) for name, column in row_columns.items()},
        row_offsets=torch.from_numpy(offsets),
        metadata=BatchMetadata(
            uids=uids,
            global_step=global_step,
            weight_version=weight_version,
            max_staleness=max_staleness,
            prompt_end_indices=tuple(compute_prompt_end_indices(uids)),
            policy_mini_batch_boundaries=boundaries(trainer.policy_mini_batch_size, policy_shares),
            critic_mini_batch_boundaries=None
            if critic_shares is None
            else boundaries(trainer.critic_mini_batch_size, critic_shares),
            images=_images(made, read_image),
        ),
    )


def _images(made: Sequence[_Row], read: Callable[[str], Image] | None) -> tuple[ImageSpans, ...]:
    if not any(row.images for row in made):
        return ()
    if read is None:
        return tuple(row.images for row in made)
    try:
        return tuple(with_pixels(row.images, read) for row in made)
    except ValueError as error:
        raise BatchError(str(error)) from error


def _document_boundaries(
    lengths: np.ndarray, row_columns: dict[str, np.ndarray], trainer: TrainerConfig, num_ranks: int
) -> tuple[tuple[int, int], ...]:
    """`[start, stop)` rows of each optimizer step that closes at `docs_per_step`."""
    steps = document_steps(
        lengths,
        row_columns["trajectory_index"],
        ~row_columns["is_padding"],
        docs_per_step=trainer.docs_per_step,
        num_ranks=num_ranks,
        admits=training_limit(trainer),
        exact=trainer.docs_per_step_exact,
    )
    return tuple((step.start, step.stop) for step in steps)


def per_trajectory(trajectory: Trajectory) -> list[Sequence[Turn]]:
    """All turns in one row: each must extend the one before."""
    return [trajectory.turns]


def per_turn(trajectory: Trajectory) -> list[Sequence[Turn]]:
    """Return one row for each turn, which trains that turn's response alone."""
    return [(turn,) for turn in trajectory.turns]


def _rows(rollouts: RolloutBatch, spec: PartSpec, *, with_experts: bool) -> Iterator[_Row]:
    rows_of: Callable[[Trajectory], Sequence[Sequence[Turn]]] = TRAJECTORY_ROWS.resolve(spec)
    for trajectory_index, trajectory in enumerate(rollouts.trajectories):
        prompt_index, _ = divmod(trajectory_index, rollouts.n_samples_per_prompt)
        uid = rollouts.prompts[prompt_index].uid
        # Advantages compare what stands at the places of one prompt:
        # another's sample would be a wrong baseline, without an error.
        if trajectory.prompt_uid != uid:
            raise BatchError(
                f"trajectory {trajectory_index} belongs to {trajectory.prompt_uid!r}, but {uid!r} was expected there"
            )
        if trajectory.failed:
            yield _Row(prompt_index, trajectory_index, 0, False, (), (), _PLACEHOLDER)
            continue
        # Both once for each trajectory: rows of turns that continue one another are views of one array.
        prompt_lengths = trajectory.prompt_lengths()
        _check_turns(trajectory, prompt_lengths)
        rows = [tuple(row) for row in rows_of(trajectory)]
        _check_rows(trajectory, rows, spec)
        contexts, start = trajectory.contexts(), 0
        experts = _contexts_of_experts(trajectory, prompt_lengths) if with_experts else [None] * len(contexts)
        for step_index, row in enumerate(rows):
            stop = start + len(row)
            starts = tuple(prompt_lengths[start:stop])
            is_last = step_index == len(rows) - 1
            last = stop - 1
            yield _Row(
                prompt_index,
                trajectory_index,
                step_index,
                is_last,
                row,
                starts,
                contexts[last],
                experts[last],
                trajectory.images(last),
            )
            start = stop


def _contexts_of_experts(trajectory: Trajectory, prompt_lengths: Sequence[int]) -> list[NDArray[np.int16]]:
    """Return for each turn `[prompt + response, layers * k]`: where the engine sent the tokens of its context, -1 where that
    was not recorded.

    The last token of a response is computed with the turn after it. In the row of its own turn, where nothing is read behind
    it, it has the experts of the first turn that continues it, so that this one's row extends the other.
    Raises BatchError for a turn without any.
    """
    found: list[NDArray[np.int16]] = []
    for index, (turn, prompt_length) in enumerate(zip(trajectory.turns, prompt_lengths)):
        recorded = turn.routed_experts
        if not len(recorded) or recorded.shape[1:] != trajectory.turns[0].routed_experts.shape[1:]:
            raise BatchError(
                f"{_name(trajectory)}, turn {index}: experts {list(recorded.shape)} were recorded of it, and "
                f"trainer.moe_routing_replay=true needs those of each turn, of the same layers. Let the engine return "
                "GenerationOutput.routed_experts, or set trainer.moe_routing_replay=false"
            )
        whole = np.full((prompt_length + turn.num_response_tokens, recorded[0].size), -1, np.int16)
        before = whole[:0] if turn.parent is None else found[turn.parent]
        # But for the last token of the turn before, which is computed with this one and stands in its record.
        whole[: max(0, len(before) - 1)] = before[:-1]
        # A record ends ahead of the last token: that was sampled, and nothing computed it in this turn.
        whole[len(whole) - 1 - len(recorded) : -1] = recorded.reshape(len(recorded), -1)
        if len(before) and before[-1, 0] < 0:
            before[-1] = whole[len(before) - 1]
        found.append(whole)
    return found


def _check_rows(trajectory: Trajectory, rows: Sequence[Sequence[Turn]], spec: PartSpec) -> None:
    """No turn, and with it no reward, is lost or doubled, and a row holds turns of which each extends the one before."""
    name = _name(trajectory)
    # By identity: two turns of a trajectory may be equal.
    numbers = {id(turn): index for index, turn in enumerate(trajectory.turns)}
    if [numbers.get(id(turn)) for row in rows for turn in row] != list(range(len(trajectory.turns))) or not all(rows):
        raise BatchError(
            f"{name}: {part_name(spec)} must put each of its {len(trajectory.turns)} turns into one row, in order, and make "
            "no empty row"
        )
    for row in rows:
        for turn in row[1:]:
            index = numbers[id(turn)]
            if turn.parent != index - 1:
                raise BatchError(
                    f"{name}, turn {index}: its prompt does not begin with the tokens of turn {index - 1}, so that one row "
                    "cannot hold both. Set generator.step_wise_trajectories=true to train one row per turn"
                )


def _name(trajectory: Trajectory) -> str:
    return f"trajectory {trajectory.prompt_uid}/{trajectory.sample_index}"


def _check_turns(trajectory: Trajectory, prompt_lengths: Sequence[int]) -> None:
    name = _name(trajectory)
    if not trajectory.turns:
        raise BatchError(f"{name} did not fail and yet has no turn")
    for index, (turn, prompt_length) in enumerate(zip(trajectory.turns, prompt_lengths)):
        if not prompt_length or not turn.num_response_tokens:
            raise BatchError(f"{name}, turn {index}: a complete turn has at least one prompt and one response token")
        if not math.isfinite(turn.reward):
            raise BatchError(
                f"{name}, turn {index}: the reward is {turn.reward}; a broken reward must fail its trajectory"
            )


def _check_turns_are_apart(rollouts: RolloutBatch, rows: Sequence[_Row]) -> None:
    """In one row, a turn is a maximal run of sampled tokens, so that a token of another lies between two of them."""
    for row in rows:
        for turn in row.turns[1:]:
            if not turn.num_added_tokens:
                trajectory = rollouts.trajectories[row.trajectory_index]
                index = next(index for index, each in enumerate(trajectory.turns) if each is turn)
                raise BatchError(
                    f"{_name(trajectory)}, turn {index}: nothing was observed "
                    f"after turn {index - 1}, so that one row cannot tell their returns apart "
                    "(step_rewards=turn_return). Set generator.step_wise_trajectories=true to train one row per turn"
                )


def _row_columns(rows: list[_Row]) -> dict[str, np.ndarray]:
    return {
        "prompt_index": np.fromiter((row.prompt_index for row in rows), np.int32, len(rows)),
        "trajectory_index": np.fromiter((row.trajectory_index for row in rows), np.int32, len(rows)),
        "step_index": np.fromiter((row.step_index for row in rows), np.int32, len(rows)),
        "is_last_step": np.fromiter((row.is_last_step for row in rows), np.bool_, len(rows)),
        "is_padding": np.fromiter((not row.turns for row in rows), np.bool_, len(rows)),
    }


def _logprobs_are_recorded(rows: list[_Row]) -> bool:
    """False where no turn carries log-probabilities (rollouts from a file); the column is left out then.

    Raises BatchError where some do and some do not.
    """
    recorded = {bool(len(turn.response_logprobs)) for row in rows for turn in row.turns}
    if len(recorded) > 1:
        raise BatchError(
            "some turns carry log-probabilities of their tokens and some do not: record them for all or none"
        )
    return recorded != {False}


def _token_columns(rows: list[_Row], offsets: np.ndarray) -> dict[str, np.ndarray]:
    num_tokens = int(offsets[-1])
    sampled = np.zeros(num_tokens, np.bool_)
    trained = np.zeros(num_tokens, np.bool_)
    rewards = np.zeros(num_tokens, np.float32)
    logprobs = np.zeros(num_tokens, np.float32)
    recorded = _logprobs_are_recorded(rows)
    for row, offset in zip(rows, offsets.tolist()):
        for turn, prompt_length in zip(row.turns, row.prompt_lengths):
            start = offset + prompt_length
            stop = start + turn.num_response_tokens
            sampled[start:stop] = True
            trained[start:stop] = turn.loss_mask if len(turn.loss_mask) else True
            if recorded:
                logprobs[start:stop] = turn.response_logprobs
            rewards[stop - 1] = turn.reward  # known when the turn has ended
    return {
        "input_ids": np.concatenate([row.input_ids for row in rows]),
        "loss_mask": trained,
        "rewards": rewards,
        # By the first of these turns are found, where the loss leaves out some of a turn's tokens.
        **({"response_mask": sampled} if bool((sampled != trained).any()) else {}),
        **({"rollout_logprobs": logprobs} if recorded else {}),
    }


def _experts_column(rows: list[_Row]) -> dict[str, np.ndarray]:
    """`routed_experts` int16 `[num_tokens, layers * k]`, -1 where none are known; nothing where no row has any."""
    known = [row.routed_experts for row in rows if row.routed_experts is not None]
    if not known:
        return {}
    unknown = np.full((DUMMY_ROW_LENGTH, known[0].shape[1]), -1, np.int16)
    return {ROUTED: np.concatenate([unknown if row.routed_experts is None else row.routed_experts for row in rows])}


def _version_column(rows: list[_Row], offsets: np.ndarray, weight_version: int) -> dict[str, np.ndarray]:
    """`weight_version` int32 `[num_tokens]` where a token was sampled by weights of another version; else nothing."""
    if all(run.version == weight_version for row in rows for turn in row.turns for run in turn.weight_versions):
        return {}
    versions = np.full(int(offsets[-1]), weight_version, np.int32)
    for row, offset in zip(rows, offsets.tolist()):
        for turn, prompt_length in zip(row.turns, row.prompt_lengths):
            start = offset + prompt_length
            response = versions[start : start + turn.num_response_tokens]
            for run in turn.weight_versions:
                # Runs are in order: the next one overwrites the rest.
                response[run.start :] = run.version
    return {"weight_version": versions}


def compute_prompt_end_indices(uids: Sequence[str]) -> list[int]:
    """One past the last row of each prompt, in order: `["a", "a", "b"]` gives `[2, 3]`.

    Raises BatchError for an empty list, and for a uid whose rows do not lie together.
    """
    if not uids:
        raise BatchError("no uids: a batch has at least one row")
    # Rows of a prompt in two places would be taken for two prompts, each with a baseline of its own.
    first_seen = {uids[0]: 0}
    ends = []
    previous = uids[0]
    for index, uid in enumerate(uids):
        if uid == previous:
            continue
        ends.append(index)
        if uid in first_seen:
            raise BatchError(
                f"uid {uid!r} is in two places: its rows begin at index {first_seen[uid]} and again at index {index}. "
                "The rows of one prompt must lie together, and a prompt may be in a batch only once"
            )
        first_seen[uid] = index
        previous = uid
    return [*ends, len(uids)]


def compute_prompt_mini_batch_boundaries(
    uids: Sequence[str],
    mini_batch_size: int,
    train_batch_size: int | None = None,
    is_stepwise: bool = True,
    n_samples_per_prompt: int | None = None,
) -> list[tuple[int, int]]:
    """`[start, stop)` rows of each mini-batch of `mini_batch_size` prompts.

    With `mini_batch_size=2`, `["a", "a", "b", "c", "d", "d"]` gives `[(0, 3), (3, 6)]`.
    `train_batch_size` is the number of prompts there must be. Where rows are not step-wise, each prompt must have
    `n_samples_per_prompt` of them (None: not checked).
    Raises BatchError naming the uid and the index, or the numbers that contradict each other.
    """
    if mini_batch_size < 1:
        raise BatchError(f"mini_batch_size must be a positive number of prompts; got {mini_batch_size}")
    ends = compute_prompt_end_indices(uids)
    prompts = list(zip([0, *ends[:-1]], ends))
    if train_batch_size is not None and len(prompts) != train_batch_size:
        raise BatchError(
            f"{counted(len(prompts), 'prompt')} (the last is {uids[-1]!r} at index {len(uids) - 1}) where "
            f"train_batch_size={train_batch_size} were expected"
        )
    whole, rest = divmod(len(prompts), mini_batch_size)
    if rest:
        raise BatchError(
            f"{counted(len(prompts), 'prompt')} are not a whole number of mini-batches of {mini_batch_size}: {rest} are "
            f"left over, from uid {uids[prompts[-rest][0]]!r} at index {prompts[-rest][0]}"
        )
    if not is_stepwise and n_samples_per_prompt is not None:
        for start, stop in prompts:
            if stop - start != n_samples_per_prompt:
                raise BatchError(
                    f"uid {uids[start]!r} at index {start} has {counted(stop - start, 'row')} where "
                    f"n_samples_per_prompt={n_samples_per_prompt} were expected"
                )
    size = mini_batch_size
    return [(prompts[index * size][0], prompts[(index + 1) * size - 1][1]) for index in range(whole)]
