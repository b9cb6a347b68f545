"""Reward functions of TRL's and verl's signatures, told by their parameters and called as those trainers call them.

    TRL     f(prompts, completions, **columns) -> list       a list for each argument, None where a reward does not apply
    verl    compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float, or {"score": float, ...}

Source: TRL 1.16, `GRPOTrainer._calculate_rewards`; verl 0.9.1, `NaiveRewardManager.run_single`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal

from skyrl_train.rollout.plain_data import numbers_only

Convention = Literal["own", "trl", "verl"]
"""Whose way of calling a reward function has."""
SCORE = "score"
"""The key of what verl's functions return that is the reward; others are reported."""
OF_TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""What TRL passes beside the columns."""
OF_VERL = ("solution_str", "extra_info")
"""What verl makes beside the columns."""


def convention_of(names: Collection[str]) -> Convention:
    """Return whose convention a function without a decorator follows, by its parameters' names."""
    if "completion" in names:
        return "own"
    return "trl" if "completions" in names else "verl" if "solution_str" in names else "own"


def trl_arguments(
    prompt: Mapping[str, Any], samples: Sequence[Mapping[str, Any]], *, as_text: bool | None
) -> dict[str, Any]:
    """Return all that TRL passes: one entry a sample for each column.

    Args:
        prompt: The row's columns with `prompt` (messages), `prompt_is_text` and `global_step`.
        samples: Facts of each trajectory, with `completion_ids`.
        as_text: Whether prompts and completions are texts rather than messages, where annotations say so; None is as in
            the row.
    """
    given_as_text = prompt["prompt_is_text"] if as_text is None else as_text
    last_user = next((m["content"] for m in reversed(prompt["prompt"]) if m.get("role") == "user"), "")
    columns = {name: value for name, value in prompt.items() if name not in ("prompt", "prompt_is_text", "global_step")}
    return {
        **{name: [value] * len(samples) for name, value in columns.items()},
        "prompts": [last_user if given_as_text else prompt["prompt"]] * len(samples),
        "completions": [one["completion" if given_as_text else "completion_messages"] for one in samples],
        "completion_ids": [one["completion_ids"] for one in samples],
        "trainer_state": None if prompt["global_step"] is None else SimpleNamespace(global_step=prompt["global_step"]),
        "log_extra": _not_logged,
        "log_metric": _not_logged,
    }


def verl_arguments(prompt: Mapping[str, Any], sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row's columns and what verl makes of a trajectory: the text of all that followed the prompt."""
    model, told = prompt.get("reward_model"), prompt.get("extra_info")
    texts = [message["content"] for message in sample["completion_messages"] if isinstance(message["content"], str)]
    found = {
        **prompt,
        "solution_str": "\n".join(texts),
        "extra_info": {**(told if isinstance(told, Mapping) else {}), "num_turns": sample["num_turns"]},
    }
    if isinstance(model, Mapping) and "ground_truth" in model:
        found["ground_truth"] = model["ground_truth"]
    return found


def peer_answer(convention: Convention, answer: Any) -> Any:
    """Return what such a function returned as `check_scores` takes it: TRL's arrays and generators as lists, and of a
    mapping of verl's the score with the numbers beside it."""
    if convention == "verl" and isinstance(answer, Mapping):
        others = {name: value for name, value in answer.items() if name != SCORE}
        return {**({SCORE: answer[SCORE]} if SCORE in answer else {}), **numbers_only(others)}
    if convention == "trl" and not isinstance(answer, (str, Mapping)):
        as_list = answer.tolist() if hasattr(answer, "tolist") else answer
        return list(as_list) if hasattr(as_list, "__iter__") else as_list
    return answer


def _not_logged(*_: object) -> None:
    """What TRL's functions log beside their rewards is kept nowhere."""
