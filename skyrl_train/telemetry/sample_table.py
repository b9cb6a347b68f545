"""Rollouts as rows of a table, for people: trackers show one of each evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from skyrl_train.types import ChatMessage, RolloutBatch, Trajectory

SAMPLE_COLUMNS = ("uid", "prompt", "response", "reward", "turns", "tokens", "outcome")
SampleRow = Mapping[str, str | float | int]
"""By `SAMPLE_COLUMNS`. The reward of a failed trajectory is not a number, and its outcome says what broke it."""


def sample_rows(rollouts: RolloutBatch, most: int) -> list[SampleRow]:
    """Return the first sample of each of the first `most` prompts, which are the same at each evaluation."""
    size = rollouts.n_samples_per_prompt
    return [
        sample_row(prompt.messages, rollouts.trajectories[index * size])
        for index, prompt in enumerate(rollouts.prompts[:most])
    ]


def sample_row(messages: Sequence[ChatMessage], trajectory: Trajectory) -> SampleRow:
    """Return one trajectory as a row."""
    outcome = trajectory.outcome.value
    if trajectory.failure is not None:
        outcome = f"{trajectory.failure.kind.value}: {trajectory.failure.message}"
    return {
        "uid": trajectory.prompt_uid,
        "prompt": _said(trajectory.first_messages or messages),
        "response": "\n\n".join(
            text for turn in trajectory.turns for text in (turn.response_text, _said(turn.observations)) if text
        ),
        "reward": float("nan") if trajectory.failed else trajectory.reward,
        "turns": len(trajectory.turns),
        "tokens": sum(len(turn.response_token_ids) for turn in trajectory.turns),
        "outcome": outcome,
    }


def _said(messages: Sequence[Mapping[str, object]]) -> str:
    return "\n".join(f"[{message.get('role', '')}] {message.get('content', '')}" for message in messages)
