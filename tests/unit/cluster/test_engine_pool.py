"""An engine that is broken or without its core under a living actor is given up and started again like a dead actor."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.cluster.calls import Answer, RemoteActor
from skyrl_train.cluster.endpoints import RayEndpoint
from skyrl_train.cluster.engine_group import EngineGroup, GroupEngine
from skyrl_train.cluster.engine_worker import EngineWorker
from skyrl_train.cluster.images import SentImages
from skyrl_train.config.models import PlacementConfig
from skyrl_train.errors import ActorLostError, EngineDeadError, EngineError, SkyrlTrainError
from skyrl_train.inference import RequestGate
from skyrl_train.types import GenerationOutput, GenerationRequest, SamplingParams, StopReason
from skyrl_train.weight_sync import DeviceSharing

REQUEST = GenerationRequest(request_id="r", prompt_token_ids=(1, 2), sampling=SamplingParams(), seed=1)
OUTPUT = GenerationOutput(token_ids=(3,), logprobs=(-0.5,), stop_reason=StopReason.LENGTH, weight_version=4)
DEAD = EngineDeadError("the engine died: vLLM's process EngineCore (pid 7) was killed by signal 9")

NEVER = object()


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
        result = self._function(*self._given)
        if result is not NEVER:
            future.set_result(result)
        return future


class Handle:
    def __init__(self, answer: Answer | None) -> None:
        """`answer`: None never comes."""
        generated = NEVER if answer is None else answer
        self.invoke_coroutine = Remote(
            lambda key, request, images: generated if key == "EngineWorker.generate" else None
        )
        self.ping = Remote(lambda: True)


class Group:
    """Implements what a `GroupEngine` uses of an `EngineGroup`."""

    ready = True
    start_timeout_s = 5.0

    def __init__(self, *errors: SkyrlTrainError) -> None:
        self._answers = [Answer(error=error) for error in errors] + [Answer(value=OUTPUT)]
        self.actors = [self._actor()]
        self.alive = [True]
        self.lost: list[str] = []
        self.late: list[int] = []
        self.images = SentImages()
        self.is_catching_up = True

    @property
    def has_late(self) -> bool:
        return bool(self.late)

    def workers(self, actors: list[RemoteActor]) -> RayEndpoint[EngineWorker]:
        return RayEndpoint(EngineWorker, actors, PlacementConfig(), threading.Lock())

    def lose(self, index: int, reason: str) -> bool:
        self.alive[index] = False
        self.lost.append(reason)
        return True

    def is_closed(self) -> bool:
        return False

    def restart(self, index: int, catch_up: Callable[..., None]) -> None:
        catch_up()
        self.actors[index] = self._actor()
        if self.is_catching_up:
            self.alive[index] = True
        else:
            self.late.append(index)

    def _actor(self) -> RemoteActor:
        return RemoteActor(handle=Handle(self._answers.pop(0)), role="inference engine", rank=0, log_folder=None)


class Updates:
    """Implements what a `GroupEngine` uses of a `WeightSync`."""

    version = 4

    def catch_up(self) -> None:
        """At once."""


def make_engine(
    group: Group, folder: Path, gate: RequestGate | None = None, *, silence_timeout_s: float = 5.0
) -> GroupEngine:
    sharing = DeviceSharing(None, shared=False, record_file=folder / "turns.jsonl")
    return GroupEngine(group, sharing, Updates(), silence_timeout_s=silence_timeout_s, gate=gate)  # type: ignore[arg-type]


def test_a_dead_core_under_a_living_actor_costs_its_request_nothing(tmp_path: Path) -> None:
    group = Group(DEAD)
    engine = make_engine(group, tmp_path)
    assert asyncio.run(engine.generate(REQUEST)) == OUTPUT
    assert group.lost == [f"died: {DEAD}"]
    assert group.alive == [True]
    assert engine.weight_version == 4


def test_an_engine_that_is_stopped_is_known_to_hear_nothing_so_that_it_is_ended_where_it_is(tmp_path: Path) -> None:
    group = Group(DEAD)
    stopped = group.actors[0]
    stopped.handle.invoke_coroutine = stopped.handle.ping = Remote(lambda *_: NEVER)
    assert asyncio.run(make_engine(group, tmp_path, silence_timeout_s=0.05).generate(REQUEST)) == OUTPUT
    assert group.lost == ["gave no sign of life for 0.05 s"]
    assert stopped.is_silent


def test_a_request_that_an_engine_refuses_is_not_its_death(tmp_path: Path) -> None:
    group = Group(EngineError("request r: too long"))
    with pytest.raises(EngineError, match="too long"):
        asyncio.run(make_engine(group, tmp_path).generate(REQUEST))
    assert group.lost == []


def test_a_request_waits_for_an_engine_that_is_given_its_weights_by_the_next_sync(tmp_path: Path) -> None:
    group = Group(DEAD)
    group.is_catching_up = False
    engine = make_engine(group, tmp_path, RequestGate())

    async def ask() -> GenerationOutput:
        asked = asyncio.ensure_future(engine.generate(REQUEST))
        while not group.late:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(admit)
        return await asked

    def admit() -> None:
        with engine.quiet():
            group.alive[group.late.pop()] = True

    assert asyncio.run(ask()) == OUTPUT
    metrics = engine.take_metrics()
    assert metrics["engines/requests_moved"] == 1.0
    assert metrics["engines/serving"] == 1.0


def test_nobody_waits_for_the_next_sync_where_none_comes_meanwhile(tmp_path: Path) -> None:
    group = Group(DEAD)
    group.is_catching_up = False
    with pytest.raises(ActorLostError, match="no inference engine is left"):
        asyncio.run(make_engine(group, tmp_path).generate(REQUEST))


def test_a_sync_finds_no_engine_where_the_last_one_died_for_good(tmp_path: Path) -> None:
    group = Group()
    engine = make_engine(group, tmp_path)

    def sync() -> None:
        with engine.quiet():
            pytest.fail("there is nobody to give weights to")

    async def ask() -> None:
        assert await engine.generate(REQUEST) == OUTPUT
        group.alive[0] = False
        await asyncio.to_thread(sync)

    with pytest.raises(ActorLostError, match="no inference engine is left"):
        asyncio.run(ask())


def test_a_request_is_moved_from_an_engine_that_is_far_slower_than_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl_train.inference.routing._PATIENCE_S", 0.05)
    group = Group()
    group.actors.append(RemoteActor(handle=Handle(None), role="inference engine", rank=1, log_folder=None))
    group.alive.append(True)
    engine = make_engine(group, tmp_path)
    once = replace(REQUEST, sampling=SamplingParams(max_generate_length=1))

    async def ask() -> None:
        assert await engine.generate(once) == OUTPUT  # by the first: both are idle
        group.alive[0] = False
        slow = asyncio.ensure_future(engine.generate(replace(once, request_id="slow")))
        await asyncio.sleep(0.02)
        group.alive[0] = True
        assert await asyncio.wait_for(slow, 10.0) == OUTPUT
        assert engine._paces.fit_of([0, 1]) == [0]
        engine._updates.version += 1  # type: ignore[misc]
        assert await engine.generate(replace(once, request_id="later")) == OUTPUT
        assert engine._paces.fit_of([0, 1]) == [0, 1]

    asyncio.run(ask())
    assert group.lost == []
    assert engine.take_metrics()["engines/requests_moved"] == 1.0


def test_of_threads_that_wait_for_engines_the_first_to_be_done_does_not_fail_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Starting:
        def wait(self) -> list[None]:
            return [None]

    group = EngineGroup.__new__(EngineGroup)
    group.actors, group._starting = [], Starting()  # type: ignore[assignment]
    others = [group.wait_ready]

    def locate(*_: object) -> None:
        while others:  # another thread comes by, and is done, while this one asks where the actors are
            others.pop()()

    monkeypatch.setattr(group, "_locate", locate)
    group.wait_ready()
    assert group.ready
