"""An engine that is broken or without its core under a living actor is given up and started again like a dead actor."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.cluster.calls import Answer, RemoteActor
from skyrl_train.cluster.endpoints import RayEndpoint
from skyrl_train.cluster.engine_group import GroupEngine
from skyrl_train.cluster.engine_worker import EngineWorker
from skyrl_train.config.schema import PlacementConfig
from skyrl_train.errors import EngineDeadError, EngineError, SkyrlTrainError
from skyrl_train.types import GenerationOutput, GenerationRequest, SamplingParams, StopReason
from skyrl_train.weight_sync.device_sharing import DeviceSharing

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
        self.invoke_coroutine = Remote(lambda key, request: answer if key == "EngineWorker.generate" else None)
        self.ping = Remote(lambda: True)


class Group:
    """Implements what a `GroupEngine` uses of an `EngineGroup`."""

    ready = True

    def __init__(self, *errors: SkyrlTrainError) -> None:
        self._answers = [Answer(error=error) for error in errors] + [Answer(value=OUTPUT)]
        self.actors = [self._actor()]
        self.alive = [True]
        self.lost: list[str] = []

    def workers(self, actors: list[RemoteActor]) -> RayEndpoint[EngineWorker]:
        return RayEndpoint(EngineWorker, actors, PlacementConfig(), threading.Lock())

    def lose(self, index: int, reason: str) -> bool:
        self.alive[index] = False
        self.lost.append(reason)
        return True

    def restart(self, index: int, catch_up: Callable[..., None]) -> None:
        catch_up()
        self.actors[index], self.alive[index] = self._actor(), True

    def _actor(self) -> RemoteActor:
        return RemoteActor(handle=Handle(self._answers.pop(0)), role="inference engine", rank=0, log_folder=None)


class Updates:
    """Implements what a `GroupEngine` uses of a `WeightSync`."""

    version = 4

    def catch_up(self) -> None:
        """At once."""


def make_engine(group: Group, folder: Path) -> GroupEngine:
    sharing = DeviceSharing(None, shared=False, record_file=folder / "turns.jsonl")
    return GroupEngine(group, sharing, Updates(), silence_timeout_s=30.0)  # type: ignore[arg-type]


def test_a_dead_core_under_a_living_actor_costs_its_request_nothing(tmp_path: Path) -> None:
    group = Group(DEAD)
    engine = make_engine(group, tmp_path)
    assert asyncio.run(engine.generate(REQUEST)) == OUTPUT
    assert group.lost == [f"died: {DEAD}"]
    assert group.alive == [True]
    assert engine.weight_version == 4


def test_a_request_that_an_engine_refuses_is_not_its_death(tmp_path: Path) -> None:
    group = Group(EngineError("request r: too long"))
    with pytest.raises(EngineError, match="too long"):
        asyncio.run(make_engine(group, tmp_path).generate(REQUEST))
    assert group.lost == []
