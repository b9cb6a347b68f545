"""Prompts with all their samples, before they are a batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from skyrl_train.types import Prompt, RolloutBatch, Trajectory

Group = tuple[Prompt, tuple[Trajectory, ...]]
"""A prompt with all its samples."""


def rollouts_of(groups: Sequence[Group], n_samples_per_prompt: int) -> RolloutBatch:
    """Return the groups as a batch."""
    return RolloutBatch(
        prompts=tuple(prompt for prompt, _ in groups),
        trajectories=tuple(trajectory for _, group in groups for trajectory in group),
        n_samples_per_prompt=n_samples_per_prompt,
    )


def distinct(groups: Sequence[Group]) -> list[Group]:
    """Return groups of prompts of different uids: a prompt that comes again, in the epoch after, is called `UID#copy1`. Two
    groups under one uid would be one to whatever compares the samples of a prompt."""
    seen: Counter[str] = Counter()
    found: list[Group] = []
    for prompt, group in groups:
        number = seen[prompt.uid]
        seen[prompt.uid] += 1
        uid = f"{prompt.uid}#copy{number}" if number else prompt.uid
        found.append((replace(prompt, uid=uid), tuple(replace(one, prompt_uid=uid) for one in group)))
    return found


def mean_length(groups: Sequence[Group]) -> float:
    """Return how many tokens were sampled in a trajectory, in the mean; 0 where there are none that did not fail."""
    lengths = [
        sum(len(turn.response_token_ids) for turn in one.turns)
        for _, group in groups
        for one in group
        if not one.failed
    ]
    return math.fsum(lengths) / len(lengths) if lengths else 0.0
