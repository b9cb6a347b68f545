"""A base of a server in workers on Ray, each on a device of its own: models are spread over them, samples go to the idlest.

    server                                    worker
    RayModels.forward_backward(name, rows) -> Models.forward_backward   of the one that has the model
    RayModels.sampled_from(saved)          -> Models.sampled_from       of the one with the fewest requests

A worker that dies or falls silent is started again, without models. Who asks for one of those gets ActorLostError, and
`take_lost` names it: the server brings it back from its last saved state. Samples are drawn once more by another worker, and
the seed makes the same again. What is saved lies in a folder that all nodes share.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import ray
from numpy.typing import NDArray

from skyrl_train.cluster.calls import (
    HEALTH,
    Answer,
    RemoteActor,
    ask_for_sign_of_life,
    finds,
    kill,
    reason_of,
    silent_for,
)
from skyrl_train.cluster.endpoints import AsyncHost, RayEndpoint
from skyrl_train.cluster.learners import check_shared
from skyrl_train.cluster.placement import Slot
from skyrl_train.cluster.session import RaySession, forwarded_environment
from skyrl_train.endpoints import Phase
from skyrl_train.errors import ActorLostError, SkyrlTrainError
from skyrl_train.serve import BaseFacts, ModelFacts, Models, Rows, Sampled, Saved, ServedModels
from skyrl_train.types import GenerationOutput, GenerationRequest

if TYPE_CHECKING:
    from skyrl_train.config.models import PlacementConfig
    from skyrl_train.data.sources import ImageReading
    from skyrl_train.images import ImageSpans
    from skyrl_train.inference import ScoredSequence
    from skyrl_train.learner import AdamWStep

P = ParamSpec("P")
R = TypeVar("R")

_MAX_ATTEMPTS = 4
"""Workers that are asked for one answer, each of which was lost over it."""

logger = logging.getLogger(__name__)


class ModelsWorker(AsyncHost):
    """The actor. It serves `Models` from `start` on."""

    def __init__(self, load: Callable[[], Models], *, secrets: Mapping[str, str]) -> None:
        """`secrets`: as of `AsyncHost`."""
        super().__init__("serve worker", secrets)
        self._load = load
        self._models: Models | None = None
        self._held: dict[str, tuple[asyncio.Task[Sampled], AsyncExitStack]] = {}
        self._running: dict[str, set[asyncio.Task[Any]]] = {}

    async def finds(self, marker: Path) -> str:
        """Return why this node cannot use the server's folder; see `calls.finds`."""
        return await asyncio.to_thread(finds, marker)

    async def start(self) -> BaseFacts:
        """Load the base. Raises ModelError, EngineError."""
        self._models = await asyncio.to_thread(self._load)
        self._served.add(Models, self._models)
        return self._models.about

    async def hold(self, key: str, saved: Saved | None) -> None:
        """Have what is sampled from at hand until `let_go`, under a new key. Raises as `Models.sampled_from`."""
        if self._models is None:
            raise RuntimeError("the models were not loaded")
        stack = AsyncExitStack()
        entering = asyncio.ensure_future(stack.enter_async_context(self._models.sampled_from(saved)))
        self._held[key] = entering, stack
        await entering

    async def let_go(self, key: str) -> None:
        """Let the engine forget what is held under a key, and give up what is asked of it."""
        entering, stack = self._held.pop(key)
        waits: list[asyncio.Task[Any]] = [entering, *self._running.pop(key, ())]
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        await stack.aclose()

    async def generate(self, key: str, request: GenerationRequest) -> GenerationOutput:
        """As `Sampled.generate`, of what is held."""
        sampled = await self._held[key][0]
        return await self._until_let_go(key, sampled.generate(request))

    async def score(
        self, key: str, tokens: Sequence[int], top_k: int, targets: NDArray[np.int64] | None, spans: ImageSpans
    ) -> ScoredSequence:
        """As `Sampled.score`, of what is held."""
        sampled = await self._held[key][0]
        return await self._until_let_go(key, sampled.score(tokens, top_k=top_k, targets=targets, spans=spans))

    async def _until_let_go(self, key: str, answer: Coroutine[Any, Any, R]) -> R:
        task = asyncio.ensure_future(answer)
        running = self._running.setdefault(key, set())
        running.add(task)
        try:
            return await task
        finally:
            running.discard(task)


