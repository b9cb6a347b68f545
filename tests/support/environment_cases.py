"""Environments for worker processes, in a module that imports next to nothing."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Any

COUNTING = "tests.support.environment_cases:Counting"
SCRIPTED = "tests.support.environment_cases:Scripted"


class Counting:
    """Says how many steps it has seen and in which process; ends the process at `extras["fatal"]`."""

    def __init__(self, env_config: Any, extras: Mapping[str, Any], *, start: int = 0) -> None:
        self.steps, self.fatal, self.random = start, extras.get("fatal"), extras.get("random", False)
        self.slow_s = extras.get("slow_s", 0.0)

    def init(self, prompt: list[dict[str, Any]]) -> Any:
        return prompt, {}

    def step(self, action: str) -> Any:
        self.steps += 1
        time.sleep(self.slow_s)
        if action == self.fatal:
            os._exit(9)
        said = os.urandom(4).hex() if self.random else f"{self.steps}"
        return {"observations": [{"role": "user", "content": said}], "reward": 0.0, "done": False}

    def close(self) -> None: ...

    def get_metrics(self) -> dict[str, float]:
        return {"steps": self.steps, "process": os.getpid()}


class Scripted:
    """Answers each step with the next of `extras["steps"]`."""

    def __init__(self, env_config: Any, extras: Mapping[str, Any]) -> None:
        self.steps = list(extras["steps"])

    def init(self, prompt: list[dict[str, Any]]) -> Any:
        return [{"role": "system", "content": "Answer."}, *prompt], {}

    def step(self, action: str) -> Any:
        return self.steps.pop(0)

    def close(self) -> None: ...

    def get_metrics(self) -> dict[str, Any]:
        return {"left": len(self.steps), "note": "left out"}


ASYNCHRONOUS = "tests.support.environment_cases:Asynchronous"


class Asynchronous:
    """Only what must be there, as coroutines: says how many are in a step beside it, and in which process it is."""

    together = 0

    def __init__(self, env_config: Any, extras: Mapping[str, Any]) -> None:
        self.sleep_s, self.closed = extras.get("sleep_s", 0.0), extras.get("closed")

    async def init(self, prompt: list[dict[str, Any]]) -> Any:
        return prompt, {}

    async def step(self, action: str) -> Any:
        Asynchronous.together += 1
        await asyncio.sleep(60.0 if action == "hang" else self.sleep_s)
        said = f"{Asynchronous.together} in {os.getpid()}"
        Asynchronous.together -= 1
        if action == "break":
            raise KeyError("broken")
        # As gymnasium answers: observation, reward, terminated, truncated, information.
        return said, {"correct": 1.0, "brief": 0.25}, False, action == "stop", {}

    async def close(self) -> None:
        if self.closed:
            with open(self.closed, "a") as file:
                file.write("closed\n")
