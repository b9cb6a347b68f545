"""Environments of three turns that tell a secret of their own in each observation, so that two of them cannot be taken for
one, and what each offers for coming back."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from typing import Any

from skyrl_train.types import ChatMessage

TURNS = 3


class Secret:
    """Offers nothing: what is lost with its process cannot be had again."""

    made = itertools.count()
    closed: list[int] = []  # noqa: RUF012

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        self.secret, self.turns = next(Secret.made), 0
        self.extras = dict(extras or {})

    def init(self, prompt: list[ChatMessage]) -> tuple[list[ChatMessage], dict[str, Any]]:
        return prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        self.turns += 1
        told = {"role": "user", "content": f"{self.secret} + {self.turns}"}
        return {"observations": [told], "reward": float(self.turns), "done": self.turns == TURNS}

    def get_metrics(self) -> dict[str, float]:
        return {"secret": float(self.secret), "turns": float(self.turns)}

    def close(self) -> None:
        Secret.closed.append(self.secret)


class WithState(Secret):
    """Offers its state; `extras["state"]` is said in place of it, and `extras["refuses"]` has it refuse any."""

    def get_state(self) -> Any:
        return self.extras.get("state", {"secret": self.secret, "turns": self.turns})

    def set_state(self, state: Any) -> None:
        if self.extras.get("refuses"):
            raise ValueError("of another release")
        self.secret, self.turns = state["secret"], state["turns"]


class Asynchronous(WithState):
    """Its methods are coroutine functions."""

    async def init(self, prompt: list[ChatMessage]) -> Any:  # type: ignore[override]
        return super().init(prompt)

    async def step(self, action: str) -> Any:  # type: ignore[override]
        return super().step(action)

    async def get_state(self) -> Any:
        return super().get_state()

    async def set_state(self, state: Any) -> None:  # type: ignore[override]
        super().set_state(state)


class Deterministic(Secret):
    """Says that it can be played again, which is so: its secret is the row's."""

    deterministic = True

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__(env_config, extras)
        self.secret = 7


class WithPlace(Deterministic):
    """Its state has in it where it ran."""

    def get_state(self) -> Any:
        return {"process": os.getpid(), "turns": self.turns}

    def set_state(self, state: Any) -> None:
        self.turns = state["turns"]


class NotSo(Secret):
    """Says that it can be played again, which is not so."""

    deterministic = True
