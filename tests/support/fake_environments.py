"""An environment that does what its row says. The module imports no model, so that a worker process starts at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from skyrl_train.types import ChatMessage


class FakeEnvironment:
    """An environment that follows its data row.

    `extras["steps"]` lists what each `step` returns; `extras["raise_in"]` and `extras["hang_in"]` name a method that
    raises `extras["error"]`, or waits for `FakeEnvironment.release`.
    """

    release = threading.Event()
    closed: list[FakeEnvironment] = []  # noqa: RUF012

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        self.env_config = env_config
        self.extras = dict(extras or {})
        self.num_steps = 0
        self.threads = {threading.get_ident()}
        # Its own test's: one that hung in an earlier test may still be on its way out.
        self._release, self._closed = type(self).release, type(self).closed
        self._enter("construction")

    @classmethod
    def reset(cls) -> None:
        cls.release = threading.Event()
        cls.closed = []

    def init(self, prompt: list[ChatMessage]) -> tuple[Any, dict[str, Any]]:
        self._enter("init")
        return self.extras.get("first_messages", prompt), {}

    def step(self, action: str) -> Any:
        self._enter("step")
        steps = self.extras.get("steps", [done_with(1.0)])
        self.num_steps += 1
        return steps[self.num_steps - 1]

    def close(self) -> None:
        self._closed.append(self)
        self._enter("close")

    def get_metrics(self) -> dict[str, Any]:
        self._enter("get_metrics")
        return {"steps": self.num_steps, "note": "text is left out", "infinite": float("inf")}

    def _enter(self, method: str) -> None:
        self.threads.add(threading.get_ident())
        if self.extras.get("raise_in") == method:
            raise self.extras.get("error", ValueError("unknown city 'Oz'"))
        if self.extras.get("hang_in") == method:
            self._release.wait(timeout=30)


class Checking(FakeEnvironment):
    """Checks rows, and says in which process it was asked."""

    def __init__(self, env_config: Any, extras: Any, *, least: int = 0) -> None:
        super().__init__(env_config, extras)
        self.least = least

    @classmethod
    def check_row(cls, row: Mapping[str, Any], *, least: int = 0) -> None:
        if row.get("crash"):
            os._exit(3)
        if not isinstance(row["n"], int) or row["n"] < least:
            raise ValueError(f"n: must be at least {least}; got {row['n']!r} (process {os.getpid()})")


FAKE_ENVIRONMENT = "tests.support.fake_environments:FakeEnvironment"


def done_with(reward: Any) -> dict[str, Any]:
    return {"observations": [], "reward": reward, "done": True, "metadata": {}}


def go_on_with(observation: str, reward: Any = 0.0) -> dict[str, Any]:
    return {
        "observations": [{"role": "user", "content": observation}],
        "reward": reward,
        "done": False,
        "metadata": {},
    }
