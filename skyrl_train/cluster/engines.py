"""`EnginePool`: vLLM engines on Ray actors behind one `InferenceEngine`.

A request goes to the engine that knows the beginning of its prompt. An engine that dies or falls silent is given up: its
requests go to the others at once, and it is started anew and brought to the current weights beside them. A request has
one answer whatever happens: what a dead engine had computed is lost with it, and the seed makes the same again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import ray

from skyrl_train.cluster.calls import Answer, RemoteActor, ask_for_sign_of_life, reason_of
from skyrl_train.cluster.fleet import EngineFleet
from skyrl_train.errors import EngineDeadError, EngineError
from skyrl_train.inference.routing import PrefixRouter
from skyrl_train.types import GenerationOutput, GenerationRequest

if TYPE_CHECKING:
    from skyrl_train.learner.turns import DeviceTurns

_MAX_LEAD = 32
"""Requests that an engine may have in flight beyond the least busy one before prefixes stop to count."""
_MAX_ATTEMPTS = 4

logger = logging.getLogger(__name__)


class EnginePool:
    """Implements `InferenceEngine`. `generate` is used from one event loop, everything else from one other thread."""

    def __init__(self, fleet: EngineFleet, turns: DeviceTurns, *, silence_timeout_s: float) -> None:
        """An engine that gives no sign of life for `silence_timeout_s` while it owes answers is taken for dead."""
        self.fleet = fleet
        self._turns = turns
        self._silence_timeout_s = silence_timeout_s
        self._router = PrefixRouter(max_lead=_MAX_LEAD)
        self._version = -1
        self._in_flight: list[set[asyncio.Future[Any]]] = [set() for _ in fleet.actors]
        self._monitor: asyncio.Task[None] | None = None
        self._revivals: set[asyncio.Task[None]] = set()
        self.bring_up_to_date: Callable[[int, RemoteActor], None] = _no_weights
        """Gives a restarted engine the current weights, and its place back; the transport sets it."""

    @property
    def weight_version(self) -> int:
        """Of the last sync that all engines confirmed."""
        return self._version

    @contextlib.contextmanager
    def lease(self) -> Iterator[None]:
        """Requests join and leave a running batch, so nothing waits for anybody."""
        yield

    def set_version(self, version: int) -> None:
        """All engines confirmed it."""
        self._version = version
        self._router.forget()

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Raises EngineError where no engine is left, or the request cannot be answered."""
        if not self.fleet.ready:
            await asyncio.to_thread(self.fleet.wait_ready)
        if not self._turns.engines_serve:
            await asyncio.to_thread(self._turns.engines)
        if self._monitor is None or self._monitor.done():
            self._monitor = asyncio.get_running_loop().create_task(self._watch_over())
        for _ in range(_MAX_ATTEMPTS):
            answer = await self._ask(await self._choose(request), request)
            if answer is not None:
                output: GenerationOutput = answer.unwrap()
                return output
        raise EngineError(f"request {request.request_id}: {_MAX_ATTEMPTS} engines died over it")

    def close(self) -> None:
        """Ends the engines."""
        self.fleet.close()

    async def _choose(self, request: GenerationRequest) -> int:
        while True:
            alive = {index for index, lives in enumerate(self.fleet.alive) if lives}
            if alive:
                return self._router.choose(request.prompt_token_ids, [len(each) for each in self._in_flight], alive)
            if not self._revivals:
                raise EngineError("no engine is left. Their last words are above; see generator.vllm.max_restarts")
            await asyncio.wait(set(self._revivals), return_when=asyncio.FIRST_COMPLETED)

    async def _ask(self, index: int, request: GenerationRequest) -> Answer | None:
        """The answer; None where the engine died over it."""
        actor = self.fleet.actors[index]
        pending: asyncio.Future[Any] = asyncio.wrap_future(actor.handle.generate.remote(request).future())
        self._in_flight[index].add(pending)
        try:
            answer: Answer = await pending
            if not isinstance(answer.error, EngineDeadError):
                return answer
            self._lose(index, actor, f"died: {answer.error}")
            return None
        except ray.exceptions.RayError as error:
            self._lose(index, actor, f"died: {reason_of(error)}")
            return None
        except asyncio.CancelledError:
            if self._serves(index, actor):
                actor.handle.abort.remote(request.request_id)
                raise
            task = asyncio.current_task()
            if task is not None and getattr(task, "cancelling", lambda: 0)():
                raise
            return None
        finally:
            self._in_flight[index].discard(pending)
            if self._monitor is not None and not any(self._in_flight):
                self._monitor.cancel()

    def _serves(self, index: int, actor: RemoteActor) -> bool:
        return self.fleet.alive[index] and self.fleet.actors[index] is actor

    def _lose(self, index: int, actor: RemoteActor, reason: str) -> None:
        """Gives an engine up, once, and has it started anew."""
        if not self._serves(index, actor):
            return
        may_return = self.fleet.lose(index, reason)
        for pending in list(self._in_flight[index]):
            pending.cancel()
        if may_return:
            task = asyncio.get_running_loop().create_task(self._revive(index))
            self._revivals.add(task)
            task.add_done_callback(self._revivals.discard)

    async def _revive(self, index: int) -> None:
        """A new actor in the old one's place. It serves once it has the current weights, or not at all."""
        try:
            actor = await asyncio.to_thread(self.fleet.start_anew, index)
            await asyncio.to_thread(self.bring_up_to_date, index, actor)
        except Exception as error:
            logger.warning("engine %d could not be started anew: %s", index, error)

    async def _watch_over(self) -> None:
        """Asks each engine for a sign of life while requests are in flight."""
        limit = self._silence_timeout_s
        while any(self._in_flight):
            for index, actor in [(n, actor) for n, actor in enumerate(self.fleet.actors) if self.fleet.alive[n]]:
                try:
                    await asyncio.wait_for(asyncio.wrap_future(ask_for_sign_of_life(actor).future()), limit)
                except asyncio.TimeoutError:
                    self._lose(index, actor, f"gave no sign of life for {limit:g} s")
                except ray.exceptions.RayError as error:
                    self._lose(index, actor, f"died: {reason_of(error)}")
            await asyncio.sleep(min(1.0, limit / 10))


def _no_weights(index: int, actor: RemoteActor) -> None:  # noqa: ARG001
    raise EngineError(f"{actor} cannot get the current weights: nothing was synced yet")
