"""What the model is told of the lake, and walks over it at random."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any


def describe(square: int) -> str:
    """What the environment observes is the number of a square, counted from the upper left corner."""
    return f"at {square}"


def walk(spec: Mapping[str, Any], question: str, max_turns: int, rng: random.Random) -> list[dict[str, str]]:
    """A conversation of random moves, to the end of the episode."""
    from skyrl_train.rollout.envs import make_environment

    environment = make_environment(spec, {})
    messages, _ = environment.init([{"role": "user", "content": question}])
    while True:
        action = str(rng.randrange(4))
        result = environment.step(action)
        messages.append({"role": "assistant", "content": action})
        if result["done"] or len(messages) == 2 * max_turns:
            environment.close()
            return messages
        messages += result["observations"]
