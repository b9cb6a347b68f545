"""The inference engines of a run on Ray actors: `EngineGroup`, and behind one `InferenceEngine` `GroupEngine`.

A request goes to the engine that knows the beginning of its prompt. An engine that dies or falls silent is given up: its
requests go to the others at once, and it is started again and brought to the current weights beside them. Where another is
far faster, an engine keeps no request for longer than that one would take for all its tokens, several times over. A request
has one answer whatever happens: what was computed of it is lost with its engine, and the seed makes the same again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from skyrl_train.cluster.calls import HEALTH, Answer, RemoteActor, ask_for_sign_of_life, kill, reason_of, silent_for
from skyrl_train.cluster.endpoints import RayEndpoint, Submitted
from skyrl_train.cluster.engine_worker import EngineWorker
from skyrl_train.cluster.placement import Slot
from skyrl_train.cluster.rollouts import Made, MakesRollouts, Part
from skyrl_train.cluster.session import RaySession, forwarded_environment
from skyrl_train.errors import ActorLostError, DeadlineError, EngineDeadError, EngineError
from skyrl_train.inference import Paces, PrefixRouter, RequestGate, ServedTokens
from skyrl_train.types import GenerationOutput, GenerationRequest
from skyrl_train.weight_sync import UpdatableEngine

if TYPE_CHECKING:
    from skyrl_train.config.models import PlacementConfig
    from skyrl_train.endpoints import Endpoint, Pending, Phase
    from skyrl_train.inference import EngineSettings
    from skyrl_train.registry import PartSpec
    from skyrl_train.weight_sync import DeviceSharing, WeightSync

_MAX_LEAD = 32
"""Requests that an engine may have in flight beyond the least busy one before prefixes stop to count."""
_MAX_ATTEMPTS = 4
_CLOSE_TIMEOUT_S = 10.0
"""How long threads that start an engine again may take to see that it was ended."""
_LOOK_EVERY_S = 0.5
_OVERDUE = "is far slower than another engine"

logger = logging.getLogger(__name__)


class EngineGroup:
    """One actor per slot, known by its index. A dead one keeps its index, for whoever takes its place."""

    def __init__(
        self,
        backend: PartSpec,
        settings: EngineSettings,
        placement: PlacementConfig,
        session: RaySession,
        slots: Sequence[Slot],
        *,
        num_threads: int,
        max_restarts: int,
        rollouts: MakesRollouts | None = None,
    ) -> None:
        """Start the actors and return at once; `wait_ready` waits for them.

        Args:
            backend: What makes an engine (`generator.backend`).
            settings: What it is made from.
            placement: Deadlines.
            session: Where the actors run.
            slots: One for each engine.
            num_threads: CPU threads of an actor.
            max_restarts: How often one engine may be started again.
            rollouts: What makes rollouts beside each engine, where they are made there.
        """
        self._backend, self._settings, self._placement = backend, settings, placement
        self._session, self._slots, self.images = session, slots, session.images
        self.start_timeout_s = placement.start_timeout_s
        self._num_threads, self._max_restarts, self._rollouts = num_threads, max_restarts, rollouts
        self._in_order = threading.Lock()
        self._restarts = [0] * len(slots)
        self._late: dict[int, RemoteActor] = {}
        """Engines that were started again and have no weights yet, by index."""
        self._closed = threading.Event()
        self._restarting: dict[int, RemoteActor] = {}
        """Engines that threads are bringing up, by index."""
        self.actors = [self._launch(index) for index in range(len(slots))]
        """By index; of a dead engine, what it was."""
        self.alive = [True] * len(slots)
        self._starting: Pending[None] | None = self.workers(self.actors).begin_asking(EngineWorker.start, "start")

    @property
    def ready(self) -> bool:
        """Whether `wait_ready` would return at once."""
        return self._starting is None

    def wait_ready(self) -> None:
        """Wait until every engine has loaded the model. Raises DeadlineError, ActorError, EngineError."""
        starting = self._starting
        if starting is None:
            return
        self._locate(self.actors, "start")
        starting.wait()  # of several threads that wait, the first to be done forgets it
        self._starting = None

    @property
    def has_late(self) -> bool:
        """Whether an engine waits for the next weights."""
        return bool(self._late)

    def living(self) -> Endpoint[UpdatableEngine]:
        """Return the engines that serve, in order."""
        return self._endpoint([actor for actor, alive in zip(self.actors, self.alive) if alive])

    def workers(self, actors: Sequence[RemoteActor]) -> RayEndpoint[EngineWorker]:
        """Return the actors themselves, whatever they know of the model."""
        return RayEndpoint(EngineWorker, actors, self._placement, self._in_order)

    def for_update(self) -> Endpoint[UpdatableEngine]:
        """Return the engines that are to take the next weights: those that serve, and those that waited for weights."""
        for index, actor in self._late.items():
            self._admit(index, actor)
        self._late.clear()
        return self.living()

    def lose(self, index: int, reason: str) -> bool:
        """Give an engine up, and return whether it may be started again."""
        actor = self.actors[index]
        self.alive[index] = False
        logger.warning("%s %s\n%s", actor, reason, actor.log_tail())
        kill([actor])
        self._restarts[index] += 1
        return self._restarts[index] <= self._max_restarts

    def restart(
        self, index: int, catch_up: Callable[[Endpoint[UpdatableEngine], Callable[[bool], None]], None]
    ) -> None:
        """Start an actor in a dead one's place, which serves once it has weights.

        `catch_up` brings them to it, and says whether there were any; if not it waits for the next update. Raises as
        `wait_ready` does.
        """
        actor = self._restarting[index] = self._launch(index, awaits_weights=True)
        try:
            if self._closed.is_set():  # in between: nobody else would end it
                kill([actor])
                raise EngineError("the engines were closed")
            starting = self.workers([actor]).begin_asking(EngineWorker.start, "restart")
            self._locate([actor], "restart")
            starting.wait()
            catch_up(self._endpoint([actor]), partial(self._join, index, actor))
        finally:
            self._restarting.pop(index)

    def is_closed(self) -> bool:
        """Return whether the engines end, or have ended."""
        return self._closed.is_set()

    def close(self) -> None:
        """End the engines, those that are being started again included; their threads see that within moments, and are
        waited for that long."""
        self._closed.set()
        kill([actor for actor, alive in zip(self.actors, self.alive) if alive])
        kill([*self._late.values(), *list(self._restarting.values())])
        ends = time.monotonic() + _CLOSE_TIMEOUT_S
        while self._restarting and time.monotonic() < ends:
            time.sleep(0.1)

    def _join(self, index: int, actor: RemoteActor, has_weights: bool) -> None:
        if has_weights:
            self._admit(index, actor)
            logger.warning("%s serves again, with the weights of the last sync", actor)
        else:
            self._late[index] = actor
            logger.warning("%s was started again and waits for the next weights", actor)

    def _admit(self, index: int, actor: RemoteActor) -> None:
        self.actors[index], self.alive[index] = actor, True

    def _endpoint(self, actors: Sequence[RemoteActor]) -> RayEndpoint[UpdatableEngine]:
        return RayEndpoint(UpdatableEngine, actors, self._placement, self._in_order)

    def _launch(self, index: int, *, awaits_weights: bool = False) -> RemoteActor:
        env = self._session.runtime_env(self._num_threads, VLLM_LOGGING_LEVEL="WARNING", VLLM_NO_USAGE_STATS="1")
        worker, slot = ray.remote(concurrency_groups={HEALTH: 1})(EngineWorker), self._slots[index]
        options = worker.options(max_restarts=0, runtime_env=env, **slot.options)
        secrets, settings = forwarded_environment(secret=True), replace(self._settings, awaits_weights=awaits_weights)
        return RemoteActor(
            handle=options.remote(
                self._backend,
                settings,
                secrets=secrets,
                visible_devices=slot.visible_devices,
                rollouts=self._rollouts,
            ),
            role="inference engine",
            rank=index,
            log_folder=self._session.log_folder,
        )

    def _locate(self, actors: Sequence[RemoteActor], phase: Phase) -> None:
        for actor, identity in zip(actors, self.workers(actors).ask(EngineWorker.identify, phase)):
            actor.found_at(identity)


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What one engine is to answer, and another one where it dies over it."""

    name: str
    choose: Callable[[], int]
    """The index of a living engine."""
    begin: Callable[[RayEndpoint[EngineWorker], int], Submitted[Any]]
    """Hands it to an engine; given how many were asked before."""
    count: Callable[[int, Any], int]
    """Takes note of an engine's answer, and returns its tokens."""
    max_tokens: int | None = None
    """Of the answer, by which an engine is found that is too slow; None leaves it the time that it takes."""


