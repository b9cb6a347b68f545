"""An engine of this machine that computes in processes or on devices of its own, without Ray.

vLLM's core is a process of its own, since vLLM changes classes of transformers for the whole process that it computes in. It
may die, be stopped or hang while this process waits for it, and it may share a GPU with the models.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from typing import Any, Concatenate, ParamSpec, TypeVar

from skyrl_train.endpoints import Endpoint, Pending, Phase
from skyrl_train.errors import DeadlineError
from skyrl_train.interfaces import InferenceEngine
from skyrl_train.types import GenerationOutput, GenerationRequest
from skyrl_train.weight_sync import DeviceSharing, UpdatableEngine

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")

NAME = "the inference engine"
"""In messages."""
_LOOK_EVERY_S = 0.5
"""While an answer is owed: how often it is looked whether a process of the engine is stopped."""


class WatchedEndpoint(Endpoint[UpdatableEngine]):
    """One engine that always answers in time: it says itself that it died, and is given up where it is stopped or hangs."""

    def __init__(self, engine: UpdatableEngine, *, call_timeout_s: float, silence_timeout_s: float) -> None:
        """`silence_timeout_s`: how long a process of the engine may be stopped while an answer is owed."""
        self.engine = engine
        self._call_timeout_s, self._silence_timeout_s = call_timeout_s, silence_timeout_s
        self._stopped_since: float | None = None

    def begin(
        self,
        method: Callable[Concatenate[UpdatableEngine, P], R],
        phase: Phase,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Pending[R]:
        """Have the engine do it on a thread."""
        return self._on_thread(method.__name__, phase, lambda: getattr(self.engine, method.__name__)(*args, **kwargs))

    def begin_each(self, method: Callable[[UpdatableEngine, A], R], phase: Phase, each: Sequence[A], /) -> Pending[R]:
        """Have the engine do it with the one argument that there is."""
        (argument,) = each
        return self._on_thread(method.__name__, phase, lambda: getattr(self.engine, method.__name__)(argument))

    def ask(
        self,
        method: Callable[Concatenate[UpdatableEngine, P], Coroutine[Any, Any, R]],
        phase: Phase,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]:
        """Return the result of a method that is awaited."""
        name = method.__name__
        return self._on_thread(name, phase, lambda: asyncio.run(getattr(self.engine, name)(*args, **kwargs))).wait()

    @property
    def is_local(self) -> bool:
        """True: what it is given is not copied."""
        return True

    @property
    def members(self) -> tuple[object, ...]:
        """The engine, the one member of the group."""
        return (self.engine,)

    @property
    def names(self) -> tuple[str, ...]:
        """The name by which messages call the engine."""
        return (NAME,)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The node of the engine: empty, which is this one."""
        return ("",)

    def _on_thread(self, what: str, phase: Phase, function: Callable[[], R]) -> Pending[R]:
        future: Future[R] = Future()

        def work() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work, name=f"engine-{what}", daemon=True).start()
        return _Watched(self, future, f"{NAME} (phase {phase}, {what})", time.monotonic() + self._call_timeout_s)

    async def answer(self, engine: InferenceEngine, request: GenerationRequest) -> GenerationOutput:
        """Return the answer to a request. Raises EngineError, DeadlineError."""
        pending = asyncio.ensure_future(engine.generate(request))
        try:
            while not (await asyncio.wait({pending}, timeout=_LOOK_EVERY_S))[0]:
                self.require_sign_of_life(f"{NAME} (generate)")
        except BaseException:
            pending.cancel()
            raise
        return pending.result()

    def require_sign_of_life(self, what: str) -> None:
        """Raise DeadlineError where a process of the engine has been stopped for too long."""
        now = time.monotonic()
        if not self.engine.suspended:
            self._stopped_since = None
            return
        self._stopped_since = self._stopped_since or now
        if now - self._stopped_since > self._silence_timeout_s:
            raise DeadlineError(f"{what}: a process of it is stopped (state T of ps) and", self._silence_timeout_s)

    def require_in_time(self, what: str, ends: float) -> None:
        """Raise DeadlineError where a call that had to end at `ends`, of `time.monotonic()`, or the engine is given up."""
        self.require_sign_of_life(what)
        if time.monotonic() > ends:
            remedy = "Raise placement.call_timeout_s if it only needs longer"
            raise DeadlineError(what, self._call_timeout_s, remedy)


class _Watched(Pending[R]):
    def __init__(self, endpoint: WatchedEndpoint, future: Future[R], what: str, ends: float) -> None:
        self._endpoint, self._future, self._what, self._ends = endpoint, future, what, ends

    def wait(self, *others: Pending[Any]) -> list[R]:
        while not wait([self._future], timeout=_LOOK_EVERY_S).done:
            self._endpoint.require_in_time(self._what, self._ends)
        result = self._future.result()
        for other in others:
            other.wait()
        return [result]

    def passed_on(self, index: int = 0) -> R:
        return self.wait()[index]


class LocalEngine:
    """Implements `InferenceEngine`: an engine that is watched, and that may share its device with models. `generate` is used
    from one event loop, everything else from one other thread."""

    def __init__(self, engine: InferenceEngine, watched: WatchedEndpoint, sharing: DeviceSharing) -> None:
        self._engine, self._watched, self._sharing = engine, watched, sharing

    @property
    def weight_version(self) -> int:
        """Version of the last sync that the engine confirmed."""
        return self._engine.weight_version

    def lease(self) -> AbstractContextManager[None]:
        """Announce a trajectory to the engine for as long as the context is open."""
        return self._engine.lease()

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Raises EngineError, EngineDeadError where a process of it is gone, DeadlineError where one is stopped."""
        if not self._sharing.engines_serve:
            await asyncio.to_thread(self._sharing.engines)
        return await self._watched.answer(self._engine, request)

    def close(self) -> None:
        """Close the engine, which ends its processes."""
        self._engine.close()
