"""One inference engine inside a Ray actor: whichever `generator.backend` names. The actor's event loop stays free."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from skyrl_train.cluster.endpoints import AsyncHost
from skyrl_train.cluster.images import Sent, arrived
from skyrl_train.cluster.rollouts import Made, MakesRollouts, Part, RolloutsBesideEngine
from skyrl_train.parts import ENGINES
from skyrl_train.registry import PartSpec
from skyrl_train.types import GenerationOutput, GenerationRequest
from skyrl_train.weight_sync import UpdatableEngine, updatable

if TYPE_CHECKING:
    from skyrl_train.inference import EngineSettings

T = TypeVar("T")

_LOOK_EVERY_S = 0.2


class EngineWorker(AsyncHost):
    """The actor of an engine. It serves an `UpdatableEngine` from `start` on."""

    def __init__(
        self,
        backend: PartSpec,
        settings: EngineSettings,
        *,
        secrets: Mapping[str, str],
        visible_devices: tuple[str, ...] = (),
        rollouts: MakesRollouts | None = None,
    ) -> None:
        """
        Args:
            backend: What makes the engine.
            settings: What it is made from.
            secrets: As of `AsyncHost`.
            visible_devices: GPUs of an engine whose workers share those of several ranks; its own process has one of them
                in Ray's books.
            rollouts: What makes rollouts here, where that is asked for.
        """
        super().__init__("inference engine", secrets)
        if visible_devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible_devices)
        self._backend, self._settings, self._makes_rollouts = backend, settings, rollouts
        self._rollouts: RolloutsBesideEngine | None = None
        self._engine: UpdatableEngine | None = None
        self._running: dict[str, asyncio.Task[Any]] = {}

    async def ping(self) -> bool:
        """Give a sign of life; none while a process of the engine is stopped, since this one alone computes nothing."""
        while self._engine is not None and self._engine.suspended:
            await asyncio.sleep(_LOOK_EVERY_S)
        return True

    async def start(self) -> None:
        """Make the engine, which loads the model."""
        await asyncio.to_thread(self._load)

    async def generate(self, request: GenerationRequest, images: Sent | None = None) -> GenerationOutput:
        """Return the engine's answer to a request, which travels without its images, until it is given up."""
        if self._engine is None:
            raise RuntimeError("the engine was not started")
        if images is not None:
            request = replace(request, images=(await asyncio.to_thread(arrived, images))[0])
        return await self._until_given_up(request.request_id, self._engine.generate(request))

    async def roll_out(self, part: Part, attempt: int) -> Made:
        """Return all samples of some prompts, by reference, until they are given up. `attempt`: how often another engine was
        asked for them before."""
        if self._engine is None or self._makes_rollouts is None:
            raise RuntimeError("the engine was not started, or not for rollouts")
        if self._rollouts is None:
            self._rollouts = RolloutsBesideEngine(self._makes_rollouts, self.generate)
        return await self._until_given_up(part.name, self._rollouts.roll_out(part, attempt))

    async def _until_given_up(self, name: str, answer: Coroutine[Any, Any, T]) -> T:
        task = self._running[name] = asyncio.ensure_future(answer)
        try:
            found: T = await task
            return found
        finally:
            del self._running[name]

    async def abort(self, request_id: str) -> None:
        """Give a request up, or a part of a batch, whose asker does not wait any more."""
        if request_id in self._running:
            self._running[request_id].cancel()

    def _load(self) -> None:
        from skyrl_train.model import load_tokenizer

        self._engine = updatable(ENGINES.resolve(self._backend)(self._settings, load_tokenizer(self._settings.model)))
        self._served.add(UpdatableEngine, self._engine)