class GroupEngine:
    """Implements `InferenceEngine`. `generate` is used from one event loop, everything else from one other thread."""

    def __init__(
        self,
        group: EngineGroup,
        sharing: DeviceSharing,
        updates: WeightSync,
        *,
        silence_timeout_s: float,
        gate: RequestGate | None = None,
        room: int | None = None,
    ) -> None:
        """
        Args:
            group: The engines.
            sharing: Who has the devices when.
            updates: Brings weights to them.
            silence_timeout_s: An engine that gives no sign of life for so long while it owes answers is taken for dead.
            gate: What `quiet` shuts; None where nothing is asked while the policy trains, so that no sync comes meanwhile.
            room: Requests that one engine computes together; None where it is not known.
        """
        self.group = group
        self._sharing, self._updates = sharing, updates
        self._silence_timeout_s = silence_timeout_s
        self._gate, self._may_sync = gate or RequestGate(), gate is not None
        self._router = PrefixRouter(max_lead=_MAX_LEAD, room=room)
        self._routed_version = -1
        self._in_flight: list[set[asyncio.Future[Any]]] = [set() for _ in group.actors]
        self._monitor: asyncio.Task[None] | None = None
        self._revivals: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._paces = Paces(len(group.actors))
        self._served = ServedTokens(len(group.actors))
        self._num_moved = 0

    @property
    def weight_version(self) -> int:
        """Version of the last sync that all engines confirmed."""
        return self._updates.version

    @contextlib.contextmanager
    def lease(self) -> Iterator[None]:
        """Requests join and leave a running batch, so nothing waits for anybody."""
        yield

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Raises ActorLostError where no engine is left, EngineError where the request cannot be answered."""
        sent = self.group.images.parted(request)

        def count(index: int, output: GenerationOutput) -> int:
            self._served.add(index, request, output)
            return len(output.token_ids)

        asked = _Asked(
            name=request.request_id,
            choose=partial(self._choose, request),
            begin=lambda worker, _: worker.begin_asking(EngineWorker.generate, "generate", *sent),
            count=count,
            max_tokens=request.sampling.max_generate_length,
        )
        output: GenerationOutput = await self._answer_to(asked)
        return output

    async def roll_out(self, part: Part) -> Made:
        """Have an engine make all samples of some prompts, beside it. Raises as `generate` does, and what the engine's
        actor raises on purpose."""
        asked = _Asked(
            name=part.name,
            choose=self._least_busy,
            begin=lambda worker, attempt: worker.begin_asking(EngineWorker.roll_out, "generate", part, attempt),
            count=lambda *_: 0,
        )
        made: Made = await self._answer_to(asked)
        return made

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Hold requests back for a weight sync, once those that run have ended, and give up engines that died meanwhile.

        For a thread that is not the event loop's. Raises ActorLostError where no engine is left, DeadlineError.
        """
        with self._gate.shut():
            if self._loop is not None and not self._loop.is_closed():
                limit_s = self._silence_timeout_s * len(self.group.actors) + 2 * self.group.start_timeout_s
                asking = asyncio.run_coroutine_threadsafe(self._require_engine(), self._loop)
                if not wait([asking], timeout=limit_s).done:
                    raise DeadlineError("engines, asked for a sign of life before a weight sync,", limit_s)
                asking.result()
            yield

    def take_metrics(self) -> dict[str, float]:
        """Return what was served, asked again elsewhere and held back since the last time, and how many engines serve."""
        moved, self._num_moved = self._num_moved, 0
        return {
            **self._served.take(),
            "engines/serving": float(sum(self.group.alive)),
            "engines/requests_moved": float(moved),
            **self._gate.take_metrics(),
        }

    def close(self) -> None:
        """End the engines."""
        self.group.close()

    async def _require_engine(self) -> None:
        """Look whether engines live, and wait until one is there for the next weights."""
        await self._look()
        while not any(self.group.alive) and not self.group.has_late:
            await self._next_revival()

    async def _next_revival(self) -> None:
        """Wait a moment for an engine that is being started again. Raises ActorLostError where none is."""
        if self._revivals:  # each of them has the deadlines of a start
            await asyncio.wait(set(self._revivals), timeout=_LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
        elif self.group.has_late and self._may_sync:  # it is given the weights of the next sync
            await asyncio.sleep(_LOOK_EVERY_S)
        elif not any(self.group.alive):
            rule = "no inference engine is left. Their last words are above; see generator.vllm.max_restarts"
            raise ActorLostError(rule, phase="generate")

    async def _answer_to(self, asked: _Asked) -> Any:
        if not self.group.ready:
            await asyncio.to_thread(self.group.wait_ready)
        if not self._sharing.engines_serve:
            await asyncio.to_thread(self._sharing.engines)
        self._loop = asyncio.get_running_loop()
        num_attempts = _MAX_ATTEMPTS + len(self.group.actors) - 1
        for attempt in range(num_attempts):
            answer = await self._attempt(asked, attempt)
            if answer is not None:
                return answer.unwrap()
            self._num_moved += 1
        raise EngineError(f"request {asked.name}: {num_attempts} engines died over it, or were too slow")

    async def _attempt(self, asked: _Asked, attempt: int) -> Answer | None:
        """Return the answer of an engine; None where it is to be asked for again."""
        while True:
            while not any(self.group.alive):
                await self._next_revival()
            async with self._gate.request():
                if any(self.group.alive):  # still, after what may have been a sync
                    return await self._ask(asked.choose(), asked, attempt)

    def _choose(self, request: GenerationRequest) -> int:
        if self._routed_version != self._updates.version:
            self._routed_version = self._updates.version
            self._router.forget()
            self._paces.trust_all()
        alive = [index for index, lives in enumerate(self.group.alive) if lives]
        load = [len(each) for each in self._in_flight]
        return self._router.choose(request.prompt_token_ids, load, self._paces.fit_of(alive))

    def _least_busy(self) -> int:
        alive = [index for index, lives in enumerate(self.group.alive) if lives]
        return min(alive, key=lambda index: len(self._in_flight[index]))

    async def _ask(self, index: int, asked: _Asked, attempt: int) -> Answer | None:
        """Return the answer; None where the engine died over it, or is far slower than another."""
        actor = self.group.actors[index]
        worker = self.group.workers([actor])
        pending = asked.begin(worker, attempt).future()
        self._in_flight[index].add(pending)
        if asked.max_tokens is not None:
            self._paces.begin(index, pending, asked.max_tokens)
        if self._monitor is None or self._monitor.done():
            self._monitor = asyncio.get_running_loop().create_task(self._watch_over())
        num_tokens = 0
        try:
            answer = await pending
            if not isinstance(answer.error, EngineDeadError):
                if answer.error is None:
                    num_tokens = asked.count(index, answer.value)
                return answer
            self._lose(index, actor, f"died: {answer.error}")
            return None
        except ray.exceptions.RayError as error:
            self._lose(index, actor, f"died: {reason_of(error)}")
            return None
        except asyncio.CancelledError as error:
            if self._serves(index, actor):
                worker.begin_asking(EngineWorker.abort, "generate", asked.name)
                if error.args != (_OVERDUE,):
                    raise
            task = asyncio.current_task()
            if task is not None and getattr(task, "cancelling", lambda: 0)():
                raise
            return None
        finally:
            self._in_flight[index].discard(pending)
            if asked.max_tokens is not None:
                self._paces.end(pending, num_tokens)
            if self._monitor is not None and not any(self._in_flight):
                self._monitor.cancel()

    def _serves(self, index: int, actor: RemoteActor) -> bool:
        return self.group.alive[index] and self.group.actors[index] is actor

    def _lose(self, index: int, actor: RemoteActor, reason: str) -> None:
        """Give an engine up, once, and have it started again."""
        if not self._serves(index, actor):
            return
        may_return = self.group.lose(index, reason)
        for pending in list(self._in_flight[index]):
            pending.cancel()
        if may_return:
            task = asyncio.get_running_loop().create_task(self._revive(index))
            self._revivals.add(task)
            task.add_done_callback(self._revivals.discard)

    async def _revive(self, index: int) -> None:
        try:
            await asyncio.to_thread(self._restart, index)
        except Exception as error:
            logger.warning("engine %d could not be started again: %s", index, error)

    def _restart(self, index: int) -> None:
        with self._sharing.starting_engine(self.group.is_closed):
            self.group.restart(index, self._updates.catch_up)

    async def _watch_over(self) -> None:
        """Look after the engines while requests are in flight."""
        while any(self._in_flight):
            await self._look()
            alive = [index for index, lives in enumerate(self.group.alive) if lives]
            for index, pending in self._paces.overdue(alive):
                logger.warning("%s %s: a request of it is moved", self.group.actors[index], _OVERDUE)
                pending.cancel(_OVERDUE)
            await asyncio.sleep(min(1.0, self._silence_timeout_s / 10))

    async def _look(self) -> None:
        """Ask each engine for a sign of life, and give up those that have none."""
        limit = self._silence_timeout_s
        for index, actor in [(n, actor) for n, actor in enumerate(self.group.actors) if self.group.alive[n]]:
            try:
                await asyncio.wait_for(asyncio.wrap_future(ask_for_sign_of_life(actor).future()), limit)
            except asyncio.TimeoutError:
                actor.is_silent = True
                self._lose(index, actor, await silent_for(limit))
            except ray.exceptions.RayError as error:
                self._lose(index, actor, f"died: {reason_of(error)}")
