"""Rollouts as an engine and environments would have made them, of random tokens: no model and no environment is there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from skyrl_train.types import Outcome, Prompt, RolloutBatch, StopReason, Trajectory, Turn, VersionRun

VOCABULARY = 150_000
Ids = np.ndarray


def make_rollouts(
    prompts: int,
    samples: int,
    turns: int,
    tokens_per_sequence: int,
    *,
    ids: Callable[[int], Ids],
    text: Callable[[Ids], str],
    logprobs: Callable[[int], np.ndarray],
) -> RolloutBatch:
    """Each sequence: a prompt of a fifth, then turns of seven parts response and, between them, one part observation; every
    other sample of a prompt is rewarded at its end.

    Args:
        ids: Draws so many token ids.
        text: Of token ids.
        logprobs: Draws so many.
    """
    prompt_tokens = tokens_per_sequence // 5
    per_turn = (tokens_per_sequence - prompt_tokens) // turns
    num_observation = per_turn // 8 if turns > 1 else 0

    def make_trajectory(uid: str, sample: int, added: Ids) -> Trajectory:
        made: list[Turn] = []
        for number in range(turns):
            response = ids(per_turn - num_observation)
            made.append(
                Turn(
                    parent=number - 1 if number else None,
                    added_token_ids=added,
                    response_token_ids=response,
                    response_logprobs=logprobs(len(response)),
                    loss_mask=np.ones(len(response), np.bool_),
                    response_text=text(response),
                    reward=float(sample % 2 and number == turns - 1),
                    stop_reason=StopReason.STOP,
                    weight_versions=(VersionRun(start=0, version=0),),
                )
            )
            added = ids(num_observation)
        solved = {"solved": made[-1].reward}
        return Trajectory(prompt_uid=uid, sample_index=sample, turns=tuple(made), outcome=Outcome.DONE, metrics=solved)

    asked, trajectories = [], list[Trajectory]()
    for index in range(prompts):
        uid, first = f"train-{index}", ids(prompt_tokens)
        asked.append(Prompt(uid=uid, messages=({"role": "user", "content": text(first)},), env_class="gsm8k"))
        trajectories += [make_trajectory(uid, sample, first) for sample in range(samples)]
    return RolloutBatch(prompts=tuple(asked), trajectories=tuple(trajectories), n_samples_per_prompt=samples)
