"""`EnginePool`: vLLM engines on Ray actors behind one `InferenceEngine`.

A request goes to the engine that knows the beginning of its prompt. An engine that dies or falls silent is given up: its
requests go to the others at once, and it is started anew and brought to the current weights beside them. A request has
one answer whatever happens: what a dead engine had computed is lost with it, and the seed makes the same again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import ray

from skyrl_train.cluster.calls import HEALTH, Answer, RemoteActor, Watch, ask_for_sign_of_life, kill, reason_of
from skyrl_train.cluster.engine_worker import EngineWorker
from skyrl_train.cluster.placement import Slot
from skyrl_train.cluster.session import RaySession
from skyrl_train.errors import EngineError
from skyrl_train.inference.routing import PrefixRouter
from skyrl_train.types import GenerationOutput, GenerationRequest

if TYPE_CHECKING:
    from skyrl_train.config.schema import Config

_MAX_LEAD = 32
"""Requests that an engine may have in flight beyond the least busy one before prefixes stop to count."""
_MAX_ATTEMPTS = 4

logger = logging.getLogger(__name__)


class _Engine:
    """One actor, and what is in flight on it."""

    def __init__(self, actor: RemoteActor) -> None:
        self.actor = actor
        self.alive = True
        self.num_restarts = 0
        self.in_flight: set[asyncio.Future[Any]] = set()


class EnginePool:
    """Implements `InferenceEngine`. `generate` is used from one event loop, everything else from one other thread."""

    def __init__(self, config: Config, session: RaySession, slots: Sequence[Slot]) -> None:
        """Starts the actors and returns at once; the first use waits for them."""
        self._config, self._session, self._slots = config, session, slots
        self._router = PrefixRouter(max_lead=_MAX_LEAD)
        self._version = -1
        self._asleep = False
        self._sleep_lock = threading.Lock()
        self._monitor: asyncio.Task[None] | None = None
        self._revivals: set[asyncio.Task[None]] = set()
        self.bring_up_to_date: Callable[[RemoteActor], None] = _no_weights
        """Gives a restarted engine the current weights; the transport sets it."""
        self._engines = [_Engine(self._launch(index)) for index in range(len(slots))]
        self._starting: list[Any] | None = [self._begin_start(engine.actor) for engine in self._engines]

    @property
    def weight_version(self) -> int:
        """Of the last sync that all engines confirmed."""
        return self._version

    @property
    def actors(self) -> list[RemoteActor]:
        """Of the engines that live."""
        return [engine.actor for engine in self._engines if engine.alive]

    @contextlib.contextmanager
    def lease(self) -> Iterator[None]:
        """Requests join and leave a running batch, so nothing waits for anybody."""
        yield

    def wait_ready(self) -> None:
        """Waits until every engine has loaded the model. Raises DeadlineError, ActorError, EngineError."""
        if self._starting is None:
            return
        actors = self.actors
        for actor, identity in zip(
            actors, self._watch("start", "identify").wait(actors, [i for i, _ in self._starting])
        ):
            actor.identity = identity
        self._watch("start", "start").wait(actors, [ref for _, ref in self._starting])
        self._starting = None

    def call(self, method: str, phase: str, *args: Any, actors: Sequence[RemoteActor] | None = None) -> list[Any]:
        """`method` on the engines that live, or on `actors`; the answers in order."""
        chosen = self.actors if actors is None else actors
        return self._watch(phase, method).wait(
            chosen, [getattr(actor.handle, method).remote(*args) for actor in chosen]
        )

    def sleep(self) -> None:
        """All engines give their devices up; the next request, or `wake_up`, takes them again. Idempotent."""
        with self._sleep_lock:
            if not self._asleep:
                self.call("sleep", "score")
                self._asleep = True

    def wake_up(self) -> None:
        """Idempotent."""
        with self._sleep_lock:
            if self._asleep:
                self.call("wake_up", "sync")
                self._asleep = False

    def set_version(self, version: int) -> None:
        """All engines confirmed it."""
        self._version = version
        self._router.forget()

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Raises EngineError where no engine is left, or the request cannot be answered."""
        if self._starting is not None:
            await asyncio.to_thread(self.wait_ready)
        if self._asleep:
            await asyncio.to_thread(self.wake_up)
        if self._monitor is None or self._monitor.done():
            self._monitor = asyncio.get_running_loop().create_task(self._watch_over())
        for _ in range(_MAX_ATTEMPTS):
            engine = await self._choose(request)
            answer = await self._ask(engine, request)
            if answer is not None:
                output: GenerationOutput = answer.unwrap()
                return output
        raise EngineError(f"request {request.request_id}: {_MAX_ATTEMPTS} engines died over it")

    def close(self) -> None:
        """Ends the engines."""
        kill(self.actors)

    async def _choose(self, request: GenerationRequest) -> _Engine:
        while True:
            alive = {index for index, engine in enumerate(self._engines) if engine.alive}
            if alive:
                load = [len(engine.in_flight) for engine in self._engines]
                return self._engines[self._router.choose(request.prompt_token_ids, load, alive)]
            if not self._revivals:
                raise EngineError("no engine is left. Their last words are above; see generator.vllm.max_restarts")
            await asyncio.wait(set(self._revivals), return_when=asyncio.FIRST_COMPLETED)

    async def _ask(self, engine: _Engine, request: GenerationRequest) -> Answer | None:
        """The answer; None where the engine died over it."""
        actor = engine.actor
        pending: asyncio.Future[Any] = asyncio.wrap_future(actor.handle.generate.remote(request).future())
        engine.in_flight.add(pending)
        try:
            answer: Answer = await pending
            return answer
        except ray.exceptions.RayError as error:
            self._lose(engine, actor, f"died: {reason_of(error)}")
            return None
        except asyncio.CancelledError:
            if engine.actor is actor and engine.alive:
                actor.handle.abort.remote(request.request_id)
                raise
            task = asyncio.current_task()
            if task is not None and getattr(task, "cancelling", lambda: 0)():
                raise
            return None
        finally:
            engine.in_flight.discard(pending)
            if self._monitor is not None and not any(other.in_flight for other in self._engines):
                self._monitor.cancel()

    def _lose(self, engine: _Engine, actor: RemoteActor, reason: str) -> None:
        """Gives an engine up, once, and has it started anew."""
        if engine.actor is not actor or not engine.alive:
            return
        engine.alive = False
        logger.warning("%s %s\n%s", actor, reason, actor.log_tail())
        kill([actor])
        for pending in list(engine.in_flight):
            pending.cancel()
        if engine.num_restarts < self._config.generator.vllm.max_restarts:
            engine.num_restarts += 1
            task = asyncio.get_running_loop().create_task(self._revive(engine))
            self._revivals.add(task)
            task.add_done_callback(self._revivals.discard)

    async def _revive(self, engine: _Engine) -> None:
        """A new actor in the old one's place. It serves once it has the current weights, or not at all."""
        index = self._engines.index(engine)
        try:
            actor = self._launch(index)
            await asyncio.to_thread(self._start_alone, actor)
        except Exception as error:
            logger.warning("engine %d could not be started anew: %s", index, error)
            return
        engine.actor, engine.alive = actor, True
        logger.warning("%s serves again, with weights of version %d", actor, self._version)

    def _start_alone(self, actor: RemoteActor) -> None:
        identify, start = self._begin_start(actor)
        actor.identity = self._watch("restart", "identify", starting=True).wait([actor], [identify])[0]
        self._watch("restart", "start", starting=True).wait([actor], [start])
        self.bring_up_to_date(actor)

    async def _watch_over(self) -> None:
        """Asks each engine for a sign of life while requests are in flight."""
        limit = self._config.placement.silence_timeout_s
        while any(engine.in_flight for engine in self._engines):
            for engine in [engine for engine in self._engines if engine.alive]:
                actor = engine.actor
                try:
                    await asyncio.wait_for(asyncio.wrap_future(ask_for_sign_of_life(actor).future()), limit)
                except asyncio.TimeoutError:
                    self._lose(engine, actor, f"gave no sign of life for {limit:g} s")
                except ray.exceptions.RayError as error:
                    self._lose(engine, actor, f"died: {reason_of(error)}")
            await asyncio.sleep(min(1.0, limit / 10))

    def _launch(self, index: int) -> RemoteActor:
        variables = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
        env = self._session.runtime_env(self._config.platform.num_threads, **variables)
        worker = ray.remote(concurrency_groups={HEALTH: 1})(EngineWorker)
        return RemoteActor(
            handle=worker.options(max_restarts=0, runtime_env=env, **self._slots[index].options).remote(self._config),
            role="vllm engine",
            rank=index,
            log_folder=self._session.log_folder,
        )

    def _begin_start(self, actor: RemoteActor) -> tuple[Any, Any]:
        return actor.handle.identify.remote(), actor.handle.start.remote()

    def _watch(self, phase: str, what: str, *, starting: bool = False) -> Watch:
        placement = self._config.placement
        slow = starting or phase == "start"
        return Watch(
            phase=phase,
            what=what,
            timeout_s=placement.start_timeout_s if slow else placement.call_timeout_s,
            silence_timeout_s=placement.start_timeout_s if slow else placement.silence_timeout_s,
        )


def _no_weights(actor: RemoteActor) -> None:
    raise EngineError(f"{actor} cannot get the current weights: nothing was synced yet")
