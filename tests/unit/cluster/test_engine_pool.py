"""An engine that is broken or without its core under a living actor is given up and started anew like a dead actor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.cluster.calls import Answer, RemoteActor
from skyrl_train.cluster.engines import EnginePool
from skyrl_train.errors import EngineDeadError, EngineError, SkyrlTrainError
from skyrl_train.learner.turns import DeviceTurns
from skyrl_train.types import GenerationOutput, GenerationRequest, SamplingParams, StopReason

REQUEST = GenerationRequest(request_id="r", prompt_token_ids=(1, 2), sampling=SamplingParams(), seed=1)
OUTPUT = GenerationOutput(token_ids=(3,), logprobs=(-0.5,), stop_reason=StopReason.LENGTH, weight_version=4)
DEAD = EngineDeadError("the engine died: vLLM's process EngineCore (pid 7) was killed by signal 9")


class Remote:
    """A method of an actor that lives."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def options(self, **_: Any) -> Remote:
        return self

    def remote(self, *given: Any) -> Remote:
        self._given = given
        return self

    def future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self._function(*self._given))
        return future


class Handle:
    def __init__(self, answer: Answer) -> None:
        self.generate = Remote(lambda request: answer)
        self.ping = Remote(lambda: True)


class Fleet:
    """Implements what a pool uses of an `EngineFleet`."""

    ready = True

    def __init__(self, *errors: SkyrlTrainError) -> None:
        self._answers = [Answer(error=error) for error in errors] + [Answer(value=OUTPUT)]
        self.actors = [self._actor()]
        self.alive = [True]
        self.lost: list[str] = []

    def lose(self, index: int, reason: str) -> bool:
        self.alive[index] = False
        self.lost.append(reason)
        return True

    def start_anew(self, index: int) -> RemoteActor:
        return self._actor()

    def admit(self, index: int, actor: RemoteActor) -> None:
        self.actors[index], self.alive[index] = actor, True

    def _actor(self) -> RemoteActor:
        return RemoteActor(handle=Handle(self._answers.pop(0)), role="vllm engine", rank=0, log_folder=None)


def make_pool(fleet: Fleet, folder: Path) -> EnginePool:
    turns = DeviceTurns(None, shared=False, record_file=folder / "turns.jsonl")
    pool = EnginePool(fleet, turns, silence_timeout_s=30.0)  # type: ignore[arg-type]
    pool.bring_up_to_date = fleet.admit
    return pool


def test_a_dead_core_under_a_living_actor_costs_its_request_nothing(tmp_path: Path) -> None:
    fleet = Fleet(DEAD)
    assert asyncio.run(make_pool(fleet, tmp_path).generate(REQUEST)) == OUTPUT
    assert fleet.lost == [f"died: {DEAD}"]
    assert fleet.alive == [True]


def test_a_request_that_an_engine_refuses_is_not_its_death(tmp_path: Path) -> None:
    fleet = Fleet(EngineError("request r: too long"))
    with pytest.raises(EngineError, match="too long"):
        asyncio.run(make_pool(fleet, tmp_path).generate(REQUEST))
    assert fleet.lost == []
