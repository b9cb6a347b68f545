"""Whose wait for an environment is counted, whatever becomes of it."""

from __future__ import annotations

import asyncio

import pytest

from skyrl_train.rollout.boundary.session import Broken, Request, late
from skyrl_train.rollout.hosts.watched import WatchedEnvironments
from skyrl_train.telemetry import Activity


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Handle:
    """An environment that takes two seconds of the clock, and hangs where it is asked to."""

    def __init__(self, environments: SlowEnvironments) -> None:
        self._environments = environments

    async def ask(self, request: Request) -> object:
        self._environments.clock.now_s += 2.0
        if request["call"] == "hang":
            self._environments.num_given_up += 1
            raise late("hang", 2.0)
        return {"value": request["call"]}

    def release(self) -> None:
        self._environments.num_released += 1


class SlowEnvironments:
    """Implements `Environments`."""

    given_up = "their threads were given up"

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.num_given_up = self.num_close_failures = self.num_released = 0

    def host(self, name: str) -> Handle:
        assert name == "slow"
        return Handle(self)

    async def aclose(self) -> None:
        self.clock.now_s += 100.0


def test_waits_are_counted_answered_or_not() -> None:
    clock = Clock()
    inner, activity = SlowEnvironments(clock), Activity(clock)
    watched = WatchedEnvironments(inner, activity)

    async def use() -> None:
        handle = watched.host("slow")
        assert await handle.ask({"call": "step"}) == {"value": "step"}
        with pytest.raises(Broken):
            await handle.ask({"call": "hang"})
        handle.release()
        await watched.aclose()

    asyncio.run(use())
    assert activity.take().metrics["timing/wait/environments"] == 4.0
    assert (watched.num_given_up, watched.given_up) == (1, "their threads were given up")
    assert inner.num_released == 1
