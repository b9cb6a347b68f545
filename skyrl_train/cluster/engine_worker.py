"""One vLLM engine inside a Ray actor. Its event loop stays free: the engine works on a thread of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from skyrl_train.cluster.calls import Answer, Identity, node_address
from skyrl_train.errors import SkyrlTrainError
from skyrl_train.types import GenerationRequest

if TYPE_CHECKING:
    from skyrl_train.config.schema import Config
    from skyrl_train.distributed.process_group import Rendezvous
    from skyrl_train.inference.vllm import VLLMEngine

_LOOK_EVERY_S = 0.2


class EngineWorker:
    """Every method answers with an `Answer`."""

    def __init__(self, config: Config, *, secrets: Mapping[str, str], visible_devices: tuple[str, ...] = ()) -> None:
        """`secrets`: environment variables that Ray must not see. `visible_devices`: of an engine whose workers share the
        GPUs of several ranks, those; its own process has one of them in Ray's books."""
        os.environ.update(secrets)
        if visible_devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible_devices)
        self._config = config
        self._engine: VLLMEngine | None = None

    async def ping(self) -> bool:
        """A sign of life; none while a process of vLLM is stopped, since this one alone computes nothing."""
        while self._engine is not None and self._engine.suspended:
            await asyncio.sleep(_LOOK_EVERY_S)
        return True

    async def identify(self) -> Answer:
        """Where this process is."""
        return Answer(value=Identity(node=node_address(), pid=os.getpid()))

    async def start(self) -> Answer:
        """Loads the model."""

        def load() -> None:
            from skyrl_train.inference.vllm import VLLMEngine
            from skyrl_train.inference.vllm_settings import engine_settings

            self._engine = VLLMEngine(engine_settings(self._config))

        return await _answer(asyncio.to_thread(load))

    async def generate(self, request: GenerationRequest) -> Answer:
        """The response."""
        return await _answer(asyncio.wrap_future(self._started.generate(request)))

    async def abort(self, request_id: str) -> Answer:
        """Gives a request up."""
        self._started.abort(request_id)
        return Answer()

    async def receivers(self) -> Answer:
        """See `VLLMEngine.receivers`."""
        return await _answer(asyncio.to_thread(self._started.receivers))

    async def meet(self, rendezvous: Rendezvous) -> Answer:
        """See `VLLMEngine.meet`."""
        return await _answer(asyncio.to_thread(self._started.meet, rendezvous))

    async def begin_update(self) -> Answer:
        """See `VLLMEngine.begin_update`."""
        return await _answer(asyncio.to_thread(self._started.begin_update))

    async def update(self, announced: Answer) -> Answer:
        """Takes a bucket, as a rank of a learner answered it."""
        return await _answer(asyncio.to_thread(lambda: self._started.update(announced.unwrap())))

    async def finish_update(self, version: int, num_tensors: int) -> Answer:
        """The version that serves from now on."""
        return await _answer(asyncio.to_thread(self._started.finish_update, version, num_tensors))

    async def sleep(self) -> Answer:
        """See `VLLMEngine.sleep`."""
        return await _answer(asyncio.to_thread(self._started.sleep))

    async def wake_up(self, tag: str) -> Answer:
        """See `VLLMEngine.wake_up`."""
        return await _answer(asyncio.to_thread(self._started.wake_up, tag))

    @property
    def _started(self) -> VLLMEngine:
        if self._engine is None:
            raise RuntimeError("the engine was not started")
        return self._engine


async def _answer(result: Any) -> Answer:
    try:
        return Answer(value=await result)
    except SkyrlTrainError as error:
        return Answer(error=error)