class RayModels(ServedModels):
    """Implements `ServedModels` with such workers. Threads may call it beside the event loop."""

    def __init__(
        self,
        load: Callable[[], Models],
        session: RaySession,
        placement: PlacementConfig,
        slots: Sequence[Slot],
        *,
        num_threads: int,
        folder: Path,
        tokenizer: Any,
        images: ImageReading | None = None,
    ) -> None:
        """Start a worker for each slot, and wait until each has called `load`. Raises ConfigError where a node does not have
        the server's `folder`, ActorLostError, DeadlineError, and what loading raises."""
        self._load, self._session, self._placement, self._slots = load, session, placement, slots
        self._num_threads, self.tokenizer, self.images = num_threads, tokenizer, images
        self._in_order, self._losing = threading.Lock(), threading.Lock()
        self._worker_of: dict[str, int] = {}
        """Of each model that is in memory."""
        self._lost: set[str] = set()
        self._requests: Counter[int] = Counter()
        """That workers are to answer with samples, by index."""
        self._keys = itertools.count()
        self._is_closed = False
        self.actors = [self._launch(index) for index in range(len(slots))]
        """By index; of one that is lost, what it was."""
        try:
            self.about = self._bring_up(self.actors, "start")
            workers = self._workers(self.actors)
            check_shared(folder, self.actors, lambda marker: workers.ask(ModelsWorker.finds, "start", marker))
        except BaseException:
            self.close()
            raise

    def create(self, name: str, facts: ModelFacts) -> None:
        """Give it to the worker that has the fewest, if none has it."""
        with self._losing:
            if name not in self._worker_of:
                counts = Counter(self._worker_of.values())
                self._worker_of[name] = min(range(len(self.actors)), key=lambda index: counts[index])
        self._call(name, Models.create, "load", name, facts)

    def remove(self, name: str) -> None:
        """Nothing, where its worker is lost and the model with it."""
        if name in self._worker_of:
            with suppress(ActorLostError):
                self._call(name, Models.remove, "load", name)
            self._worker_of.pop(name, None)

    def has_gradient(self, name: str) -> bool:
        """Ask the model's worker; no worker has it, no gradient. Raises ActorLostError."""
        return name in self._worker_of and self._call(name, Models.has_gradient, "update", name)

    def forward_backward(self, name: str, rows: Rows) -> bytes:
        """Have the model's worker compute it. Raises ActorLostError."""
        return self._call(name, Models.forward_backward, "update", name, rows)

    def together(self, asked: Mapping[str, Rows]) -> dict[str, bytes]:
        """Have all workers compute their models' at the same time; without those of a worker that raised."""
        parts: dict[int, dict[str, Rows]] = {}
        for name, rows in asked.items():
            if name in self._worker_of:
                parts.setdefault(self._worker_of[name], {})[name] = rows
        begun = []
        for index, part in parts.items():
            actor = self.actors[index]
            begun.append((index, actor, self._models(actor).begin(Models.together, "update", part)))
        found: dict[str, bytes] = {}
        for index, actor, pending in begun:
            try:
                found |= pending.wait()[0]
            except ActorLostError as error:
                with suppress(ActorLostError):
                    self._lose(index, actor, str(error))
            except SkyrlTrainError as error:
                logger.info("passes of %d models are computed one by one: %s", len(parts[index]), error)
        return found

    def optim_step(self, name: str, step: AdamWStep) -> Mapping[str, float]:
        """Have the model's worker take it. Raises ActorLostError."""
        return self._call(name, Models.optim_step, "update", name, step)

    def save(self, name: str, folder: Path, *, with_optimizer: bool) -> int:
        """Have the model's worker write it. Raises ActorLostError."""
        return self._call(name, Models.save, "checkpoint", name, folder.absolute(), with_optimizer=with_optimizer)

    def load(self, name: str, folder: Path, *, with_optimizer: bool) -> None:
        """Have the model's worker read it. Raises ActorLostError."""
        self._call(name, Models.load, "load", name, folder.absolute(), with_optimizer=with_optimizer)

    def export(self, saved: Path, folder: Path) -> None:
        """Have the first worker write them. Raises ActorLostError."""
        self._call_worker(0, Models.export, "export", saved.absolute(), folder.absolute())

    @asynccontextmanager
    async def sampled_from(self, saved: Saved | None) -> AsyncIterator[Sampled]:
        """A worker is chosen by the first request, and another one where that is lost."""
        sampled = _OnWorker(self, saved, f"{next(self._keys)}")
        try:
            yield sampled
        finally:
            await sampled.let_go()

    def take_lost(self) -> frozenset[str]:
        """Return the models that were lost with a worker since the last time."""
        with self._losing:
            lost = frozenset(self._lost)
            self._lost.clear()
        return lost

    def close(self) -> None:
        """End the workers at once: they hold nothing that is not saved or made again."""
        self._is_closed = True
        kill(self.actors)

    def idlest(self) -> int:
        """Return the index of the worker with the fewest requests."""
        return min(range(len(self.actors)), key=lambda index: self._requests[index])

    async def ask(
        self,
        index: int,
        actor: RemoteActor,
        method: Callable[Concatenate[ModelsWorker, P], Coroutine[Any, Any, R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Return a worker's answer. Raises ActorLostError where the worker is not at that index any more, or is lost over
        the answer: another one is there, then."""
        if actor is not self.actors[index]:
            raise ActorLostError(f"{actor} is gone", phase="generate")
        self._requests[index] += 1
        try:
            submitted = self._workers([actor]).begin_asking(method, "generate", *args, **kwargs)
            answer: Answer = await self._until_silent(actor, submitted.future())
        except (ray.exceptions.RayActorError, ActorLostError) as error:
            reason = str(error) if isinstance(error, ActorLostError) else f"died: {reason_of(error)}"
            await asyncio.to_thread(self._lose, index, actor, reason)
            raise ActorLostError(f"{actor} {reason}", phase="generate") from None
        finally:
            self._requests[index] -= 1
        found: R = answer.unwrap()
        return found

    async def _until_silent(self, actor: RemoteActor, answer: asyncio.Future[Answer]) -> Answer:
        limit_s = self._placement.silence_timeout_s
        while not (await asyncio.wait({answer}, timeout=limit_s))[0]:
            sign = asyncio.wrap_future(ask_for_sign_of_life(actor).future())
            if not (await asyncio.wait({sign}, timeout=limit_s))[0]:
                actor.is_silent = True
                raise ActorLostError(await silent_for(limit_s), phase="generate")
        return await answer

    def _call(
        self, name: str, method: Callable[Concatenate[Models, P], R], phase: Phase, /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Have the worker of a model do it. Raises ActorLostError, what the method raises on purpose, and ActorError."""
        index = self._worker_of.get(name)
        if index is None:
            raise ActorLostError(f"the worker that had {name} was lost", phase=phase)
        return self._call_worker(index, method, phase, *args, **kwargs)

    def _call_worker(
        self,
        index: int,
        method: Callable[Concatenate[Models, P], R],
        phase: Phase,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        actor = self.actors[index]
        try:
            return self._models(actor).call(method, phase, *args, **kwargs)[0]
        except ActorLostError as error:
            self._lose(index, actor, str(error))
            raise

    def _lose(self, index: int, actor: RemoteActor, reason: str) -> None:
        """Give a worker up, its models with it, and start another one in its place. Raises ActorLostError where that fails:
        the next call finds it lost again."""
        with self._losing:
            if actor is not self.actors[index] or self._is_closed:
                return
            logger.warning("%s is lost and started again: %s", actor, reason)
            lost = {name for name, at in self._worker_of.items() if at == index}
            for name in lost:
                del self._worker_of[name]
            self._lost |= lost
            kill([actor])
            again = self._launch(index)
            try:
                self._bring_up([again], "restart")
            except SkyrlTrainError as error:
                kill([again])
                raise ActorLostError(f"{actor} could not be started again: {error}", phase="restart") from error
            self.actors[index] = again

    def _bring_up(self, actors: Sequence[RemoteActor], phase: Phase) -> BaseFacts:
        workers = self._workers(actors)
        for actor, identity in zip(actors, workers.ask(ModelsWorker.identify, phase)):
            actor.found_at(identity)
        return workers.ask(ModelsWorker.start, phase)[0]

    def _launch(self, index: int) -> RemoteActor:
        env, slot = self._session.runtime_env(self._num_threads), self._slots[index]
        worker = ray.remote(concurrency_groups={HEALTH: 1})(ModelsWorker)
        options = worker.options(max_restarts=0, runtime_env=env, **slot.options)
        return RemoteActor(
            handle=options.remote(self._load, secrets=forwarded_environment(secret=True)),
            role="serve worker",
            rank=index,
            log_folder=self._session.log_folder,
        )

    def _workers(self, actors: Sequence[RemoteActor]) -> RayEndpoint[ModelsWorker]:
        return RayEndpoint(ModelsWorker, actors, self._placement, self._in_order)

    def _models(self, actor: RemoteActor) -> RayEndpoint[Models]:
        return RayEndpoint(Models, [actor], self._placement, self._in_order)


class _OnWorker(Sampled):
    """What one request samples from, on whichever worker it is held."""

    def __init__(self, models: RayModels, saved: Saved | None, key: str) -> None:
        self._models, self._saved, self._key = models, saved, key
        self._at: tuple[int, RemoteActor] | None = None
        self._holding = asyncio.Lock()

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        return await self._answer(ModelsWorker.generate, self._key, request)

    async def score(
        self, tokens: Sequence[int], *, top_k: int = 0, targets: NDArray[np.int64] | None = None, spans: ImageSpans = ()
    ) -> ScoredSequence:
        return await self._answer(ModelsWorker.score, self._key, tokens, top_k, targets, spans)

    async def let_go(self) -> None:
        if self._at is not None:
            with suppress(ActorLostError):
                await self._models.ask(*self._at, ModelsWorker.let_go, self._key)

    async def _answer(
        self,
        method: Callable[Concatenate[ModelsWorker, P], Coroutine[Any, Any, R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        for attempt in range(_MAX_ATTEMPTS):
            try:
                index, actor = await self._held()
                return await self._models.ask(index, actor, method, *args, **kwargs)
            except ActorLostError as error:
                if attempt == _MAX_ATTEMPTS - 1:
                    raise
                logger.warning("samples are drawn once more: %s", error)
        raise AssertionError("unreachable")

    async def _held(self) -> tuple[int, RemoteActor]:
        """Where it is held, chosen where it is nowhere."""
        async with self._holding:
            if self._at is None or self._models.actors[self._at[0]] is not self._at[1]:
                index = self._models.idlest()
                self._at = index, self._models.actors[index]
                await self._models.ask(*self._at, ModelsWorker.hold, self._key, self._saved)
            return self._at
