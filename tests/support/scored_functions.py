"""Reward functions of every kind. The module imports no model, so that a worker process starts at once."""

from __future__ import annotations

import time
from typing import Any

from skyrl_train.rollout.rewards import batched, group
from skyrl_train.types import ChatMessage


def has_answer(completion, answer):  # type: ignore[no-untyped-def]
    return float(completion.endswith(f"#### {answer}"))


async def facts(completion: str, prompt: str, stop_reason: str, num_turns: int, **columns: Any) -> dict[str, float]:
    assert prompt == "0 + 1?"
    assert columns["answer"] == 4
    assert columns["response_length"] > 0
    return {"stopped": float(stop_reason == "stop"), "turns": float(num_turns), "length": float(len(completion))}


def conversation(completion: list[ChatMessage], messages: list[ChatMessage], prompt: list[ChatMessage]) -> float:
    assert messages == [*prompt, *completion]
    return float([message["role"] for message in completion] == ["assistant", "user", "assistant"])


@batched
def lengths(completions: list[str], answer: list[int], scale: float = 1.0) -> list[float]:
    assert answer == [4] * len(completions)
    if len(completions) > 1 and "4" in completions:
        raise ValueError("together, these are too many")
    if completions == ["4"]:
        raise ValueError("4")
    return [scale * len(completion) for completion in completions]


@group
def longest(completions: list[str], answer: int) -> list[float]:
    assert answer == 4
    return [float(len(completion) == max(map(len, completions))) for completion in completions]


@group
def too_few(completions: list[str]) -> list[float]:
    return [1.0] * (len(completions) - 1)


def unsure(completion: str) -> float | None:
    return None if completion == "4" else 1.0


def broken(completion: str) -> Any:
    if completion == "4":
        raise KeyError("no rule for 4")
    return float("nan") if completion.endswith("5") else 1.0


def endless(completion: str) -> float:
    while completion == "4":
        time.sleep(0.01)
    return 1.0


class Scaled:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, completion: str) -> float:
        return self.scale * float(bool(completion))


def of_nothing(reply: str) -> float:
    return float(bool(reply))


NO_FUNCTION = 3
